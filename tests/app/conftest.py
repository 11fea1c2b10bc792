"""A cache that can be told how it is, and a client that speaks to a service without a network."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

import kvtide
from kvtide.app.service import control

STATISTICS = kvtide.CacheStatistics(
    tiers=(),
    lookups=3,
    lookup_tokens=96,
    hit_tokens=32,
    inflight_transfers=0,
    inflight_bytes=0,
    waiting_for_turn=0,
    stored_bytes=0,
    loaded_bytes=0,
    promoted_blocks=0,
    dropped_blocks=0,
    errors={"NoRoom": 1},
)


@dataclass
class FakeCache:
    """Stands for a cache where its state or its end matters, not its blocks."""

    components: tuple[kvtide.Component, ...] = ()
    answer: kvtide.Held | Exception = field(default_factory=lambda: kvtide.Held(32, {"host": 32}))
    stuck: tuple[str, ...] = ()
    asked: list[dict[str, Any]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    closed: int = 0

    def held(self, tokens: list[int] | None = None, **rest: Any) -> kvtide.Held:
        self.asked.append({"tokens": tokens, **rest})
        self.threads.add(threading.get_ident())
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def health(self) -> tuple[kvtide.Component, ...]:
        return self.components

    def statistics(self) -> kvtide.CacheStatistics:
        return STATISTICS

    async def close(self, deadline: float = 5.0) -> kvtide.Closed:
        assert deadline > 0
        self.closed += 1
        return kvtide.Closed(self.stuck)


@pytest.fixture
def fake() -> FakeCache:
    return FakeCache()


@pytest.fixture
def opened(fake: FakeCache, monkeypatch: pytest.MonkeyPatch) -> FakeCache:
    """The fake in place of what `open_cache` opens."""

    @asynccontextmanager
    async def open_cache(settings: kvtide.Settings) -> AsyncIterator[FakeCache]:
        assert settings.host_bytes > 0
        yield fake

    monkeypatch.setattr(kvtide, "open_cache", open_cache)
    return fake


@pytest.fixture
async def client(fake: FakeCache) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(control(fake))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8790") as made:
        yield made
