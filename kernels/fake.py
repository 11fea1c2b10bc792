"""A device for tests of ordering and failure, on CPU memory.

Copies really move bytes, and only when their stream gets there, so that work done too early or
too late shows. Streams can be held, calls can be made to fail or lie, everything is counted, and
the pools are bounded like the real ones.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from ctypes import memmove
from typing import Any

from kvtide.kernels.device import DeviceError, DeviceLost, Direction, Event, Job, Span
from kvtide.kernels.fakestream import FakeEvent, FakeStream, FakeSubmitted
from kvtide.kernels.pool import Pool

CALLS = frozenset(
    {"set_device", "get_device", "prepare", "record", "submit", "copy", "wait_on", "synchronize", "register"}
)

_current = threading.local()


def current_device() -> int:
    """The fake driver's current device of the calling thread; 0 on a fresh one, as in CUDA."""
    index: int = getattr(_current, "index", 0)
    return index


class FakeDevice:
    """`delta`: what the device adds to a host address that is registered (R23).

    `strict`: a job may name only registered host ranges, by the address that `register` returned.
    `patience`: seconds that `submit` waits for a stream or events.
    """

    kind = "fake"

    def __init__(
        self,
        index: int = 0,
        *,
        max_streams: int = 8,
        max_events: int = 1024,
        delta: int = 1 << 46,
        strict: bool = False,
        patience: float = 10.0,
    ) -> None:
        self.index = index
        self.delta = delta
        self.strict = strict
        self.patience = patience
        self.counts: Counter[str] = Counter()
        self.ranges: dict[int, int] = {}
        self._lock = threading.Lock()
        self._faults: dict[str, list[tuple[int, int, bool]]] = {}
        self._lie: int | None = None
        self._lost: DeviceLost | None = None
        self._held = False
        self._owned: list[FakeStream] = []
        self._copying: list[FakeStream] = []
        self._events_made: set[FakeEvent] = set()
        self._streams = Pool("fake streams", self._make_copy_stream, self._end_stream, max_streams)
        self._events = Pool("fake events", self._make_event, self._end_event, max_events)
        self._marks = Pool("fake marks", self._make_event, self._end_event, max_events)

    # What a test does

    def stream(self, name: str = "engine") -> FakeStream:
        """A stream of the engine's, as it would get from torch. Ended by `close`."""
        stream = FakeStream(self, name)
        self._owned.append(stream)
        return stream

    def hold(self) -> None:
        """Stop all copy streams, those made later too, before their next operation."""
        with self._lock:
            self._held = True
            for stream in self._copying:
                stream.hold()

    def release(self) -> None:
        """Let the copy streams go on."""
        with self._lock:
            self._held = False
            for stream in self._copying:
                stream.release()

    def fail_next(self, call: str, n: int = 0, code: int = 1, *, lost: bool = False) -> None:
        """After `n` more calls of `call` that work, one fails; `lost` takes the device with it.

        `call` is one of `CALLS`; "copy" counts single planes and fails when the stream runs them.
        """
        if call not in CALLS:
            raise ValueError(f"no call {call!r}: {sorted(CALLS)}")
        with self._lock:
            self._faults.setdefault(call, []).append((self.counts[call] + n + 1, code, lost))

    def lie(self, index: int | None) -> None:
        """Setting this device ends on device `index`, without an error; None: it is honest again."""
        self._lie = index

    def lose(self, code: int = 719) -> None:
        """The context is gone: blocked and later calls raise `DeviceLost`."""
        with self._lock:
            self._lost = DeviceLost("fake", code)
            events = list(self._events_made)
        for event in events:
            event.fail(self._lost)

    # The interface

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        before = current_device()
        self._call("set_device")
        _current.index = self.index if self._lie is None else self._lie
        try:
            self._call("get_device")
            if current_device() != self.index:
                raise DeviceError("get_device", -1, f"{self.index} was set, {current_device()} is")
            yield
        finally:
            _current.index = before

    def prepare(self, spans: tuple[Span, ...], groups: tuple[int, ...]) -> None:
        del spans, groups
        self._call("prepare")

    def record(self, stream: Any) -> Event:
        if not isinstance(stream, FakeStream):
            raise TypeError(f"pages on a fake device need a FakeStream, not {stream!r}")
        if stream.device is not self:
            raise ValueError(f"a stream of device {stream.device.index} for device {self.index}")
        with self.guard():
            self._call("record")
            (event,) = self._marks.take(timeout=None)
            stream.record(event)
            return event

    def observe(self, event_or_stream: Any) -> tuple[Event, Hashable]:
        if isinstance(event_or_stream, FakeEvent):
            (event,) = self._marks.take(timeout=None)
            number = event.arm()
            event_or_stream.when(lambda error: event.happen(number, error))
            return event, ("event", id(event_or_stream))
        return self.record(event_or_stream), ("stream", id(event_or_stream))

    def recycle(self, event: Event) -> None:
        self._marks.give([event])

    def synchronize(self, event: Event) -> None:
        self._call("synchronize")
        event.wait()

    def submit(self, job: Job) -> FakeSubmitted:
        if not len(job.blocks) == len(job.hosts) == len(job.device_hosts):
            raise ValueError("a job names as many blocks as host images")
        with self.guard():
            self._call("submit")
            self._check_hosts(job)
            (stream,) = self._streams.take(timeout=self.patience)
            try:
                events = self._events.take(len(job.groups) + 1, timeout=self.patience)
            except BaseException:
                self._streams.give([stream])
                raise
            submitted = FakeSubmitted(self, stream, events, self._take_back)
            if job.after is not None:
                stream.wait(job.after)
            self._enqueue(job, submitted)
            return submitted

    def register(self, address: int, nbytes: int) -> int:
        self._call("register")
        with self._lock:
            self.ranges[address] = nbytes
        return address + self.delta

    def unregister(self, address: int) -> None:
        with self._lock:
            del self.ranges[address]
        self.counts["unregister"] += 1

    def statistics(self) -> dict[str, int]:
        streams, events, marks = (pool.statistics() for pool in (self._streams, self._events, self._marks))
        return {
            "streams_live": streams["live"],
            "streams_free": streams["free"],
            "streams_bound": streams["bound"],
            "streams_waiting": streams["waiting"],
            "events_live": events["live"] + marks["live"],
            "events_free": events["free"] + marks["free"],
            "events_bound": events["bound"] + marks["bound"],
            "staging_bytes": 0,
            "staging_bound": 0,
        }

    def close(self) -> None:
        """End the streams' threads; what is held is let go first."""
        self.release()
        for pool in (self._streams, self._events, self._marks):
            pool.close()
        for stream in [*self._owned, *self._copying]:
            stream.close()

    # Behind it

    def _call(self, call: str) -> None:
        """Count a call, and fail it if a test said so."""
        with self._lock:
            self.counts[call] += 1
            for fault in self._faults.get(call, []):
                number, code, lost = fault
                if number == self.counts[call]:
                    self._faults[call].remove(fault)
                    break
            else:
                if self._lost is not None:
                    raise self._lost
                return
        if lost:
            self.lose(code)
            raise DeviceLost(call, code)
        raise DeviceError(call, code)

    def _enqueue(self, job: Job, submitted: FakeSubmitted) -> None:
        """Plane by plane, so that a copy can fail in the middle of an image."""
        store = job.direction is Direction.STORE
        hosts = job.hosts
        if self.strict:
            hosts = [address - self.delta for address in job.device_hosts]
        stream = submitted.stream
        offset = start = 0
        for group, stop in enumerate(job.groups):
            for span in job.spans[start:stop]:
                for block, host in zip(job.blocks, hosts, strict=True):
                    page, image = span.base + block * span.stride, host + offset
                    to, source = (image, page) if store else (page, image)
                    stream.run(functools.partial(self._copy, stream, to, source, span.nbytes))
                offset += span.nbytes
            start = stop
            stream.record(submitted.groups[group])
        stream.record(submitted.done)

    def _copy(self, stream: FakeStream, to: int, source: int, nbytes: int) -> None:
        if stream.error is None:  # behind an error nothing of the stream runs
            self._call("copy")
            memmove(to, source, nbytes)

    def _check_hosts(self, job: Job) -> None:
        if not self.strict:
            return
        nbytes = sum(span.nbytes for span in job.spans)
        for address in job.device_hosts:
            at = address - self.delta
            if not any(base <= at and at + nbytes <= base + size for base, size in self.ranges.items()):
                raise DeviceError("submit", 1, f"{address:#x} is in no one registered range")

    def _take_back(self, stream: FakeStream, events: list[FakeEvent], failed: bool) -> None:
        (self._streams.discard if failed else self._streams.give)([stream])
        (self._events.discard if failed else self._events.give)(events)

    def wait_for(self, stream: FakeStream, event: FakeEvent) -> None:
        """What `Submitted.wait_on` does once it knows the event."""
        with self.guard():
            self._call("wait_on")
            stream.wait(event)

    def _make_copy_stream(self) -> FakeStream:
        stream = FakeStream(self, f"copy-{self.index}")
        with self._lock:
            self._copying.append(stream)
            if self._held:
                stream.hold()
        return stream

    def _end_stream(self, stream: FakeStream) -> None:
        with self._lock:
            self._copying.remove(stream)
        stream.close()

    def _make_event(self) -> FakeEvent:
        event = FakeEvent()
        with self._lock:
            self._events_made.add(event)
        return event

    def _end_event(self, event: FakeEvent) -> None:
        with self._lock:
            self._events_made.discard(event)
