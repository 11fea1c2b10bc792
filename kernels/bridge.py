"""The completion bridge: device events become calls and awaitables.

A waiter thread blocks in the driver on a blocking-sync event, which costs no CPU and no callback:
polling takes the interpreter from the engine, and Python inside a CUDA callback deadlocks between
the driver's lock and the GIL (R9, R25).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Protocol

from kvtide.kernels.device import Device, DeviceLost, Event

Outcome = Callable[[BaseException | None], None]

MAX_WAITERS = 16
"""Waiter threads of one bridge. Each costs a stack and, idle, nothing else."""


class BridgeClosed(RuntimeError):
    """The bridge was closed: nothing would deliver this completion."""


class _Pending:
    __slots__ = ("event", "fn", "key", "taken")

    def __init__(self, event: Event, fn: Outcome, key: Hashable) -> None:
        self.event = event
        self.fn = fn
        self.key = key
        self.taken = False


class _Waiter:
    """One thread's queue. `queue[0]` stays in place while its event is waited for."""

    def __init__(self, name: str, lock: threading.Lock) -> None:
        self.name = name
        self.queue: deque[_Pending] = deque()
        self.wake = threading.Condition(lock)
        self.thread: threading.Thread | None = None


class Bridge:
    """Calls a function when an event of `device` has happened, from a daemon thread.

    Events with the same `key` (a copy stream, say) are delivered in the order of the calls. A
    key has a thread to itself while fewer than `max_waiters` are busy, so that a stalled stream
    delays nobody; beyond that, keys share. Functions must be short and must not raise: what
    they raise goes to `threading.excepthook`, and the thread serves the others.
    """

    def __init__(self, device: Device, name: str, max_waiters: int = MAX_WAITERS) -> None:
        if max_waiters < 1:
            raise ValueError(f"a bridge needs at least one waiter, not {max_waiters}")
        self.device = device
        self.name = name
        self._max_waiters = max_waiters
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        # A key sticks to a waiter only while something of it is pending: order is kept and the
        # table cannot grow with the number of streams that an engine ever had.
        self._keys: dict[Hashable, tuple[_Waiter, int]] = {}
        self._lost: DeviceLost | None = None
        self._closed = False

    def call_when(self, event: Event, fn: Outcome, key: Hashable = None) -> None:
        """Call `fn(None)` once `event` has happened, or `fn(error)` if waiting for it failed.

        Any thread may call this; it never blocks on the device. `key=None` asks for no order.
        Raises `BridgeClosed` after `close`.
        """
        pending = _Pending(event, fn, key)
        with self._lock:
            if self._closed:
                raise BridgeClosed(f"completion bridge {self.name!r} is closed")
            waiter = self._waiter_for(key)
            waiter.queue.append(pending)
            if key is not None:
                count = self._keys[key][1] if key in self._keys else 0
                self._keys[key] = (waiter, count + 1)
            waiter.wake.notify()

    def statistics(self) -> dict[str, int]:
        """Threads that exist, and completions not yet delivered."""
        with self._lock:
            return {
                "waiters": len(self._waiters),
                "pending": sum(len(waiter.queue) for waiter in self._waiters),
            }

    def close(self, deadline: float) -> list[str]:
        """Deliver what is pending, end the threads; returns the names of those still stuck.

        `deadline` is in seconds from now, for all threads together. A stuck thread keeps its
        event and function, delivers if the event happens after all, and ends then; it is a
        daemon and holds up no exit (R15). Idempotent; blocks, so call it off the loop.
        """
        until = time.monotonic() + deadline
        with self._lock:
            self._closed = True
            waiters = list(self._waiters)
            for waiter in waiters:
                waiter.wake.notify()
        stuck = []
        for waiter in waiters:
            thread = waiter.thread
            if thread is None or thread is threading.current_thread():
                continue
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                stuck.append(waiter.name)
        return stuck

    def _waiter_for(self, key: Hashable) -> _Waiter:
        if key is not None and key in self._keys:
            return self._keys[key][0]
        for waiter in self._waiters:
            if not waiter.queue:
                return waiter
        if len(self._waiters) < self._max_waiters:
            waiter = _Waiter(f"kvtide-{self.name}-waiter-{len(self._waiters)}", self._lock)
            thread = threading.Thread(target=self._serve, args=(waiter,), name=waiter.name, daemon=True)
            thread.start()  # if the system has no thread left this raises before anything is queued
            waiter.thread = thread
            self._waiters.append(waiter)
            return waiter
        return min(self._waiters, key=lambda waiter: len(waiter.queue))

    def _serve(self, waiter: _Waiter) -> None:
        while True:
            with self._lock:
                while not waiter.queue:
                    if self._closed:
                        return
                    waiter.wake.wait()
            self._drain(waiter)

    def _drain(self, waiter: _Waiter) -> None:
        """Deliver until the queue is empty, under one guard.

        The device is set before the wait and restored after the last delivery, so that nothing
        stands between an event and its function. Events that have happened already return at
        once from `synchronize`: they are delivered in the same wake-up.
        """
        guard = self.device.guard()
        try:
            guard.__enter__()
        except BaseException as error:  # noqa: BLE001 - it goes to whoever waits, whatever it is
            self._settle(waiter, error)
            return
        try:
            while True:
                with self._lock:
                    if not waiter.queue:
                        break
                    event, lost = waiter.queue[0].event, self._lost
                self._settle(waiter, lost or self._wait(event))
        finally:
            guard.__exit__(None, None, None)

    def _wait(self, event: Event) -> BaseException | None:
        try:
            self.device.synchronize(event)
        except BaseException as error:  # noqa: BLE001 - likewise
            return error
        return None

    def _settle(self, waiter: _Waiter, error: BaseException | None) -> None:
        """Deliver the head of the queue; a lost device ends everybody's waiting at once."""
        with self._lock:
            due = [waiter.queue[0]]
            if isinstance(error, DeviceLost):
                self._lost = error
                # The other queues keep theirs, since their threads may be inside the driver with
                # the first. They are delivered here all the same, and only dropped there.
                due += [pending for other in self._waiters for pending in other.queue]
            fns = []
            for pending in due:
                if not pending.taken:
                    pending.taken = True
                    fns.append(pending.fn)
        for fn in fns:
            try:
                fn(error)
            except BaseException as raised:  # noqa: BLE001 - told, and the others are served
                report = (type(raised), raised, raised.__traceback__, threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(report))
        with self._lock:
            # Only now: a key that looked idle while its function ran could be overtaken.
            done = waiter.queue.popleft()
            if done.key is not None:
                owner, count = self._keys.pop(done.key)
                if count > 1:
                    self._keys[done.key] = (owner, count - 1)


