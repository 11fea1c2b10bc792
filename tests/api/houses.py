"""Caches on CPU memory, with real pages or with pages of a fake device."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch

import kvtide
from kvtide.core.cache import Cache
from kvtide.core.protocols import Tier
from kvtide.kernels.cpu import CpuDevice
from kvtide.kernels.device import Device, DeviceError, Job
from kvtide.kernels.fake import FakeDevice
from kvtide.storage.arena import Arena

TOKENS = 4
CELL = 1024
"""Bytes a page of each of the two planes that `pages` makes: four images fill 8 KiB."""

Settings = dict[str, Any]


def settings(**changes: Any) -> kvtide.Settings:
    """16 extents of 8 KiB, each two slots of 4 KiB: 32 blocks in all."""
    usual: Settings = {"host_bytes": 1 << 17, "extent_bytes": 1 << 13, "block_tokens": TOKENS, "pin": False}
    return kvtide.Settings(**{**usual, "deadline": 10.0, **changes})


class Memory:
    """Two tensors `[blocks, 1024]` of bytes, as an engine would own them."""

    def __init__(self, blocks: int = 16, seed: int | None = None) -> None:
        self.tensors = [torch.full((blocks, CELL), 0xEE, dtype=torch.uint8) for _ in range(2)]
        if seed is not None:
            self.fill(seed)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator))

    def wipe(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(0xEE)

    def paged(self, device: tuple[str, int] = ("cpu", 0)) -> kvtide.PagedKV:
        made = kvtide.PagedKV.from_tensors([tuple(self.tensors)])
        if device == made.device:
            return made
        return kvtide.PagedKV(
            made.planes_at, blocks=made.blocks, dtype=made.dtype, device=device, owners=made.owners
        )

    def block(self, number: int) -> bytes:
        return b"".join(tensor[number].numpy().tobytes() for tensor in self.tensors)

    def blocks(self, numbers: Sequence[int]) -> list[bytes]:
        return [self.block(number) for number in numbers]


async def until(what: Callable[[], bool]) -> None:
    """Let the cache's tasks run until something is so."""
    async with asyncio.timeout(5.0):
        while not what():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


UNTOUCHED = b"\xee" * (2 * CELL)


def prompt(blocks: int, first: int = 0, tail: int = 1) -> list[int]:
    """A prompt of full blocks and a tail; `first` tells prompts apart from their first token on."""
    return [first * 1000 + at for at in range(blocks * TOKENS + tail)]


class ScatteredDevice(FakeDevice):
    """Registered ranges that lie together on the host lie far apart for the device (S0-3)."""

    def __init__(self, index: int = 0, **options: Any) -> None:
        super().__init__(index, strict=True, **options)
        self._shifts: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> int:
        super().register(address, nbytes)
        self._shifts[address] = self.delta + (len(self._shifts) + 1 << 36)
        return address + self._shifts[address]

    def submit(self, job: Job) -> Any:
        straight = [self._straight(address) for address in job.device_hosts]
        return super().submit(dataclasses.replace(job, device_hosts=straight))

    def _straight(self, address: int) -> int:
        for base, nbytes in self.ranges.items():
            if base <= address - self._shifts[base] < base + nbytes:
                return address - self._shifts[base] + self.delta
        raise DeviceError("submit", 1, f"{address:#x} is no address of this device")


def devices(*fakes: FakeDevice) -> Callable[[str, int], Device]:
    """What hands out fakes for CUDA devices, by their index."""
    cpu = CpuDevice()

    def device_for(kind: str, index: int) -> Device:
        if kind == "cpu":
            return cpu
        if kind != "cuda":
            raise ValueError(f"no device of kind {kind!r}")
        for fake in fakes:
            if fake.index == index:
                return fake
        raise DeviceError("set_device", 101, f"there is no {kind}:{index}")

    return device_for


@contextlib.asynccontextmanager
async def opened(
    *fakes: FakeDevice, lower: Tier | None = None, ready: bool = True, **changes: Any
) -> AsyncIterator[Cache]:
    """A cache whose CUDA devices are fakes; nothing may be stuck at its end.

    ready: with all of host memory registered, so that nothing waits for it.
    """
    made = settings(pin=bool(fakes), **changes)
    cache = Cache(made, Arena(made, devices(*fakes)), lower)
    try:
        await cache.open()
        if ready:
            await until(lambda: cache.statistics().tiers[0].capacity_bytes == made.host_bytes)
        yield cache
    finally:
        closed = await cache.close()
        for fake in fakes:
            fake.close()
    assert closed.stuck == ()
