"""The CUDA device: guard, bounded pools, submission. Loads the driver's bindings, torch at first copy."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal

from kvtide.kernels import pinned
from kvtide.kernels.chunks import PITCH, Piece, coarse, pieces
from kvtide.kernels.cudajob import CudaSubmitted
from kvtide.kernels.device import DeviceError, Direction, Event, Job, Span, Stream
from kvtide.kernels.enqueue import chunks_of, packed, plain, prepare
from kvtide.kernels.foreign import Mark, Relays, end_event, make_event
from kvtide.kernels.lane import Copier, Lane
from kvtide.kernels.pool import Pool
from kvtide.kernels.runtime import FATAL, check, cudadrv, cudart, device_count, error_of

Path = Literal["packed", "plain"]

LANES_A_JOB = 2
PATIENCE = 30.0
"""Seconds that `submit` waits for a lane or events before it fails with `PoolExhausted`."""


class CudaDevice:
    """One GPU.

    `max_streams` copy streams, half for stores, half for loads, and `staging_bytes` of device
    memory divided among them, both taken only as far as they are used. `max_events` bounds the
    events of jobs, and as many again those of `record`: were they one pool, jobs that wait in a
    queue with their recorded event could starve the job that is being submitted. `path`: "packed"
    through staging by Triton kernels, "plain" plane by plane; by default packed where triton is.

    Raises `DeviceError` if the machine has no such device.
    """

    kind = "cuda"

    def __init__(
        self,
        index: int = 0,
        *,
        staging_bytes: int = 512 << 20,
        max_streams: int = 16,
        max_events: int = 4096,
        path: Path | None = None,
    ) -> None:
        if index not in range(count := device_count()):
            raise DeviceError("cudaGetDeviceCount", 101, f"there is no cuda:{index} among {count}")
        if max_streams < 2 * LANES_A_JOB:
            raise ValueError(f"max_streams is at least {2 * LANES_A_JOB}, not {max_streams}")
        self.index = index
        half = max_streams // 2
        self.staging = staging_bytes // (2 * half) // PITCH * PITCH
        if self.staging < PITCH:
            raise ValueError(f"staging of {staging_bytes} bytes is too small for {max_streams} streams")
        found = importlib.util.find_spec("triton") and importlib.util.find_spec("torch")
        self.path: Path = path or ("packed" if found else "plain")
        self._copier = Copier()
        self._lane_list: list[Lane] = []
        self._lanes = {
            direction: Pool(
                f"cuda:{index} lanes, {direction.value}",
                functools.partial(self._make_lane, direction is Direction.LOAD),
                self._end_lane,
                half,
            )
            for direction in Direction
        }
        self._events = Pool(f"cuda:{index} events", make_event, end_event, max_events)
        self._relays = Relays(index, max_events)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        runtime = cudart()
        before = int(check("cudaGetDevice", runtime.cudaGetDevice()))
        context = None
        if before != self.index:
            # Setting a device creates its context, about 0.5 GB: never to restore one that was not.
            code, _, active = cudadrv().cuDevicePrimaryCtxGetState(before)
            if int(code) or not active:
                context = check("cuCtxGetCurrent", cudadrv().cuCtxGetCurrent())
        check("cudaSetDevice", runtime.cudaSetDevice(self.index))
        current = int(check("cudaGetDevice", runtime.cudaGetDevice()))
        if current != self.index:
            raise DeviceError("cudaGetDevice", -1, f"cuda:{self.index} was set, {current} is current")
        # While the engine captures a graph, the driver refuses allocations of other threads and breaks
        # the capture, unless those threads say that they know what they do.
        relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        change = runtime.cudaThreadExchangeStreamCaptureMode
        mode = check("cudaThreadExchangeStreamCaptureMode", change(relaxed))
        try:
            yield
        finally:
            change(mode)
            if context is not None:
                check("cuCtxSetCurrent", cudadrv().cuCtxSetCurrent(context))
            elif before != self.index:
                check("cudaSetDevice", runtime.cudaSetDevice(before))

    def prepare(self, spans: tuple[Span, ...], groups: tuple[int, ...]) -> None:
        if self.path == "plain":
            return
        for direction, lanes in self._lanes.items():
            store = direction is Direction.STORE
            cut = pieces(spans, (len(spans),) if store else coarse(spans, groups)[0], self.staging)
            with self.guard():
                taken = lanes.take(timeout=PATIENCE)
                try:
                    prepare(cut, taken[0], store)
                finally:
                    lanes.give(taken)

    def record(self, stream: Stream) -> Mark:
        """Mark a `torch.cuda.Stream` or raw handle of this device; never blocks on a full stream.

        Raises `TypeError` for what is no stream, `ValueError` for a stream of another device,
        `PoolExhausted`, and `DeviceError`, also for a stream under graph capture: an event of a
        graph cannot be waited for.
        """
        with self.guard():
            return self._relays.record(stream)

    def observe(self, event_or_stream: Any) -> tuple[Mark, Hashable]:
        """For `kvtide.completed`: see `foreign.Relays`."""
        with self.guard():
            return self._relays.observe(event_or_stream)

    def recycle(self, event: Mark) -> None:
        self._relays.recycle(event)

    def synchronize(self, event: Event) -> None:
        """Wait for a job's `done` or for a mark."""
        if isinstance(event, Mark):
            with self.guard():
                self._relays.sleep_until(event, PATIENCE)
        else:
            check("cudaEventSynchronize", cudart().cudaEventSynchronize(event))

    def register(self, address: int, nbytes: int) -> int:
        with self.guard():
            return pinned.register(self.index, address, nbytes)

    def unregister(self, address: int) -> None:
        with self.guard():
            pinned.unregister(self.index, address)

    def submit(self, job: Job) -> CudaSubmitted:
        """Enqueue all of a job. Waits, first come first served, for lanes and events.

        If it fails half-way, it waits for what was enqueued before it raises: behind an error
        nothing of the job moves any more. Raises `PoolExhausted`, `DeviceError`, `ValueError`.
        """
        if not len(job.blocks) == len(job.hosts) == len(job.device_hosts):
            raise ValueError("a job names as many blocks as host images")
        load = job.direction is Direction.LOAD
        ends, place = coarse(job.spans, job.groups) if load else ((len(job.spans),), ())
        cut = pieces(job.spans, ends, self.staging)
        wanted = 1
        if self.path == "packed":
            wanted = min(LANES_A_JOB, max(1, chunks_of(job, cut, self.staging)))
        with self.guard():
            after = job.after
            if after is not None:
                after = self._relays.event_of(after, PATIENCE)
            lanes = self._lanes[job.direction].take(wanted, timeout=PATIENCE)
            try:
                needed = wanted - 1 + (wanted * len(ends) if load else 0)
                events = self._events.take(needed, timeout=PATIENCE)
            except BaseException:
                self._lanes[job.direction].give(lanes)
                raise
            submitted = CudaSubmitted(
                self, lanes, events, place, functools.partial(self._take_back, job.direction)
            )
            try:
                self._enqueue(job, after, ends, cut, submitted)
            except BaseException as error:
                submitted.drain()
                submitted.release(failed=True)
                if isinstance(error, RuntimeError) and not isinstance(error, DeviceError):
                    raise self._launch_error(lanes[0], error) from error
                raise
            return submitted

    def statistics(self) -> dict[str, int]:
        store, load = (self._lanes[direction].statistics() for direction in Direction)
        events, marks = self._events.statistics(), self._relays.marks.statistics()
        relays = self._relays.streams()
        return {
            "streams_live": store["live"] + load["live"] + relays["live"],
            "streams_free": store["free"] + load["free"] + relays["free"],
            "streams_bound": store["bound"] + load["bound"] + relays["bound"],
            "streams_waiting": store["waiting"] + load["waiting"],
            "events_live": events["live"] + marks["live"],
            "events_free": events["free"] + marks["free"],
            "events_bound": events["bound"] + marks["bound"],
            "staging_bytes": sum(lane.staging_live for lane in list(self._lane_list)),
            "staging_bound": (store["bound"] + load["bound"]) * self.staging,
        }

    def close(self) -> None:
        with self.guard():
            for pool in (*self._lanes.values(), self._events):
                pool.close()
            self._relays.close()

    def _enqueue(
        self,
        job: Job,
        after: Event,
        ends: tuple[int, ...],
        cut: Sequence[Piece],
        submitted: CudaSubmitted,
    ) -> None:
        runtime = cudart()
        lanes = submitted.lanes

        def wait_after(lane: Lane) -> None:
            if after is not None:
                waited = runtime.cudaStreamWaitEvent(lane.stream, after, 0)
                check("cudaStreamWaitEvent", waited)

        def group_ends(group: int) -> None:
            if job.direction is Direction.LOAD:
                submitted.groups.append([submitted.mark(lane) for lane in lanes])

        if job.blocks and self.path == "packed":
            packed(job, cut, lanes, self.staging, self._copier, wait_after, group_ends)
        elif job.blocks:
            plain(job, ends, lanes[0], self._copier, wait_after, group_ends)
        for lane in lanes[1:]:
            event = submitted.mark(lane)
            check("cudaStreamWaitEvent", runtime.cudaStreamWaitEvent(lanes[0].stream, event, 0))
        check("cudaEventRecord", runtime.cudaEventRecord(lanes[0].done, lanes[0].stream))

    def _take_back(self, direction: Direction, lanes: list[Lane], events: list[Event], failed: bool) -> None:
        """After an error streams and events are not to be trusted: others take their room."""
        (self._lanes[direction].discard if failed else self._lanes[direction].give)(lanes)
        (self._events.discard if failed else self._events.give)(events)

    def _launch_error(self, lane: Lane, error: RuntimeError) -> DeviceError:
        """Triton and torch raise plain RuntimeErrors; ask the driver whether the device is lost."""
        (code,) = cudart().cudaStreamQuery(lane.stream)
        if int(code) in FATAL:
            return error_of("launch", int(code))
        return DeviceError("launch", int(code), str(error))

    def _make_lane(self, high: bool) -> Lane:
        lane = Lane(self.index, self.staging, high)
        self._lane_list.append(lane)
        return lane

    def _end_lane(self, lane: Lane) -> None:
        self._lane_list.remove(lane)
        lane.close()
