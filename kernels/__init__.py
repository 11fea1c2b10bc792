"""Devices: pointers, streams, events. No blocks, no hashes.

    device      the interface: Span, Job, Device, Submitted and the errors
    cpu         CPU tensors: memmove
    cuda        one GPU: guard, pools, submission
      runtime     the driver's calls and their errors, mapped once
      pinned      host memory that the GPU can reach
      chunks      how a job is cut to fit staging
      lane        a stream with its staging and tables
      enqueue     chunk after chunk over the lanes
      pack        the Triton kernels
      cudajob     a job in flight
      foreign     other people's streams and events
    fake        for tests of ordering and failure: errors on demand, streams that can be held
      fakestream  those streams, and their events
    pool        bounded pools
    worker      the thread that submits
    bridge      the threads that wait; `completed`

Importing this loads nothing: the driver's bindings, torch and triton come at first use.
"""

from __future__ import annotations

import threading
from typing import Literal

from kvtide.kernels.device import Device

_devices: dict[tuple[str, int], Device] = {}
_lock = threading.Lock()


def device_for(kind: Literal["cpu", "cuda"], index: int = 0) -> Device:
    """The process's device of that kind and ordinal, made at the first call.

    Shared: do not close it. Raises `ValueError` for an unknown kind, `DeviceError` if the machine
    has no such device.
    """
    with _lock:
        if (kind, index) not in _devices:
            _devices[kind, index] = _make(kind, index)
        return _devices[kind, index]


def _make(kind: str, index: int) -> Device:
    if kind == "cpu":
        from kvtide.kernels.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        from kvtide.kernels.cuda import CudaDevice

        return CudaDevice(index)
    raise ValueError(f"no device of kind {kind!r}: cpu or cuda")
