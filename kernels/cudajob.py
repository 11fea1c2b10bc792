"""A job that a GPU has accepted: what it holds, and how a stream waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtide.kernels.device import Device, Event, Stream
from kvtide.kernels.foreign import stream_handle
from kvtide.kernels.lane import Lane
from kvtide.kernels.runtime import check, cudart

TakeBack = Callable[[list[Lane], list[Event], bool], None]


class CudaSubmitted:
    """A job in flight: its lanes, its events, and the events at the ends of groups."""

    def __init__(
        self,
        device: Device,
        lanes: list[Lane],
        events: list[Event],
        place: Sequence[int],
        take_back: TakeBack,
    ) -> None:
        self.lanes = lanes
        self.done: Event = lanes[0].done
        self.groups: list[list[Event]] = []
        self._device = device
        self._take_back = take_back
        self._events = events
        self._place = place
        self._unused = list(events)
        self._released = False
        self._lock = threading.Lock()

    def mark(self, lane: Lane) -> Event:
        """Record one of the job's events on a lane."""
        event = self._unused.pop()
        check("cudaEventRecord", cudart().cudaEventRecord(event, lane.stream))
        return event

    def wait_on(self, stream: Stream, group: int) -> None:
        """For a store, whatever the group, the whole job: its images are whole at the end."""
        handle = stream_handle(stream, self._device.index)
        with self._device.guard(), self._lock:
            if self._released:
                return
            for event in self.groups[self._place[group]] if self.groups else [self.done]:
                check("cudaStreamWaitEvent", cudart().cudaStreamWaitEvent(handle, event, 0))

    def drain(self) -> None:
        """Block until nothing of a half-enqueued job runs. Errors say the same: nothing runs."""
        for lane in self.lanes:
            cudart().cudaStreamSynchronize(lane.stream)
        cudart().cudaGetLastError()

    def release(self, *, failed: bool = False) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
        self._take_back(self.lanes, self._events, failed)
