"""A result that comes once: any thread may set it, any loop or thread may wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar

from kvtide.core.errors import WouldBlockLoop

T = TypeVar("T")


class Outcome(Generic[T]):
    """Waiting for it is cancellable and shared; cancelling one wait ends that wait alone."""

    __slots__ = ("_error", "_lock", "_over", "_trace", "_value", "_wakers")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._wakers: dict[object, Callable[[], None]] = {}

    @property
    def over(self) -> bool:
        """Whether there is a result or an error."""
        return self._over

    @property
    def error(self) -> BaseException | None:
        """The error, if it ended with one."""
        return self._error

    def set(self, value: T) -> bool:
        """Give the result. False, and no change, if there is one already."""
        return self._end(value, None)

    def fail(self, error: BaseException) -> bool:
        """Give an error to everyone who waits or will. False if there is a result already."""
        return self._end(None, error)

    def _end(self, value: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._over:
                return False
            self._value, self._error, self._over = value, error, True
            self._trace = error.__traceback__ if error is not None else None
            wakers, self._wakers = self._wakers, {}
        with contextlib.ExitStack() as stack:  # all are woken, also if one of them raises
            for wake in reversed(wakers.values()):
                stack.callback(wake)
        return True

    def when_over(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once, on the thread that ends it (at once if it is over).

        Returns what takes the call back.
        """
        token = object()
        with self._lock:
            if not self._over:
                self._wakers[token] = wake
                return lambda: self._forget(token)
        wake()
        return lambda: None

    def _forget(self, token: object) -> None:
        with self._lock:
            self._wakers.pop(token, None)

    def result(self) -> T:
        """The result, or raises the error. It has to be over."""
        if not self._over:
            raise asyncio.InvalidStateError("there is no result yet")
        if self._error is not None:
            # Its own trace: every `raise` would make the one that all waiters share longer.
            raise self._error.with_traceback(self._trace)
        return self._value  # type: ignore[return-value]

    def __await__(self) -> Generator[Any, None, T]:
        if not self._over:
            loop = asyncio.get_running_loop()
            ended = loop.create_future()

            def end() -> None:
                if not ended.done():
                    ended.set_result(None)

            def wake() -> None:
                try:
                    loop.call_soon_threadsafe(end)
                except RuntimeError:
                    # The loop was closed under its waiter: there is nobody left to tell.
                    if not loop.is_closed():
                        raise

            forget = self.when_over(wake)
            try:
                yield from ended
            finally:
                forget()
        return self.result()

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread for at most `timeout` seconds. Raises `TimeoutError`, and
        `WouldBlockLoop` on the thread of a running loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise WouldBlockLoop("this thread runs an event loop: await instead of wait()")
        ended = threading.Event()
        forget = self.when_over(ended.set)
        try:
            if not ended.wait(timeout):
                raise TimeoutError(f"no result within {timeout} s; the work itself goes on")
        finally:
            forget()
        return self.result()
