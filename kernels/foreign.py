"""Streams and events that are not kvtide's: the engine's, torch's, raw handles."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kvtide.kernels.device import DeviceError, Event
from kvtide.kernels.pool import Pool
from kvtide.kernels.runtime import check, cudart

if TYPE_CHECKING:
    from kvtide.kernels.cuda import CudaDevice

RELAYS = 8
"""Streams that wait for foreign events. Few, since a GPU has few hardware queues to share."""

CROWD = 256
"""Marks on one stream that are not recycled yet, beyond which marks are recorded late."""

SLEEPERS = 256
"""Threads that can wait for marks at a time."""


class Mark:
    """A point in a foreign stream: a pooled event, recorded there or, if `event` is None, late.

    A stream's queue holds about 1,000 operations, and recording on a full one blocks the caller,
    which may be the event loop (R21). A late mark is recorded by the thread that first needs it. It
    waits for more than it has to, never for less, and does no harm: the engine may not reuse a job's
    blocks before the job has ended.
    """

    __slots__ = ("event", "handle", "relay")

    def __init__(self, handle: int, event: Event | None = None, relay: int | None = None) -> None:
        self.handle = handle
        self.event = event
        self.relay = relay


class Sleeper:
    """What a thread needs to wait for a mark without spinning: a stream and a blocking-sync event.

    Marks themselves are not blocking-sync: of such events a stalled stream takes only 56 before it
    blocks the caller (measured on an H200, driver 580), of others about 1,000.
    """

    def __init__(self) -> None:
        runtime = cudart()
        made = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
        self._stream = check("cudaStreamCreateWithFlags", made)
        self._event = make_event(blocking=True)

    def sleep_until(self, event: Event) -> None:
        runtime = cudart()
        check("cudaStreamWaitEvent", runtime.cudaStreamWaitEvent(self._stream, event, 0))
        check("cudaEventRecord", runtime.cudaEventRecord(self._event, self._stream))
        check("cudaEventSynchronize", runtime.cudaEventSynchronize(self._event))

    def close(self) -> None:
        end_event(self._event)
        cudart().cudaStreamDestroy(self._stream)


def make_event(blocking: bool = False) -> Event:
    """An event without timing; `blocking`: one that a thread can wait for without spinning."""
    runtime = cudart()
    flags = runtime.cudaEventDisableTiming | (runtime.cudaEventBlockingSync if blocking else 0)
    return check("cudaEventCreateWithFlags", runtime.cudaEventCreateWithFlags(flags))


def end_event(event: Event) -> None:
    """Destroy an event. An error would mean that the device is lost, and the event with it."""
    cudart().cudaEventDestroy(event)


def stream_handle(stream: Any, index: int) -> int:
    """The raw handle of a stream of device `index`; `TypeError` or `ValueError` for anything else.

    A `torch.cuda.Stream`, an int, an object with `__cuda_stream__`, or the bindings' own types.
    None is refused: the default stream must be named, it is 0.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    said = device_index(stream)
    if said is not None and said != index:
        raise ValueError(f"a stream of cuda:{said} was passed to work on cuda:{index}")
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if type(stream).__name__ in ("cudaStream_t", "CUstream"):
        return int(stream)
    raise TypeError(f"pages on cuda:{index} need a stream, not {stream!r}")


def device_index(event_or_stream: Any) -> int | None:
    """The device that an object of torch names, or None."""
    device = getattr(event_or_stream, "device", None)
    index = getattr(device, "index", None)
    return index if isinstance(index, int) else None


def event_handle(thing: Any) -> int | None:
    """The raw handle of a foreign event, 0 if it was never recorded, None if it is no event."""
    if hasattr(thing, "cuda_event"):
        return int(thing.cuda_event or 0)
    if type(thing).__name__ in ("cudaEvent_t", "CUevent"):
        return int(thing)
    return None


def device_of(event_or_stream: Any, index: int | None) -> CudaDevice:
    """The process's device for a foreign event or stream; `index` where the object doesn't say."""
    from kvtide.kernels import device_for
    from kvtide.kernels.cuda import CudaDevice

    said = device_index(event_or_stream)
    if said is None:
        said = index
    if said is None:
        said = int(check("cudaGetDevice", cudart().cudaGetDevice()))
    device = device_for("cuda", said)
    assert isinstance(device, CudaDevice)
    return device


