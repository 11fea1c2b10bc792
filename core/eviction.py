"""Choosing what goes to make room: all that is needed or nothing (R5, R8). Changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence, Set

from kvtide.core.extents import Extent, Extents, extent_of
from kvtide.core.index import Block, Space
from kvtide.core.policies import Policy
from kvtide.core.states import EVICTABLE, State


class Plan:
    """Blocks chosen to go, tails before heads, and the room that their going would make.

    names: what room is asked for. keep: names that may not go for it.
    """

    def __init__(
        self,
        extents: Extents,
        policy_of: Callable[[int], Policy],
        names: Sequence[bytes],
        keep: Set[bytes] = frozenset(),
    ) -> None:
        self.chosen: dict[Block, None] = {}
        self._extents = extents
        self._policy_of = policy_of
        self._names = names
        self._keep = keep
        # Kept as blocks are chosen, so that asking for the gain takes no walk over them.
        self._orphaned: dict[Block, int] = {}
        self._leaving: dict[int, int] = {}
        self._emptied = 0
        self._gained: dict[int, int] = {}
        self._bytes: dict[Space, int] = {}

    def make_room(self, space: Space, count: int) -> bool:
        """Choose until `count` blocks of a namespace fit. False if that cannot be."""
        size = space.slot_bytes
        slots = count * space.shards
        if space.quota is not None:
            over = space.used + count * space.block_bytes - space.quota
            if not self._take(self._ordered(size, space), lambda: self._bytes.get(space, 0) >= over):
                return False

        def enough() -> bool:
            return self._available(size) >= slots

        if enough():
            return True
        # A slot size below its fair share of extents takes others', one at or above it lives
        # off its own blocks; either turns to the other when its first choice can't give.
        sizes = self._extents.sizes()
        held = sizes.get(size, 0)
        share = self._extents.total / len({*sizes, size})
        choices = [self._ordered(size), self._whole_extents(size, sizes)]
        if held < share:
            choices.reverse()
        return any(self._take(choice, enough) for choice in choices)

    def _take(self, blocks: Generator[Block, None, None], enough: Callable[[], bool]) -> bool:
        # Closed at once: what a policy has read it puts back only then.
        with contextlib.closing(blocks):
            while not enough():
                block = next(blocks, None)
                if block is None:
                    return False
                self._choose(block)
            return True

    def _choose(self, block: Block) -> None:
        self.chosen[block] = None
        self._bytes[block.space] = self._bytes.get(block.space, 0) + block.space.block_bytes
        size = block.space.slot_bytes
        for slot in block.all_slots():
            number = extent_of(slot)
            extent = self._extents.extent(number)
            assert extent is not None
            leaving = self._leaving[number] = self._leaving.get(number, 0) + 1
            self._gained[size] = self._gained.get(size, 0) + 1
            if leaving == extent.slots - extent.free:
                # It will be nobody's: its slots count with the free extents from now on.
                self._emptied |= (1 << extent.run) - 1 << number
                self._gained[size] -= extent.slots
        self._expose(block)

    def _expose(self, block: Block) -> None:
        """Offer what lies above, if this was its last descendant: it may go as well."""
        above = block.parent
        while above is not None:
            orphaned = self._orphaned[above] = self._orphaned.get(above, 0) + 1
            if orphaned < above.degree:
                return
            if above.state is not State.ABSENT:
                if self._may_go(above):
                    self._policy_of(above.space.slot_bytes).offer(above)
                return
            above = above.parent  # an absent node goes with its last descendant

    def _available(self, size: int) -> int:
        extents = self._extents
        return extents.spare(size) + self._gained.get(size, 0) + extents.unclaimed(size, self._emptied)

    def _removable(self, block: Block) -> bool:
        return block.state in EVICTABLE and not block.pins and block.key not in self._keep

    def _may_go(self, block: Block) -> bool:
        return (
            self._removable(block)
            and block not in self.chosen
            and self._orphaned.get(block, 0) == block.degree
        )

    def _ordered(self, size: int, space: Space | None = None) -> Generator[Block, None, None]:
        """Blocks of one slot size, or of one namespace alone, in the policy's order."""
        return self._policy_of(size).victims(self._may_go, self._names, space)

    def _whole_extents(self, size: int, sizes: dict[int, int]) -> Generator[Block, None, None]:
        """The blocks of whole extents of other sizes: from the size that has most extents,
        the longest unused extent first."""

        def order(window: set[Extent]) -> tuple[int, int]:
            return -min(sizes[e.slot_bytes] for e in window), max(map(_last_use, window))

        for window in sorted(self._extents.windows(self._extents.run_of(size), size), key=order):
            yield from self._closure(window) or ()

    def _closure(self, window: set[Extent]) -> list[Block] | None:
        """The extents' blocks with all their descendants, tails first; None if one has to stay."""
        order: list[Block] = []
        seen: set[Block] = set()
        stack = [(block, False) for extent in window for block in extent.blocks if block is not None]
        while stack:
            block, expanded = stack.pop()
            if expanded:
                order.append(block)
                continue
            if block in seen or block in self.chosen:
                continue
            seen.add(block)
            if block.state is not State.ABSENT:
                if not self._removable(block):
                    return None
                stack.append((block, True))
            stack.extend((child, False) for child in block.children())
        return order


def _last_use(extent: Extent) -> int:
    return max((block.used for block in extent.blocks if block is not None), default=0)
