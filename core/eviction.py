"""Choosing what goes to make room: all that is needed or nothing (R5, R8). Changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping

from kvtide.core.extents import Extents, extent_of
from kvtide.core.index import Block, Space
from kvtide.core.policies import Policy
from kvtide.core.states import EVICTABLE, State


class Plan:
    """Blocks chosen to go, tails before heads, and the room that their going would make.

    wanted: names that room is asked for, which may not go for it.
    """

    def __init__(self, extents: Extents, residents: Mapping[int, set[Block]], wanted: set[bytes]) -> None:
        self.chosen: dict[Block, None] = {}
        self._extents = extents
        self._residents = residents
        self._wanted = wanted
        # Kept as blocks are chosen, so that asking for the gain takes no walk over them.
        self._leaving: dict[int, int] = {}
        self._emptied: set[int] = set()
        self._gained: dict[int, int] = {}
        self._bytes: dict[Space, int] = {}

    def make_room(self, space: Space, count: int, policy_of: Callable[[int], Policy]) -> bool:
        """Choose until `count` blocks of a namespace fit. False if that cannot be."""
        size = space.slot_bytes
        slots = count * space.shards
        if space.quota is not None:
            over = space.used + count * space.block_bytes - space.quota
            own = self._ordered(policy_of(size), space)
            if not self._take(own, lambda: self._bytes.get(space, 0) >= over):
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
        choices = [self._ordered(policy_of(size)), self._whole_extents(size)]
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
        if block in self.chosen:
            return
        self.chosen[block] = None
        self._bytes[block.space] = self._bytes.get(block.space, 0) + block.space.block_bytes
        size = block.space.slot_bytes
        for slot in block.all_slots():
            number = extent_of(slot)
            extent = self._extents.extent(number)
            leaving = self._leaving[number] = self._leaving.get(number, 0) + 1
            self._gained[size] = self._gained.get(size, 0) + 1
            if leaving == extent.slots - extent.free:
                # It will be nobody's: its slots count with the free extents from now on.
                self._emptied.update(range(number, number + extent.run))
                self._gained[size] -= extent.slots

    def _available(self, size: int) -> int:
        extents = self._extents
        return extents.spare(size) + self._gained.get(size, 0) + extents.unclaimed(size, self._emptied)

    def _may_go(self, block: Block) -> bool:
        return (
            block.state in EVICTABLE
            and not block.pins
            and block not in self.chosen
            and block.key not in self._wanted
            and all(child in self.chosen for child in block.children())
        )

    def _ordered(self, policy: Policy, space: Space | None = None) -> Generator[Block, None, None]:
        """Blocks of one slot size, or of one namespace alone, in the policy's order."""
        with contextlib.closing(policy.victims(self._may_go)) as victims:
            for block in victims:
                if space is None or block.space is space:
                    yield block

    def _whole_extents(self, size: int) -> Generator[Block, None, None]:
        """The blocks of whole extents of other sizes: from the size that has most extents,
        the longest unused extent first."""
        sizes = self._extents.sizes()
        for other in sorted((other for other in sizes if other != size), key=lambda o: -sizes[o]):
            numbers = self._extents.numbers(other)
            for number in sorted(numbers, key=self._last_use):
                yield from self._closure(number) or ()

    def _last_use(self, number: int) -> int:
        return max((block.used for block in self._residents.get(number, ())), default=0)

    def _closure(self, number: int) -> list[Block] | None:
        """An extent's blocks with all their descendants, tails first; None if one has to stay."""
        order: list[Block] = []
        seen: set[Block] = set()
        stack = [(block, False) for block in self._residents.get(number, ())]
        while stack:
            block, expanded = stack.pop()
            if expanded:
                order.append(block)
                continue
            if block in seen or block in self.chosen:
                continue
            seen.add(block)
            if block.state is not State.ABSENT:
                if block.state not in EVICTABLE or block.pins or block.key in self._wanted:
                    return None
                stack.append((block, True))
            stack.extend((child, False) for child in block.children())
        return order