class Relays:
    """Marks points in foreign streams and events, and waits for marks. Used under the guard.

    A foreign event may be one that spins, and may be recorded again while somebody waits: a
    relay stream of ours waits for it as it is now, and the mark is recorded behind.
    """

    def __init__(self, index: int, max_marks: int) -> None:
        self.marks = Pool(f"cuda:{index} marks", make_event, end_event, max_marks)
        self.sleepers = Pool(f"cuda:{index} sleepers", Sleeper, Sleeper.close, SLEEPERS)
        self._index = index
        self._lock = threading.Lock()
        self._streams: list[int] = []
        self._pending: list[int] = []
        self._crowd: dict[int, int] = {}

    def streams(self) -> dict[str, int]:
        """Streams that are not lanes."""
        sleepers = self.sleepers.statistics()
        return {
            "live": len(self._streams) + sleepers["live"],
            "free": self._pending.count(0) + sleepers["free"],
            "bound": RELAYS + SLEEPERS,
        }

    def record(self, thing: Any) -> Mark:
        """Mark a foreign stream as it is now; late if it is crowded with marks."""
        handle = stream_handle(thing, self._index)
        runtime = cudart()
        capturing = check("cudaStreamIsCapturing", runtime.cudaStreamIsCapturing(handle))
        if int(capturing):
            raise DeviceError("cudaEventRecord", 900, "the stream is under graph capture")
        with self._lock:
            late = self._crowd.get(handle, 0) >= CROWD
        mark = Mark(handle)
        if not late:
            mark.event = self._take(handle, None)
        with self._lock:
            self._crowd[handle] = self._crowd.get(handle, 0) + 1
        return mark

    def observe(self, thing: Any) -> tuple[Mark, Hashable]:
        """A mark for a foreign event or stream as it is now, and its key of order."""
        foreign = event_handle(thing)
        if foreign is None:
            mark = self.record(thing)
            return mark, ("stream", mark.handle)
        runtime = cudart()
        with self._lock:
            relay = self._idlest()
            stream = self._streams[relay]
            if foreign:
                check("cudaStreamWaitEvent", runtime.cudaStreamWaitEvent(stream, foreign, 0))
            mark = Mark(stream, self._take(stream, None), relay)
            self._pending[relay] += 1
            return mark, ("relay", relay)

    def event_of(self, mark: Mark, patience: float) -> Event:
        """The mark's event; a late one is recorded here, on a thread that may block."""
        if mark.event is None:
            mark.event = self._take(mark.handle, patience)
        return mark.event

    def sleep_until(self, mark: Mark, patience: float) -> None:
        """Block the thread, without spinning, until a mark has happened."""
        sleepers = self.sleepers.take(timeout=patience)
        try:
            sleepers[0].sleep_until(self.event_of(mark, patience))
        except BaseException:
            self.sleepers.discard(sleepers)
            raise
        self.sleepers.give(sleepers)

    def recycle(self, mark: Mark) -> None:
        """Give a mark back; never calls the device."""
        with self._lock:
            if mark.relay is not None:
                self._pending[mark.relay] -= 1
            elif (count := self._crowd.pop(mark.handle) - 1) > 0:
                self._crowd[mark.handle] = count
        if mark.event is not None:
            self.marks.give([mark.event])

    def close(self) -> None:
        self.marks.close()
        self.sleepers.close()
        for stream in self._streams:
            cudart().cudaStreamDestroy(stream)
        self._streams.clear()
        self._pending.clear()

    def _take(self, handle: int, patience: float | None) -> Event:
        """Record a pooled event on a stream. Without patience an empty pool raises at once."""
        (event,) = self.marks.take(timeout=patience)
        try:
            check("cudaEventRecord", cudart().cudaEventRecord(event, handle))
        except BaseException:
            self.marks.discard([event])
            raise
        return event

    def _idlest(self) -> int:
        """A relay with nothing pending, a new one, or beyond the bound the least busy."""
        if 0 in self._pending:
            return self._pending.index(0)
        if len(self._streams) < RELAYS:
            runtime = cudart()
            made = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
            self._streams.append(int(check("cudaStreamCreateWithFlags", made)))
            self._pending.append(0)
            return len(self._streams) - 1
        return self._pending.index(min(self._pending))
