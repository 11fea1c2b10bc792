"""Pinned host ranges of this process: registered once, seen by every device (R23, R24)."""

from __future__ import annotations

import threading

from kvtide.kernels.runtime import check, cudart

# Devices share one arena, and the driver refuses to register a range twice. Per address: its size and
# the devices that use it. Who unmaps a range without unregistering it gets an error at the next one
# that lies there, not somebody else's stale mapping.
_users: dict[int, tuple[int, set[int]]] = {}
_lock = threading.Lock()


def register(device: int, address: int, nbytes: int) -> int:
    """Pin a range, for all devices if it is the first; returns the current device's address of it.

    If any step fails, what was done is undone before the error is raised. Raises `DeviceError`,
    also when `device` has registered the range already, or another has with another size.
    """
    runtime = cudart()
    with _lock:
        known = _users.get(address)
        if known is None or known[0] != nbytes or device in known[1]:
            flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped
            check("cudaHostRegister", runtime.cudaHostRegister(address, nbytes, flags))
            known = (nbytes, set())
        try:
            pointer = check("cudaHostGetDevicePointer", runtime.cudaHostGetDevicePointer(address, 0))
        except BaseException:
            if not known[1]:
                runtime.cudaHostUnregister(address)
            raise
        known[1].add(device)
        _users[address] = known
        return int(pointer)


def unregister(device: int, address: int) -> None:
    """Undo `register`; the last device unpins the range. Raises `KeyError` if it is unknown."""
    runtime = cudart()
    with _lock:
        devices = _users[address][1]
        devices.remove(device)
        if not devices:
            del _users[address]
            check("cudaHostUnregister", runtime.cudaHostUnregister(address))
