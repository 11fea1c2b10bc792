"""A thread for device work: with the bridge's waiters the only one that touches a device.

Submitting copies can block (a stream's queue holds about 1,000 operations), so it never happens on
the event loop (R21), and it happens inside the device's guard or not at all (R18).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kvtide.kernels.device import Device

Failed = Callable[[BaseException], None]


class QueueFull(RuntimeError):
    """The device thread's queue is at its bound: push back, or drop and count."""


class WorkerClosed(RuntimeError):
    """The device thread was closed before this work began: nothing was copied."""


class DeviceThread:
    """One daemon thread that runs callables in order, each inside `device.guard()`."""

    def __init__(self, device: Device, name: str, bound: int = 1024) -> None:
        if bound < 1:
            raise ValueError(f"the bound of a queue is at least 1, not {bound}")
        self.device = device
        self.name = name
        self.bound = bound
        self._queue: deque[tuple[Callable[[], None], Failed]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"kvtide-{name}", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Callables that wait; the running one not counted."""
        return len(self._queue)

    def submit(self, fn: Callable[[], None], on_error: Failed) -> None:
        """Run `fn` on the thread. Never blocks; any thread may call it.

        Exactly one thing happens to work that was accepted: `fn` returns, or `on_error` gets what
        the guard (before `fn`) or `fn` raised, or `WorkerClosed`. `on_error` runs on the thread,
        or on the one that closes. Raises `QueueFull` or `WorkerClosed` at once, calling neither.
        """
        with self._wake:
            if self._closed:
                raise WorkerClosed(f"device thread {self.name!r} is closed")
            if len(self._queue) >= self.bound:
                raise QueueFull(f"device thread {self.name!r} has {self.bound} callables waiting")
            self._queue.append((fn, on_error))
            self._wake.notify()

    def close(self, deadline: float) -> bool:
        """Run what is queued and end the thread; `False` if it is stuck after `deadline` seconds.

        Work that had not begun by then never begins: its `on_error` gets `WorkerClosed`.
        Idempotent. Blocks, so call it off the loop.
        """
        until = time.monotonic() + deadline
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, until - time.monotonic()))
        with self._wake:
            left = list(self._queue)
            self._queue.clear()
        for _, on_error in left:
            self._report(on_error, WorkerClosed(f"device thread {self.name!r} was closed"))
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    if self._closed:
                        return
                    self._wake.wait()
                fn, on_error = self._queue.popleft()
            try:
                with self.device.guard():
                    fn()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it goes to whoever waits
                self._report(on_error, error)
            del fn, on_error  # an idle thread must not keep the last job's memory alive

    def _report(self, on_error: Failed, error: BaseException) -> None:
        try:
            on_error(error)
        except BaseException as raised:  # noqa: BLE001 - told, and the others are served
            report = (type(raised), raised, raised.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(report))
