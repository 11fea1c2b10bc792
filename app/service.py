"""The service: one process that holds a cache and answers REST, from birth to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

import kvtide
from kvtide.app import problems
from kvtide.app.gate import Gate, Hosts
from kvtide.app.listener import CannotListen, CannotStart, Listener, listen, listening
from kvtide.app.models import Problem
from kvtide.app.routes import router

EXIT_FAILED = 1
EXIT_STUCK = 3

_log = logging.getLogger("kvtide.service")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What `kvtide serve` can be told.

    host, port: where to listen; port 0 takes any free one. allow_remote: host may be an address that other
    machines reach. allow_hosts: names, beside localhost, that clients may use in their Host header.
    cache: what the cache itself is told. close_seconds: how long closing the cache may take.
    """

    host: str = "127.0.0.1"
    port: int = 8790
    allow_remote: bool = False
    allow_hosts: tuple[str, ...] = ()
    cache: kvtide.Settings = field(default_factory=kvtide.Settings)
    close_seconds: float = 5.0


class _App(FastAPI):
    """FastAPI, with the shape of problems in its document."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        parts = schema.pop("$defs")
        document["components"]["schemas"].update({"Problem": schema, **parts})
        return document


Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def _app(hosts: Hosts, lifespan: Lifespan | None = None) -> _App:
    app = _App(
        title="kvtide",
        summary="A tiered KV cache for LLM inference",
        version="1",
        lifespan=lifespan,
        # The pages that FastAPI offers load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    problems.install(app)
    app.add_middleware(Gate, hosts=hosts)
    app.add_middleware(problems.InternalErrors)
    app.include_router(router)
    return app


def create_app(settings: ServiceSettings) -> FastAPI:
    """The service as an ASGI application that opens and closes its own cache.

    After its end `app.state.closed` is what closing the cache returned, or None if it did not come so far.
    """

    @contextlib.asynccontextmanager
    async def house(app: FastAPI) -> AsyncIterator[None]:
        # Nothing here watches the cache's background work: a task group around the `yield` would end the
        # lifespan with it, and uvicorn would go on answering 200 in front of nothing. The cache supervises
        # its own, tells those who wait, and /readyz says what has failed.
        async with kvtide.open_cache(settings.cache) as cache:
            app.state.cache = cache
            yield
            app.state.closed = await cache.close(settings.close_seconds)

    app = _app(Hosts(settings.allow_hosts, remote=settings.allow_remote), house)
    app.state.closed = None
    return app


def control(cache: kvtide.Cache, *, allow_hosts: tuple[str, ...] = (), remote: bool = False) -> FastAPI:
    """The same calls for a cache that lives, and is closed, elsewhere in this process."""
    app = _app(Hosts(allow_hosts, remote=remote))
    app.state.cache = cache
    return app


@contextlib.asynccontextmanager
async def serve_beside(cache: kvtide.Cache, host: str = "127.0.0.1", port: int = 8790) -> AsyncIterator[str]:
    """Answer REST for `cache` from the running loop while the block runs; gives the URL.

    host is an address of this machine only; port 0 takes any free one. Signals stay the caller's, and so
    does the cache. Raises `CannotListen`.
    """
    async with listening(control(cache), listen(host, port)) as url:
        yield url


@contextlib.contextmanager
def _first_signal(stop: Callable[[], None]) -> Iterator[None]:
    """The first SIGTERM or SIGINT calls `stop`; what was there before is back for the second."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            if loop.remove_signal_handler(number) and handler is not None:
                signal.signal(number, handler)

    def first(number: signal.Signals) -> None:
        _log.info("%s: stopping", number.name)
        restore()
        stop()

    for number in before:
        loop.add_signal_handler(number, first, number)
    try:
        yield
    finally:
        restore()


async def serve(settings: ServiceSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status of the process.

    0: ended as asked. 1: could not listen or start. 3: something was stuck when the cache closed; the log
    names it. A second signal does not wait for anything.
    """
    try:
        sock = listen(settings.host, settings.port, remote=settings.allow_remote)
    except CannotListen as error:
        _log.error("%s", error)
        return EXIT_FAILED
    app = create_app(settings)
    server = Listener(app, lifespan=True)
    if settings.allow_remote:
        _log.warning("other machines may reach this service, and nothing asks who they are")
    with sock, _first_signal(server.stop):
        try:
            await server.serve(sockets=[sock])
        except CannotStart as error:
            _log.error("%s", error)
            return EXIT_FAILED
    closed: kvtide.Closed | None = app.state.closed
    if closed is None:
        _log.error("the cache was not closed")
        return EXIT_STUCK
    for name in closed.stuck:
        _log.error("stuck: %s", name)
    return EXIT_STUCK if closed.stuck else 0


def openapi_text() -> str:
    """The OpenAPI document as it is kept in `openapi.json`."""
    return json.dumps(create_app(ServiceSettings()).openapi(), indent=2, sort_keys=True) + "\n"
