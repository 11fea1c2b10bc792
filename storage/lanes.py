"""A device with the threads that may touch it: one that submits, the bridge's that wait (R18)."""

from __future__ import annotations

import time

from kvtide.core.errors import DeviceUnavailable, KVTideError, TransferFailed
from kvtide.core.protocols import Component
from kvtide.kernels.bridge import Bridge
from kvtide.kernels.device import Device, DeviceError, DeviceLost
from kvtide.kernels.worker import DeviceThread


class DeviceLanes:
    """One device of a cache. Once lost, its pages refuse everything."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.name = f"{device.kind}:{device.index}"
        with device.guard():
            pass  # a device that cannot be set is found here, not at the first copy
        self.thread = DeviceThread(device, f"{self.name}-submit")
        self.bridge = Bridge(device, self.name)
        self.lost: str | None = None
        self._since = time.time()

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
        stuck = [] if self.thread.close(deadline) else [self.thread.name]
        return stuck + self.bridge.close(max(0.05, end - time.monotonic()))
