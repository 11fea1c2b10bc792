"""Room of a tier, cut into extents that slot sizes take and give back (R8). Pure bookkeeping.

A slot is an int, `extent << 32 | offset`, both in their plain units (offset in bytes). What is
free is kept as bits of an int: of a million extents the lowest is found in microseconds.
"""

from __future__ import annotations

from typing import Any

from kvtide.core.errors import InvalidRequest
from kvtide.core.settings import PAGE

_OFFSET = (1 << 32) - 1


def slot_bytes(image_bytes: int) -> int:
    """An image's room: its size rounded up to a page."""
    return -(-image_bytes // PAGE) * PAGE


def extent_of(slot: int) -> int:
    """The number of the extent that a slot lies in (of a run: its first)."""
    return slot >> 32


def offset_of(slot: int) -> int:
    """Where in its extent a slot begins, in bytes."""
    return slot & _OFFSET


class Extent:
    """An extent (or a run of neighbours for one large image) while a slot size has it.

    vacant: its free slots as bits; free: how many. blocks: what each slot holds, None if nothing.
    """

    __slots__ = ("blocks", "free", "number", "run", "slot_bytes", "slots", "vacant")

    def __init__(self, number: int, slot_bytes: int, slots: int, run: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.run = run
        self.free = slots
        self.vacant = (1 << slots) - 1
        self.blocks: list[Any] = [None] * slots


class Extents:
    """Which extents are free, which belong to a slot size, and which of its slots are free.

    Every method is synchronous and all-or-nothing.
    """

    def __init__(self, extent_bytes: int) -> None:
        if extent_bytes > _OFFSET:
            raise InvalidRequest("extent_bytes must be less than 4 GiB")
        self.extent_bytes = extent_bytes
        self.total = 0
        self._free = 0
        self._taken: dict[int, Extent] = {}
        self._by_size: dict[int, dict[int, Extent]] = {}
        self._roomy: dict[int, dict[int, Extent]] = {}
        self._spare: dict[int, int] = {}

    def add(self, number: int) -> None:
        """A new extent may be used from now on."""
        if self._free >> number & 1 or number in self._taken:
            raise InvalidRequest(f"extent {number} is already here")
        self._free |= 1 << number
        self.total += 1

    def run_of(self, size: int) -> int:
        """How many neighbouring extents one slot of this size needs; 1 if several slots fit."""
        return max(1, -(-size // self.extent_bytes))

    def per_extent(self, size: int) -> int:
        """How many slots of this size an extent holds."""
        return max(1, self.extent_bytes // size)

    def available(self, size: int) -> int:
        """Slots of this size that `take` could give now."""
        return self.spare(size) + self.unclaimed(size)

    def spare(self, size: int) -> int:
        """Free slots in the extents that a slot size has."""
        return self._spare.get(size, 0)

    def unclaimed(self, size: int, emptied: int = 0) -> int:
        """Slots of this size that free extents could hold, were `emptied` (bits) free as well."""
        run = self.run_of(size)
        free = self._free | emptied
        return free.bit_count() * self.per_extent(size) if run == 1 else _runs(free, run)

    def extent(self, number: int) -> Extent | None:
        """What a slot size has at this number: an extent, or the run that it is part of."""
        return self._taken.get(number)

    def sizes(self) -> dict[int, int]:
        """Extents that each slot size has."""
        return {size: len(have) * self.run_of(size) for size, have in self._by_size.items() if have}

    def windows(self, run: int, size: int) -> list[set[Extent]]:
        """What other slot sizes have, as sets of extents that make `run` free neighbours if emptied."""
        if run == 1:
            others = (have.values() for other, have in self._by_size.items() if other != size)
            return [{extent} for have in others for extent in have]
        here = self._free
        for extents in self._by_size.values():
            for extent in extents.values():
                if extent.slot_bytes != size:
                    here |= (1 << extent.run) - 1 << extent.number
        windows = []
        for first in range(here.bit_length() - run + 1):
            if (here >> first) & (1 << run) - 1 == (1 << run) - 1:
                taken = {self._taken[n] for n in range(first, first + run) if n in self._taken}
                if taken:
                    windows.append(taken)
        return windows

    @property
    def free(self) -> int:
        """Extents that no slot size has."""
        return self._free.bit_count()

    def take(self, size: int, count: int) -> list[int] | None:
        """`count` slots, from as few extents as there are, or None and no change."""
        if self.available(size) < count:
            return None
        taken: list[int] = []
        roomy = self._roomy.setdefault(size, {})
        while len(taken) < count:
            if not roomy:
                self._claim(size)
            number, extent = roomy.popitem()
            while extent.free and len(taken) < count:
                low = extent.vacant & -extent.vacant
                extent.vacant ^= low
                extent.free -= 1
                taken.append(number << 32 | (low.bit_length() - 1) * size)
            if extent.free:
                roomy[number] = extent
        self._spare[size] = self._spare.get(size, 0) - count
        return taken

    def hold(self, slot: int, block: object) -> None:
        """Note what a taken slot holds."""
        extent = self._taken[extent_of(slot)]
        extent.blocks[offset_of(slot) // extent.slot_bytes] = block

    def give(self, slot: int) -> None:
        """A slot is free again; an extent that is empty belongs to nobody again.
        Raises `InvalidRequest`, and changes nothing, for a slot that is not taken."""
        number = extent_of(slot)
        extent = self._taken.get(number)
        index, odd = divmod(offset_of(slot), extent.slot_bytes) if extent else (0, 0)
        if (
            extent is None
            or extent.number != number
            or odd
            or index >= extent.slots
            or extent.vacant >> index & 1
        ):
            raise InvalidRequest(f"slot {slot:#x} is not taken")
        size = extent.slot_bytes
        extent.vacant |= 1 << index
        extent.free += 1
        extent.blocks[index] = None
        self._spare[size] += 1
        if extent.free < extent.slots:
            self._roomy[size][number] = extent
            return
        self._roomy[size].pop(number, None)
        self._spare[size] -= extent.slots
        del self._by_size[size][number]
        for part in range(number, number + extent.run):
            del self._taken[part]
        self._free |= (1 << extent.run) - 1 << number

    def _claim(self, size: int) -> None:
        run = self.run_of(size)
        number = _lowest_run(self._free, run)
        extent = Extent(number, size, self.per_extent(size), run)
        self._free &= ~((1 << run) - 1 << number)
        for part in range(number, number + run):
            self._taken[part] = extent
        self._by_size.setdefault(size, {})[number] = extent
        self._roomy[size][number] = extent
        self._spare[size] = self._spare.get(size, 0) + extent.slots


def _lowest_run(free: int, length: int) -> int:
    """First number of the lowest run of free neighbours."""
    starts = free
    for shift in range(1, length):
        starts &= free >> shift
    return (starts & -starts).bit_length() - 1


def _runs(free: int, length: int) -> int:
    """How many runs of so many free neighbours can be taken one after the other."""
    return sum(len(streak) // length for streak in bin(free)[2:].split("0"))
