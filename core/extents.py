"""Room of a tier, cut into extents that slot sizes take and give back (R8). Pure bookkeeping.

A slot is an int, `extent << 32 | offset`, both in their plain units (offset in bytes).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Extent:
    """An extent (or a run of neighbours for one large image) while a slot size has it."""

    number: int
    slot_bytes: int
    slots: int
    run: int = 1
    fresh: int = 0
    returned: set[int] = field(default_factory=set)

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return self.slots - self.fresh + len(self.returned)


class Extents:
    """Which extents are free, which belong to a slot size, and which of its slots are free.

    Every method is synchronous and all-or-nothing.
    """

    def __init__(self, extent_bytes: int) -> None:
        if extent_bytes > _OFFSET:
            raise InvalidRequest("extent_bytes must be less than 4 GiB")
        self.extent_bytes = extent_bytes
        self.total = 0
        self._free: set[int] = set()
        self._taken: dict[int, Extent] = {}
        self._by_size: dict[int, dict[int, Extent]] = {}
        self._roomy: dict[int, dict[int, Extent]] = {}
        self._spare: dict[int, int] = {}

    def add(self, number: int) -> None:
        """A new extent may be used from now on."""
        if number in self._free or number in self._taken:
            raise InvalidRequest(f"extent {number} is already here")
        self._free.add(number)
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

    def unclaimed(self, size: int, emptied: Set[int] = frozenset()) -> int:
        """Slots of this size that free extents could hold, were `emptied` free as well."""
        run = self.run_of(size)
        if run == 1:
            return (len(self._free) + len(emptied)) * self.per_extent(size)
        return len(self._runs(run, emptied))

    def extent(self, number: int) -> Extent:
        """The extent (or the run that begins) with this number, which a slot size has."""
        return self._taken[number]

    def sizes(self) -> dict[int, int]:
        """Extents that each slot size has."""
        return {
            size: sum(extent.run for extent in extents.values())
            for size, extents in self._by_size.items()
            if extents
        }

    def numbers(self, size: int) -> list[int]:
        """The extents of a slot size."""
        return list(self._by_size.get(size, {}))

    @property
    def free(self) -> int:
        """Extents that no slot size has."""
        return len(self._free)

    def take(self, size: int, count: int) -> list[int] | None:
        """`count` slots, from as few extents as there are, or None and no change."""
        if self.available(size) < count:
            return None
        taken: list[int] = []
        roomy = self._roomy.setdefault(size, {})
        run = self.run_of(size)
        while len(taken) < count:
            extent = next(iter(roomy.values()), None)
            if extent is None:
                extent = self._claim(min(self._free) if run == 1 else self._runs(run)[0], size)
            while extent.free and len(taken) < count:
                if extent.returned:
                    index = extent.returned.pop()
                else:
                    index, extent.fresh = extent.fresh, extent.fresh + 1
                taken.append(extent.number << 32 | index * size)
            if not extent.free:
                del roomy[extent.number]
        self._spare[size] -= count
        return taken

    def give(self, slot: int) -> None:
        """A slot is free again; an extent that is empty belongs to nobody again."""
        extent = self._taken[extent_of(slot)]
        index = offset_of(slot) // extent.slot_bytes
        if index >= extent.fresh or index in extent.returned:
            raise InvalidRequest(f"slot {slot:#x} is not taken")
        extent.returned.add(index)
        self._spare[extent.slot_bytes] += 1
        if extent.free < extent.slots:
            self._roomy[extent.slot_bytes].setdefault(extent.number, extent)
            return
        self._roomy[extent.slot_bytes].pop(extent.number, None)
        self._spare[extent.slot_bytes] -= extent.slots
        del self._by_size[extent.slot_bytes][extent.number]
        del self._taken[extent.number]
        self._free.update(range(extent.number, extent.number + extent.run))

    def _claim(self, number: int, size: int) -> Extent:
        run = self.run_of(size)
        self._free.difference_update(range(number, number + run))
        extent = Extent(number, size, self.per_extent(size), run)
        self._taken[number] = extent
        self._by_size.setdefault(size, {})[number] = extent
        self._roomy.setdefault(size, {})[number] = extent
        self._spare[size] = self._spare.get(size, 0) + extent.slots
        return extent

    def _runs(self, length: int, emptied: Set[int] = frozenset()) -> list[int]:
        """First numbers of disjoint runs of free neighbours, lowest first."""
        runs, streak = [], 0
        previous = None
        for number in sorted(self._free | emptied):
            streak = streak + 1 if previous is not None and number == previous + 1 else 1
            previous = number
            if streak == length:
                runs.append(number - length + 1)
                streak = 0
        return runs
