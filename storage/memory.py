"""The memory tier: the reference for every other, and told to delay, fail and corrupt by tests."""

from __future__ import annotations

import asyncio
import mmap
from dataclasses import dataclass, field

import xxhash

from kvtide.core.errors import CorruptImage, InvalidRequest, TierFailed
from kvtide.core.extents import extent_of, offset_of
from kvtide.core.protocols import Label
from kvtide.core.settings import MIB, PAGE


@dataclass(slots=True)
class Faults:
    """What shall go wrong. Counts run down as they strike; `gate` holds operations until set.

    delay: seconds before each operation. fail_reads, fail_writes: how many raise `TierFailed`.
    corrupt_reads: how many find a flipped bit.
    """

    delay: float = 0.0
    fail_reads: int = 0
    fail_writes: int = 0
    corrupt_reads: int = 0
    gate: asyncio.Event | None = None
    reads: int = field(default=0, init=False)
    writes: int = field(default=0, init=False)


class MemoryTier:
    """Images in this process' memory, each with its label and checksum. Not durable.

    capacity_bytes: a multiple of `extent_bytes` is used, and never more (R29).
    Raises `InvalidRequest`.
    """

    durable = False

    def __init__(
        self,
        capacity_bytes: int,
        *,
        extent_bytes: int = 16 * MIB,
        name: str = "memory",
        faults: Faults | None = None,
    ) -> None:
        if extent_bytes < PAGE or extent_bytes % PAGE:
            raise InvalidRequest(f"extent_bytes must be a positive multiple of {PAGE}")
        if capacity_bytes < extent_bytes:
            raise InvalidRequest(f"capacity_bytes must be at least one extent ({extent_bytes} bytes)")
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.extent_bytes = extent_bytes
        self.faults = faults or Faults()
        self._labels: dict[int, tuple[Label, bytes]] = {}
        self._bytes: mmap.mmap | None = None

    async def open(self) -> None:
        """Map the memory. Raises `TierFailed`."""
        try:
            self._bytes = mmap.mmap(-1, self.capacity_bytes // self.extent_bytes * self.extent_bytes)
        except OSError as error:
            raise TierFailed(f"cannot map {self.capacity_bytes} bytes: {error}") from error

    async def write(self, slot: int, label: Label, image: memoryview) -> None:
        """Keep a copy of the image. Raises `TierFailed` when told to."""
        await self._strike()
        self.faults.writes += 1
        if self.faults.fail_writes:
            self.faults.fail_writes -= 1
            raise TierFailed(f"the {self.name} tier was told to fail this write")
        if len(image) != label.nbytes:
            raise TierFailed(f"an image of {len(image)} bytes is labelled with {label.nbytes}")
        memory, at = self._open(slot)
        self._labels[slot] = (label, xxhash.xxh3_128_digest(image))
        memory[at : at + label.nbytes] = bytes(image)

    async def read(self, slot: int, label: Label, into: memoryview) -> None:
        """Verify and copy out. Raises `CorruptImage`, `TierFailed`."""
        await self._strike()
        self.faults.reads += 1
        if self.faults.fail_reads:
            self.faults.fail_reads -= 1
            raise TierFailed(f"the {self.name} tier was told to fail this read")
        memory, at = self._open(slot)
        kept, checksum = self._labels.get(slot, (None, b""))
        if kept != label:
            what = "is empty" if kept is None else "holds another image"
            raise CorruptImage(f"slot {slot:#x} of the {self.name} tier {what}")
        image = memory[at : at + label.nbytes]
        if self.faults.corrupt_reads:
            self.faults.corrupt_reads -= 1
            image = bytes([image[0] ^ 1]) + image[1:]
        if xxhash.xxh3_128_digest(image) != checksum:
            raise CorruptImage(f"slot {slot:#x} of the {self.name} tier fails its checksum")
        into[:] = image

    async def close(self) -> None:
        """Forget everything."""
        self._labels.clear()
        if self._bytes is not None:
            self._bytes.close()
            self._bytes = None

    def _open(self, slot: int) -> tuple[mmap.mmap, int]:
        if self._bytes is None:
            raise TierFailed(f"the {self.name} tier is not open")
        return self._bytes, extent_of(slot) * self.extent_bytes + offset_of(slot)

    async def _strike(self) -> None:
        if self.faults.gate is not None:
            await self.faults.gate.wait()
        if self.faults.delay:
            await asyncio.sleep(self.faults.delay)
