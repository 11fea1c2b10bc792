"""Transfers: what a caller awaits, and the life that stores and loads have in common.

A transfer is driven by whoever brings news (the thread that freed room, the device's waiter
thread, the loop), never by a task of its own: each step decides under the cache's lock and
hands the next piece of work on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvtide.core.errors import (
    CacheClosed,
    DeadlineExceeded,
    KVTideError,
    QueueFull,
    TransferFailed,
)
from kvtide.core.outcome import Outcome
from kvtide.core.protocols import Mark, Stream, Ticket
from kvtide.core.shelf import Claim

if TYPE_CHECKING:
    from kvtide.core.cache import Cache
    from kvtide.core.pages import Pages

T = TypeVar("T")


class Transfer(ABC, Generic[T]):
    """One awaitable movement of blocks.

    `await transfer` gives its result or raises what happened; cancelling ends the waiting,
    never the copy. `await transfer.settled` is True once no copy of it can touch the pages or
    host memory any more, however it ended: only then are its block ids reusable.
    """

    def __init__(self, cache: Cache, pages: Pages, mark: Mark, deadline: float) -> None:
        self.settled: Outcome[bool] = Outcome()
        self.started = time.monotonic()
        self.nbytes = 0
        self._cache = cache
        self._pages = pages
        self._mark = mark
        self._deadline = deadline
        self._result: Outcome[T] = Outcome()
        self._ticket: Outcome[Ticket | None] = Outcome()
        self._claim: Claim | None = None
        self._gated = False
        self._copying = False

    # -- for callers ------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether awaiting it would return or raise at once."""
        return self._result.over

    def __await__(self) -> Generator[Any, None, T]:
        return self._result.__await__()

    def wait(self, timeout: float | None = None) -> T:
        """For threads without a loop: block until it is done. Raises as awaiting would, and
        `TimeoutError` after `timeout` seconds, which ends the waiting alone."""
        return self._result.wait(timeout)

    async def wait_on(self, stream: Stream, *, layer: int) -> None:
        """Return once `stream` has been made to wait for this layer's bytes.

        Raises what the transfer failed with, if it failed before. What is enqueued is a wait
        for an event that has been recorded; await the transfer before you publish results.
        Raises `InvalidRequest` for a layer that the pages don't have.
        """
        self._pages.check_layer(layer)
        ticket = await self._ticket
        if ticket is not None:
            await ticket.wait_on(stream, layer)
        if self._result.error is not None:
            raise self._result.error

    # -- the life, every step under the cache's lock ------------------------------------------

    @abstractmethod
    def _needs_no_room(self) -> bool:
        """Whether it can go on without a reservation."""

    @abstractmethod
    def _attempt(self) -> bool:
        """Take all room that is needed and go on; False, and no change, if there is too little."""

    @abstractmethod
    def _no_room(self, error: KVTideError, *, late: bool) -> None:
        """No room will come; `late`: because the deadline has passed."""

    @abstractmethod
    def _start(self) -> None:
        """It is this transfer's turn: hand the copy to the device."""

    @abstractmethod
    def _let_go(self, error: BaseException | None) -> None:
        """Publish or abort what was to be copied, and unpin everything."""

    @abstractmethod
    def _abandon(self) -> bool:
        """The deadline has passed while it waits for others; True if nothing is left to wait for."""

    def begin(self) -> None:
        """Enter the ledger and take the first step."""
        self._cache.ledger.add(self)
        self._cache.later(self._deadline, self)
        if self._needs_no_room():
            self._attempt()  # it does not queue behind those who wait for room
            return
        host = self._cache.host
        if self._cache.host_failure is not None and not host.extents.total:
            self._no_room(self._cache.host_failure, late=False)
            return
        if len(host.claims) >= self._cache.settings.max_queued:
            self._no_room(QueueFull("too many transfers wait for room already"), late=False)
            return
        self._claim = Claim(self._attempt, self._give_up)
        host.ask(self._claim)

    def _give_up(self, error: KVTideError) -> None:
        self._claim = None
        self._no_room(error, late=False)

    def _enter_gate(self) -> None:
        self._gated = True
        self._cache.gate.enter(self.nbytes, self._admitted)

    def _admitted(self) -> None:
        self._gated = False
        self._copying = True
        try:
            self._start()
        except KVTideError as error:  # the device's queue refused it, or its pages are closed
            self._drop_mark()
            self._copied(error)

    def _on_submitted(self, ticket: Ticket) -> None:
        self._ticket.set(ticket)

    def _on_done(self, error: BaseException | None) -> None:
        """The device's news, on a thread of its own."""
        with self._cache.lock:
            self._copied(error)

    def _copied(self, error: BaseException | None) -> None:
        self._copying = False
        if error is not None and not isinstance(error, KVTideError):
            cause, error = error, TransferFailed(f"the copy failed: {error}")
            error.__cause__ = cause
        self._let_go(error)
        self._cache.gate.leave(self.nbytes)
        if error is not None:
            self._cache.count_failure(error)
            self._finish_error(error)
        self._settle()

    def expire(self) -> None:
        """The deadline has come."""
        with self._cache.lock:
            if self._result.over:
                return
            if self._claim is not None:
                claim, self._claim = self._claim, None
                self._cache.host.withdraw(claim)
                self._no_room(self._cache.host.no_room(f"no room within {self._deadline:g} s"), late=True)
                return
            if self._gated and self._cache.gate.withdraw(self._admitted):
                self._turn_away(self._late())
                return
            self._finish_error(self._late())
            if not self._copying and self._abandon():
                self._settle()

    def shut(self) -> None:
        """The cache is closing: whatever has not begun to copy ends now."""
        with self._cache.lock:
            error = CacheClosed("the cache was closed before this transfer's turn came")
            if self._claim is not None:
                claim, self._claim = self._claim, None
                self._cache.host.withdraw(claim)
                self._no_room(error, late=True)
            elif self._gated and self._cache.gate.withdraw(self._admitted):
                self._turn_away(error)
            elif not self._copying and not self._result.over:
                self._finish_error(error)
                if self._abandon():
                    self._settle()

    def _turn_away(self, error: KVTideError) -> None:
        """It waited for its turn to copy, and will not have it."""
        self._gated = False
        self._drop_mark()
        self._let_go(error)
        self._finish_error(error)
        self._settle()

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"not done within {self._deadline:g} s; its copy may go on, so its block ids are not "
            "reusable before `await transfer.settled`"
        )

    def _finish(self, value: T) -> None:
        self._result.set(value)
        self._ticket.set(None)

    def _finish_error(self, error: BaseException) -> None:
        self._result.fail(error)
        self._ticket.fail(error)

    def _drop_mark(self) -> None:
        """No copy will use the event that was recorded for it."""
        self._pages.endpoint.forget(self._mark)

    def _settle(self) -> None:
        self._cache.ledger.discard(self)
        self.settled.set(True)
