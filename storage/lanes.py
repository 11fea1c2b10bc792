"""A device with the threads that may touch it: two that submit, the bridge's that wait (R18)."""

from __future__ import annotations

import time

from kvtide.core.errors import DeviceUnavailable, KVTideError, TransferFailed
from kvtide.core.protocols import Component
from kvtide.kernels.bridge import Bridge
from kvtide.kernels.device import Device, DeviceError, DeviceLost, Direction, Span
from kvtide.kernels.worker import DeviceThread, QueueFull, WorkerClosed


class DeviceLanes:
    """One device of a cache. Once lost, its pages refuse everything."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.name = f"{device.kind}:{device.index}"
        with device.guard():
            pass  # a device that cannot be set is found here, not at the first copy
        # One a direction: loads behind a stalled stream may block theirs, and stores go on.
        self.threads = {
            direction: DeviceThread(device, f"{self.name}-{direction.name.lower()}")
            for direction in Direction
        }
        self.bridge = Bridge(device, self.name)
        self.lost: str | None = None
        self._prepared: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._since = time.time()

    def prepare(self, spans: tuple[Span, ...], groups: tuple[int, ...]) -> None:
        """Have kernels for such pages compiled, behind the caller's back and once a geometry."""
        shape = (tuple(span.nbytes for span in spans), groups)
        if shape in self._prepared:
            return
        self._prepared.add(shape)
        try:
            self.threads[Direction.STORE].submit(lambda: self.device.prepare(spans, groups), self._unprepared)
        except (QueueFull, WorkerClosed) as error:
            self._unprepared(error)

    def _unprepared(self, error: BaseException) -> None:
        # The first copy meets the same error, and has somebody who waits for it.
        self.explain(error, began=True)

    def check(self) -> None:
        """Raises `DeviceUnavailable` if the device is lost."""
        if self.lost is not None:
            raise DeviceUnavailable(f"{self.name} is lost: {self.lost}")

    def explain(self, error: BaseException, *, began: bool) -> KVTideError:
        """A foreign error as ours, mapped here once (R11)."""
        if isinstance(error, KVTideError):
            return error
        if isinstance(error, DeviceLost):
            if self.lost is None:
                self.lost, self._since = str(error), time.time()
            mapped: KVTideError = DeviceUnavailable(f"{self.name} is lost: {error}")
        elif isinstance(error, DeviceError) and not began:
            mapped = DeviceUnavailable(f"{self.name} could not be used: {error}")
        else:
            mapped = TransferFailed(f"a copy on {self.name} failed: {error}")
        mapped.__cause__ = error
        return mapped

    def health(self) -> Component:
        """`failed` once lost."""
        return Component(self.name, "failed" if self.lost else "ok", self._since, self.lost)

    def close(self, deadline: float) -> list[str]:
        """End the threads; names of those that are stuck."""
        end = time.monotonic() + deadline
        stuck = [
            thread.name
            for thread in self.threads.values()
            if not thread.close(max(0.05, end - time.monotonic()))
        ]
        return stuck + self.bridge.close(max(0.05, end - time.monotonic()))
