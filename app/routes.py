"""The REST calls: each asks the cache one thing and says the answer."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

import kvtide
from kvtide.app.models import Alive, ComponentState, MatchAnswer, MatchRequest, Problem, Ready
from kvtide.app.problems import declared, respond

TOKENS_ON_LOOP = 32_768
"""Hashing this many takes some milliseconds; longer prompts are hashed beside the loop."""

router = APIRouter()


async def _of_app(request: Request) -> kvtide.Cache:
    # A coroutine, because FastAPI sends plain functions to a thread.
    cache: kvtide.Cache = request.app.state.cache
    return cache


Cache = Annotated[kvtide.Cache, Depends(_of_app)]


@router.get("/livez", summary="The loop turns", responses=declared(421, 500))
async def livez() -> Alive:
    """200 for as long as the service can answer at all."""
    return Alive()


@router.get(
    "/readyz",
    summary="Every component, its state and its cause",
    response_model=Ready,
    responses=declared(421, 500, 503),
)
async def readyz(cache: Cache) -> Ready | Response:
    """200 unless a component has failed; then 503 that says which, since when and why."""
    components = [ComponentState.model_validate(dataclasses.asdict(part)) for part in cache.health()]
    failed = [part for part in components if part.state == "failed"]
    if failed:
        problem = Problem(
            type="urn:kvtide:problem:not-ready",
            title="Not ready",
            status=503,
            detail="; ".join(f"{part.name}: {part.cause or 'failed'}" for part in failed),
            components=components,
        )
        return respond(problem)
    degraded = any(part.state != "ok" for part in components)
    return Ready(status="degraded" if degraded else "ready", components=components)


@router.get("/v1/stats", summary="What every part counts", responses=declared(421, 500, 503))
async def stats(cache: Cache) -> kvtide.CacheStatistics:
    """Capacity, use, hits and what is in flight. Sizes in bytes, times in seconds."""
    return cache.statistics()


@router.post(
    "/v1/match",
    summary="How much of a prompt is held",
    responses=declared(400, 404, 408, 413, 415, 421, 422, 500, 503),
)
async def match(asked: MatchRequest, cache: Cache) -> MatchAnswer:
    """The longest prefix held, in tokens, by tier. Nothing is pinned."""
    look = partial(
        cache.held,
        asked.tokens,
        hashes=None if asked.hashes is None else [bytes.fromhex(text) for text in asked.hashes],
        namespace=asked.namespace,
        salt=None if asked.salt is None else asked.salt.get_secret_value(),
        extra=bytes.fromhex(asked.extra),
    )
    long = asked.tokens is not None and len(asked.tokens) > TOKENS_ON_LOOP
    held = await asyncio.to_thread(look) if long else look()
    return MatchAnswer(tokens=held.tokens, by_tier=dict(held.by_tier))
