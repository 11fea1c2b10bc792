"""The fake device's streams and events: FIFOs run by threads, which a test can hold and release."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kvtide.kernels.device import DeviceError

Heard = Callable[[DeviceError | None], None]


class FakeEvent:
    """Like CUDA's: waiting means the latest `record` at the time of the call; none is no wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._recorded = 0
        self._happened = 0
        self._error: DeviceError | None = None
        self._listeners: list[tuple[int, Heard]] = []

    def arm(self) -> int:
        """A new recording; returns its number, to be told to `happen`."""
        with self._changed:
            self._recorded += 1
            self._error = None
            return self._recorded

    def happen(self, number: int, error: DeviceError | None = None) -> None:
        with self._changed:
            self._happened = max(self._happened, number)
            self._error = error
            due = [heard for at, heard in self._listeners if at <= number]
            self._listeners = [(at, heard) for at, heard in self._listeners if at > number]
            self._changed.notify_all()
        for heard in due:
            heard(error)

    def fail(self, error: DeviceError) -> None:
        """Whatever is recorded ends with `error`."""
        self.happen(self._recorded, error)

    def when(self, heard: Heard) -> None:
        """Call `heard` once what is recorded now has happened; at once if it has."""
        with self._changed:
            if self._happened < self._recorded:
                self._listeners.append((self._recorded, heard))
                return
            error = self._error
        heard(error)

    def wait(self) -> None:
        """Block until what is recorded now has happened; raises what it ended with."""
        with self._changed:
            number = self._recorded
            self._changed.wait_for(lambda: self._happened >= number)
            if self._error is not None:
                raise self._error


class FakeStream:
    """One thread that runs operations in order. The first failing one fails all events behind it."""

    def __init__(self, device: Any, name: str) -> None:
        self.device = device
        self.name = name
        self.error: DeviceError | None = None
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._held = False
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"fake-{name}", daemon=True)
        self._thread.start()

    def run(self, fn: Callable[[], None]) -> None:
        """Enqueue an engine's kernel, as it were."""
        with self._changed:
            self._queue.append(fn)
            self._changed.notify_all()

    def record(self, event: FakeEvent) -> None:
        number = event.arm()
        self.run(lambda: event.happen(number, self.error))

    def wait(self, event: FakeEvent) -> None:
        """Everything enqueued later runs after what `event` stands for now."""
        heard = threading.Event()

        def hear(error: DeviceError | None) -> None:
            del error  # as in CUDA, a wait passes whatever became of the work before the event
            heard.set()
            with self._changed:
                self._changed.notify_all()

        event.when(hear)
        self.run(lambda: self._until(heard))

    def hold(self) -> None:
        """Stop before the next operation."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def drain(self) -> None:
        """Block until all that is enqueued now has run."""
        event = FakeEvent()
        self.record(event)
        try:
            event.wait()
        except DeviceError:
            return  # whoever waits for the work itself is told

    def close(self) -> None:
        """Run no more, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _until(self, heard: threading.Event) -> None:
        with self._changed:
            self._changed.wait_for(lambda: heard.is_set() or self._closed)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (bool(self._queue) and not self._held))
                if self._closed:
                    return
                operation = self._queue.popleft()
            try:
                operation()
            except DeviceError as error:
                self.error = self.error or error


class FakeSubmitted:
    """A job in the fake's queue."""

    def __init__(
        self,
        device: Any,
        stream: FakeStream,
        events: list[FakeEvent],
        take_back: Callable[[FakeStream, list[FakeEvent], bool], None],
    ) -> None:
        self.stream = stream
        self.done = events[-1]
        self.groups = events[:-1]
        self._device = device
        self._events = events
        self._take_back = take_back
        self._released = False
        self._lock = threading.Lock()

    def wait_on(self, stream: FakeStream, group: int) -> None:
        with self._lock:
            if not self._released:
                self._device.wait_for(stream, self.groups[group])

    def release(self, *, failed: bool = False) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
        self._take_back(self.stream, self._events, failed)
