"""What the GPU tests share: pinned host memory, pages on a device, jobs."""

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

from kvtide.kernels.cuda import CudaDevice
from kvtide.kernels.device import Direction, Job, Span

POISON = 0xA5

_registered: list[mmap.mmap] = []


class Host:
    """Slots in anonymous memory, registered extent by extent, as an arena does it."""

    def __init__(self, device: CudaDevice, slots: int, nbytes: int, a_piece: int = 64) -> None:
        self.device, self.nbytes = device, nbytes
        self.slot = -(-nbytes // 4096) * 4096
        self._map = mmap.mmap(-1, self.slot * slots)
        _registered.append(self._map)  # a test that fails must not unmap what is registered
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.base, POISON, self.slot * slots)
        self.hosts: list[int] = []
        self.device_hosts: list[int] = []
        self._ranges: list[int] = []
        for first in range(0, slots, a_piece):
            count = min(a_piece, slots - first)
            at = self.base + first * self.slot
            pointer = device.register(at, count * self.slot)
            self._ranges.append(at)
            self.hosts += [at + i * self.slot for i in range(count)]
            self.device_hosts += [pointer + i * self.slot for i in range(count)]

    def put(self, index: int, image: bytes) -> None:
        ctypes.memmove(self.hosts[index], image, self.nbytes)

    def get(self, index: int) -> bytes:
        return ctypes.string_at(self.hosts[index], self.nbytes)

    def padding(self, index: int) -> bytes:
        return ctypes.string_at(self.hosts[index] + self.nbytes, self.slot - self.nbytes)

    def close(self) -> None:
        for at in self._ranges:
            self.device.unregister(at)
        _registered.remove(self._map)


class Pages:
    """One torch tensor of bytes that a layout is laid over."""

    def __init__(self, layout: Callable[[int], list[Span]], extent: int, device: int = 0) -> None:
        import torch

        self.tensor: Any = torch.randint(0, 256, (extent,), dtype=torch.uint8, device=f"cuda:{device}")
        self.base: int = self.tensor.data_ptr()
        self.spans = layout(self.base)
        torch.cuda.synchronize(device)

    def read(self) -> bytes:
        import torch

        torch.cuda.synchronize(self.tensor.device)
        return bytes(self.tensor.cpu().numpy())


def job(
    direction: Direction,
    spans: list[Span],
    blocks: list[int],
    host: Host,
    slots: list[int],
    groups: tuple[int, ...] | None = None,
    after: Any = None,
) -> Job:
    return Job(
        direction,
        tuple(spans),
        blocks,
        [host.hosts[slot] for slot in slots],
        [host.device_hosts[slot] for slot in slots],
        groups or (len(spans),),
        after,
    )


def finish(device: CudaDevice, work: Job) -> None:
    submitted = device.submit(work)
    device.synchronize(submitted.done)
    submitted.release()


@contextlib.contextmanager
def recorded(device: CudaDevice, stream: Any) -> Iterator[Any]:
    event = device.record(stream)
    try:
        yield event
    finally:
        device.recycle(event)


def idle(device: CudaDevice) -> bool:
    """Nothing of the pools is in use."""
    statistics = device.statistics()
    return statistics["events_live"] == statistics["events_free"]
