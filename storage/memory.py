"""The memory tier: the reference for every other, and told to delay, fail and corrupt by tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import xxhash

from kvtide.core.errors import CorruptImage, TierFailed
from kvtide.core.protocols import Label
from kvtide.core.settings import MIB


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

    capacity_bytes: a multiple of `extent_bytes` is used.
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
        if capacity_bytes < extent_bytes:
            raise ValueError(f"capacity_bytes must be at least one extent ({extent_bytes} bytes)")
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.extent_bytes = extent_bytes
        self.faults = faults or Faults()
        self._images: dict[int, tuple[Label, bytes, bytes]] = {}

    async def open(self) -> None:
        """Nothing to get ready."""

    async def write(self, slot: int, label: Label, image: memoryview) -> None:
        """Keep a copy of the image. Raises `TierFailed` when told to."""
        await self._strike()
        self.faults.writes += 1
        if self.faults.fail_writes:
            self.faults.fail_writes -= 1
            raise TierFailed(f"the {self.name} tier was told to fail this write")
        kept = bytes(image)
        self._images[slot] = (label, xxhash.xxh3_128_digest(kept), kept)

    async def read(self, slot: int, label: Label, into: memoryview) -> None:
        """Verify and copy out. Raises `CorruptImage`, `TierFailed`."""
        await self._strike()
        self.faults.reads += 1
        if self.faults.fail_reads:
            self.faults.fail_reads -= 1
            raise TierFailed(f"the {self.name} tier was told to fail this read")
        found = self._images.get(slot)
        if found is None:
            raise CorruptImage(f"slot {slot:#x} of the {self.name} tier is empty")
        kept_label, checksum, image = found
        if self.faults.corrupt_reads:
            self.faults.corrupt_reads -= 1
            image = bytes([image[0] ^ 1]) + image[1:]
        if kept_label != label or len(image) != label.nbytes:
            raise CorruptImage(f"slot {slot:#x} of the {self.name} tier holds another image")
        if xxhash.xxh3_128_digest(image) != checksum:
            raise CorruptImage(f"slot {slot:#x} of the {self.name} tier fails its checksum")
        into[:] = image

    async def close(self) -> None:
        """Forget everything."""
        self._images.clear()

    async def _strike(self) -> None:
        if self.faults.gate is not None:
            await self.faults.gate.wait()
        if self.faults.delay:
            await asyncio.sleep(self.faults.delay)
