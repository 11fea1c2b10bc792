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


class Late:
    """A mark that is recorded when its job is submitted, on a device thread that may block.

    A stream's queue holds about 1,000 operations, and recording on a full one blocks the caller,
    which may be the event loop (R21). A later mark waits for more than it has to, never for less:
    the engine may not reuse a job's blocks before it has ended.
    """

    __slots__ = ("event", "handle")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.event: Event | None = None


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
    """Turns foreign streams and events into pooled blocking-sync events. Used under the guard.

    A foreign event may be one that spins, and may be recorded again while somebody waits: a
    relay stream of ours waits for it as it is now, and an event of ours is recorded behind.
    """

    def __init__(self, index: int, marks: Pool[Event]) -> None:
        self.bound = RELAYS
        self._index = index
        self._marks = marks
        self._lock = threading.Lock()
        self._streams: list[int] = []
        self._pending: list[int] = []
        self._relay_of: dict[int, int] = {}
        self._crowd: dict[int, int] = {}
        self._stream_of: dict[int, int] = {}

    @property
    def live(self) -> int:
        return len(self._streams)

    def record(self, handle: int) -> Event | Late:
        """Mark an engine's stream now, or if it is crowded with marks, when its job is submitted."""
        with self._lock:
            if self._crowd.get(handle, 0) >= CROWD:
                return Late(handle)
        event = self.mark(handle)
        with self._lock:
            self._crowd[handle] = self._crowd.get(handle, 0) + 1
            self._stream_of[int(event)] = handle
        return event

    def recorded(self, event: Event | Late, patience: float) -> Event:
        """The event to wait for; a late one is recorded here, which may block."""
        if not isinstance(event, Late):
            return event
        if event.event is None:
            event.event = self.mark(event.handle, patience)
        return event.event

    def mark(self, handle: int, patience: float | None = None) -> Event:
        """Record a pooled event on a stream. Without patience an empty pool raises at once."""
        runtime = cudart()
        capturing = check("cudaStreamIsCapturing", runtime.cudaStreamIsCapturing(handle))
        if int(capturing):
            raise DeviceError("cudaEventRecord", 900, "the stream is under graph capture")
        (event,) = self._marks.take(timeout=patience)
        try:
            check("cudaEventRecord", runtime.cudaEventRecord(event, handle))
        except BaseException:
            self._marks.discard([event])
            raise
        return event

    def observe(self, thing: Any) -> tuple[Event, Hashable]:
        """An event of ours for a foreign event or stream as it is now, and its key of order."""
        foreign = event_handle(thing)
        if foreign is None:
            handle = stream_handle(thing, self._index)
            return self.mark(handle), ("stream", handle)
        runtime = cudart()
        with self._lock:
            relay = self._idlest()
            if foreign:
                waited = runtime.cudaStreamWaitEvent(self._streams[relay], foreign, 0)
                check("cudaStreamWaitEvent", waited)
            event = self.mark(self._streams[relay])
            self._pending[relay] += 1
            self._relay_of[int(event)] = relay
            return event, ("relay", relay)

    def recycle(self, event: Event | Late) -> None:
        """Give a mark back to its pool."""
        if isinstance(event, Late):
            if event.event is not None:
                self._marks.give([event.event])
            return
        with self._lock:
            handle = self._stream_of.pop(int(event), None)
            if handle is not None:
                count = self._crowd.pop(handle) - 1
                if count:
                    self._crowd[handle] = count
            relay = self._relay_of.pop(int(event), None)
            if relay is not None:
                self._pending[relay] -= 1
        self._marks.give([event])

    def close(self) -> None:
        for stream in self._streams:
            cudart().cudaStreamDestroy(stream)
        self._streams.clear()
        self._pending.clear()

    def _idlest(self) -> int:
        """A relay with nothing pending, a new one, or beyond the bound the least busy."""
        if 0 in self._pending:
            return self._pending.index(0)
        if len(self._streams) < self.bound:
            runtime = cudart()
            made = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
            self._streams.append(int(check("cudaStreamCreateWithFlags", made)))
            self._pending.append(0)
            return len(self._streams) - 1
        return self._pending.index(min(self._pending))