class Observable(Device, Protocol):
    """A device that can watch streams and events that are not kvtide's own."""

    def observe(self, event_or_stream: Any) -> tuple[Event, Hashable]:
        """Capture now what was enqueued so far: an event of this device, and a key of order."""


_bridges: dict[int, tuple[Observable, Bridge]] = {}
_bridges_lock = threading.Lock()


def completed(event_or_stream: Any, *, device: Observable | int | None = None) -> Awaitable[None]:
    """A CUDA event, or all work enqueued on a stream so far, as an awaitable.

    Takes a `torch.cuda.Event`, a `torch.cuda.Stream`, an object with `__cuda_stream__`, or the
    raw handle of a stream as an int (then of `device`, the calling thread's current one unless
    given). The state is captured during this call, not at the `await`. Must be called with a
    running loop. Awaiting raises `DeviceError` if the work failed, `DeviceLost` if the device is
    gone. Cancelling ends the waiting only, never the work.
    """
    loop = asyncio.get_running_loop()
    if device is None or isinstance(device, int):
        from kvtide.kernels.foreign import device_of  # loads the driver's bindings

        device = device_of(event_or_stream, device)
    bridge = _bridge_of(device)
    future: asyncio.Future[None] = loop.create_future()
    event, key = device.observe(event_or_stream)

    def set_outcome(error: BaseException | None) -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def deliver(error: BaseException | None) -> None:
        device.recycle(event)
        try:
            loop.call_soon_threadsafe(set_outcome, error)
        except RuntimeError:
            if not loop.is_closed():  # with the loop went everyone who could have waited
                raise

    try:
        bridge.call_when(event, deliver, key)
    except BaseException:
        device.recycle(event)
        raise
    return future


def close_completions(deadline: float) -> list[str]:
    """End the threads behind `completed`; they start anew at the next call. Names of stuck ones."""
    with _bridges_lock:
        bridges = [bridge for _, bridge in _bridges.values()]
        _bridges.clear()
    until = time.monotonic() + deadline
    return [name for bridge in bridges for name in bridge.close(max(0.0, until - time.monotonic()))]


def _bridge_of(device: Observable) -> Bridge:
    with _bridges_lock:
        if id(device) not in _bridges:
            bridge = Bridge(device, f"completed-{device.kind}{device.index}")
            _bridges[id(device)] = (device, bridge)
        return _bridges[id(device)][1]
