"""Host memory whose copies a test holds, releases and fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.core.cache import Cache
from kvtide.core.errors import QueueFull
from kvtide.core.extents import extent_of, offset_of
from kvtide.core.outcome import Outcome
from kvtide.core.pages import Pages
from kvtide.core.protocols import Component
from kvtide.core.settings import Settings

TOKENS = 4
IMAGE = 4096


@dataclass
class Geometry:
    """Pages without memory: what `attach` needs to know."""

    blocks: int = 1000
    planes: tuple[tuple[int, int], ...] = ((IMAGE // 2, 0), (IMAGE // 2, 1))
    dtype: str = "float32"


class HeldTicket:
    """Streams may wait at once."""

    def wait_on(self, stream: Any, layer: int) -> Outcome[None]:
        del stream, layer
        over: Outcome[None] = Outcome()
        over.set(None)
        return over


@dataclass
class Copy:
    """One copy in flight."""

    direction: str
    blocks: Sequence[int]
    slots: Sequence[int]
    submitted: Callable[[Any], None]
    done: Callable[[BaseException | None], None]

    def finish(self, error: BaseException | None = None) -> None:
        """End it on a thread of its own, as a device's waiter would."""
        thread = threading.Thread(target=self.run, args=(error,))
        thread.start()
        thread.join()

    def run(self, error: BaseException | None) -> None:
        """End it on this thread."""
        self.submitted(HeldTicket())
        self.done(error)


class HeldMemory:
    """An arena without devices. held: copies that wait for `finish`; with `hold=False` each ends
    at once, with `error` if that is set. marks: events recorded and not yet used or forgotten."""

    def __init__(self, settings: Settings, *, hold: bool = True) -> None:
        self.hold = hold
        self.error: BaseException | None = None
        self.refuse = False
        self.held: list[Copy] = []
        self.marks = 0
        self.copies = 0
        self._extent_bytes = settings.extent_bytes
        self._count = settings.host_bytes // settings.extent_bytes
        self._bytes = bytearray(self._count * settings.extent_bytes)

    def endpoint(self, paged: Any) -> HeldMemory:
        del paged
        return self

    def view(self, slot: int, nbytes: int) -> memoryview:
        at = extent_of(slot) * self._extent_bytes + offset_of(slot)
        return memoryview(self._bytes)[at : at + nbytes]

    def start(self, ready: Callable[[int], None], failed: Callable[[BaseException], None]) -> None:
        del failed
        for number in range(self._count):
            ready(number)

    def health(self) -> list[Component]:
        return []

    def close(self, deadline: float = 0.0, *, keep: bool = False) -> list[str]:
        del deadline, keep
        return []

    def record(self, after: Any) -> object:
        del after
        self.marks += 1
        return object()

    def forget(self, mark: Any) -> None:
        del mark
        self.marks -= 1

    def store(self, blocks: Any, slots: Any, mark: Any, submitted: Any, done: Any) -> None:
        self._copy("store", blocks, slots, submitted, done)

    def load(self, blocks: Any, slots: Any, mark: Any, submitted: Any, done: Any) -> None:
        self._copy("load", blocks, slots, submitted, done)

    def _copy(self, direction: str, blocks: Any, slots: Any, submitted: Any, done: Any) -> None:
        if self.refuse:
            raise QueueFull("the device's queue is full")
        self.copies += 1

        def finished(error: BaseException | None) -> None:
            self.marks -= 1
            done(error)

        copy = Copy(direction, list(blocks), list(slots), submitted, finished)
        if self.hold:
            self.held.append(copy)
        else:
            # On another thread: the caller holds the cache's lock, and a device never does.
            threading.Thread(target=copy.run, args=(self.error,)).start()


def small(blocks: int = 8, **changes: Any) -> Settings:
    """Settings of a host tier with room for so many blocks."""
    fields: dict[str, Any] = {
        "host_bytes": blocks * IMAGE,
        "extent_bytes": IMAGE,
        "block_tokens": TOKENS,
        "deadline": 5.0,
    }
    return Settings(**fields | changes)


def prompt(blocks: int, seed: int = 0) -> list[int]:
    """Tokens of so many full blocks and one more, different for each seed."""
    return [seed * 100_000 + at for at in range(blocks * TOKENS + 1)]


def at_rest(cache: Cache, memory: HeldMemory) -> None:
    """Nothing is pinned, filling, in flight, waiting or recorded."""
    with cache.lock:
        assert not cache.ledger
        assert (cache.gate.bytes, cache.gate.copies, len(cache.gate)) == (0, 0, 0)
        shelves = [cache.host] + ([cache._below.shelf] if cache._below else [])
        for shelf in shelves:
            assert not shelf.claims
            assert not shelf.fills
            assert shelf.pinned_bytes == 0
            assert all(block.pins == 0 for block in shelf.index.nodes.values())
        assert memory.marks == 0


def attach(cache: Cache, **changes: Any) -> Pages:
    """Pages of the small geometry."""
    return cache.attach(Geometry(), **{"namespace": "m"} | changes)
