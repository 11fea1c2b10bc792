"""A bounded pool: never more than `bound` things exist, whatever fails (R20)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class PoolExhausted(RuntimeError):
    """All of a bounded pool is in use, and waiting was not wanted or took too long."""


class PoolClosed(RuntimeError):
    """The pool's device was closed."""


class _Ticket:
    __slots__ = ("count", "granted", "wake")

    def __init__(self, count: int, lock: threading.Lock) -> None:
        self.count = count
        self.granted = False
        self.wake = threading.Condition(lock)


class Pool(Generic[T]):
    """Things that are made on demand up to a bound, and reused.

    `take` hands out several at once or none, first come first served, so that two who each hold
    a part of what they need cannot wait for each other. What comes back last goes out first: a
    pool grows only as far as it is really used. `give` and `discard` never call the device, any
    thread may use them; what was discarded is destroyed by the next `take` or by `close`, which
    run on device threads under the guard. `close` with things still out leaves those alone
    (rather leak than dangle); they are destroyed by nobody.
    """

    def __init__(self, name: str, make: Callable[[], T], destroy: Callable[[T], None], bound: int) -> None:
        if bound < 1:
            raise ValueError(f"the bound of pool {name!r} is at least 1, not {bound}")
        self.name = name
        self.bound = bound
        self._make = make
        self._destroy = destroy
        self._lock = threading.Lock()
        self._free: list[T] = []
        self._condemned: list[T] = []
        self._live = 0  # exist, whoever has them
        self._out = 0  # handed out, or promised to somebody who is making it
        self._line: deque[_Ticket] = deque()
        self._closed = False

    def take(self, count: int = 1, *, timeout: float | None) -> list[T]:
        """Take `count` things, waiting in line for at most `timeout` seconds (`None`: not at all).

        Raises `PoolExhausted`, also at once if `count` is beyond the bound, `PoolClosed`, and
        whatever making one raises; nothing is held then.
        """
        if count > self.bound:
            raise PoolExhausted(f"{count} of {self.name!r} asked for, the bound is {self.bound}")
        with self._lock:
            self._enter(count, timeout)
            taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
            condemned, self._condemned = self._condemned, []
        try:
            self._end(condemned)
            while len(taken) < count:
                taken.append(self._make())
                with self._lock:
                    self._live += 1
        except BaseException:
            with self._lock:
                self._free += taken
                self._out -= count
                self._advance()
            raise
        return taken

    def give(self, things: Iterable[T]) -> None:
        """Put things back for the next one."""
        with self._lock:
            for thing in things:
                self._free.append(thing)
                self._out -= 1
            self._advance()

    def discard(self, things: Iterable[T]) -> None:
        """Put nothing back: these are not to be trusted any more. Their room is free again."""
        with self._lock:
            for thing in things:
                self._condemned.append(thing)
                self._out -= 1
            self._advance()

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "live": self._live,
                "free": len(self._free),
                "bound": self.bound,
                "waiting": len(self._line),
            }

    def close(self) -> None:
        """Destroy what is here, turn away who waits. Call under the device's guard."""
        with self._lock:
            self._closed = True
            for ticket in self._line:
                ticket.wake.notify()
            things = self._free + self._condemned
            self._free, self._condemned = [], []
        self._end(things)

    def _end(self, things: list[T]) -> None:
        with self._lock:
            self._live -= len(things)
        for thing in things:
            self._destroy(thing)

    def _enter(self, count: int, timeout: float | None) -> None:
        """Wait in line; on return `count` are promised. Called with the lock held."""
        if self._closed:
            raise PoolClosed(f"pool {self.name!r} is closed")
        if not self._line and self._out + count <= self.bound:
            self._out += count
            return
        if timeout is None:
            raise PoolExhausted(f"all {self.bound} of {self.name!r} are in use")
        ticket = _Ticket(count, self._lock)
        self._line.append(ticket)
        until = time.monotonic() + timeout
        try:
            while not ticket.granted:
                if self._closed:
                    raise PoolClosed(f"pool {self.name!r} is closed")
                left = until - time.monotonic()
                if left <= 0:
                    raise PoolExhausted(f"no {self.name!r} came free in {timeout} s")
                ticket.wake.wait(left)
        except BaseException:
            if ticket.granted:
                self._out -= count
            else:
                self._line.remove(ticket)
            self._advance()
            raise

    def _advance(self) -> None:
        while self._line and self._out + self._line[0].count <= self.bound:
            ticket = self._line.popleft()
            self._out += ticket.count
            ticket.granted = True
            ticket.wake.notify()
