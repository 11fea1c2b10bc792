"""Pinned host ranges of this process: registered once, seen by every device (R23, R24)."""

from __future__ import annotations

import threading

from kvtide.kernels.runtime import check, cudart

# Two devices share one arena, and the driver refuses to register a range twice.
_users: dict[int, int] = {}
_lock = threading.Lock()


def register(address: int, nbytes: int) -> int:
    """Pin a range for all devices; returns the current device's address of it.

    If any step fails, what was done is undone before the error is raised.
    """
    runtime = cudart()
    with _lock:
        if address not in _users:
            flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped
            check("cudaHostRegister", runtime.cudaHostRegister(address, nbytes, flags))
            _users[address] = 0
        try:
            pointer = check("cudaHostGetDevicePointer", runtime.cudaHostGetDevicePointer(address, 0))
        except BaseException:
            if not _users[address]:
                del _users[address]
                runtime.cudaHostUnregister(address)
            raise
        _users[address] += 1
        return int(pointer)


def unregister(address: int) -> None:
    """Undo one `register`; the last one for a range unpins it. Raises `KeyError` if unknown."""
    runtime = cudart()
    with _lock:
        _users[address] -= 1
        if not _users[address]:
            del _users[address]
            check("cudaHostUnregister", runtime.cudaHostUnregister(address))
