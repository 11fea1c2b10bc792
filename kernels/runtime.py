"""The CUDA runtime, loaded at first use, and the one place where its errors become ours (R11)."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from kvtide.kernels.device import DeviceError, DeviceLost

FATAL = frozenset(
    {
        4,  # the runtime is unloading
        46,  # devices unavailable
        214,  # ECC, uncorrectable
        220,  # NVLink, uncorrectable
        700,  # illegal address
        702,  # launch timeout
        709,  # context is destroyed
        710,  # device-side assert
        714,  # hardware stack
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # launch failure
        721,  # tensor memory leak
    }
)
"""Codes after which every later call on the context fails: only a new process helps."""


@functools.cache
def cudart() -> Any:
    """The module `cuda.bindings.runtime`. It imports without a driver; its calls then return codes."""
    return importlib.import_module("cuda.bindings.runtime")


@functools.cache
def cudadrv() -> Any:
    """The module `cuda.bindings.driver`, for what the runtime cannot say: the current context."""
    return importlib.import_module("cuda.bindings.driver")


def check(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a runtime call's result tuple, or `DeviceError` / `DeviceLost`."""
    code = int(result[0])
    if code:
        raise error_of(call, code)
    return result[1] if len(result) > 1 else None


def error_of(call: str, code: int) -> DeviceError:
    """The typed error for a code; clears the runtime's own memory of it, so that it is told once."""
    runtime = cudart()
    runtime.cudaGetLastError()
    try:
        name = runtime.cudaError_t(code).name
    except ValueError:
        name = "an error that these bindings do not know"
    return (DeviceLost if code in FATAL else DeviceError)(call, code, name)


def device_count() -> int:
    """CUDA devices that this process sees; 0 without a driver or without the bindings."""
    try:
        code, count = cudart().cudaGetDeviceCount()
    except (ImportError, RuntimeError):  # RuntimeError: the bindings found no driver library
        return 0
    return 0 if int(code) else int(count)
