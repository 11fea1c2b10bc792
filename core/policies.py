"""In which order blocks are evicted: `lru` and `arc` behind one small protocol.

A policy only orders; what may go (unpinned, clean, without descendants) is the plan's to say.
Both orders keep prefix heads longer than tails: a hit touches a whole prefix with one tick of
the clock, and only a block without descendants is ever offered.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from operator import itemgetter
from typing import Protocol

from kvtide.core.index import Block, Space

MayGo = Callable[[Block], bool]
"""Whether a block may be evicted now, given what is already chosen."""


class Policy(Protocol):
    """The order of eviction among the blocks of one slot size."""

    def enter(self, blocks: Sequence[Block], tick: int) -> None:
        """Room was given to these; called before what goes for it leaves."""

    def hit(self, blocks: Iterable[Block], tick: int) -> None:
        """A prefix was matched, head first. Called on the hot path."""

    def offer(self, block: Block) -> None:
        """The block may be evicted from now on (until it may not: that is looked at again)."""

    def demote(self, block: Block) -> bool:
        """The block is unreachable: it goes before all others. False if it did already."""

    def victims(
        self, may_go: MayGo, names: Sequence[bytes], space: Space | None = None
    ) -> Generator[Block, None, None]:
        """Blocks to evict, first to go first; of one namespace alone if `space` is given.

        names: what room is asked for. Nothing is changed by it: the caller may stop at any
        point, and closes the generator before anything leaves. What was offered meanwhile is
        considered. A block that `may_go` refuses is offered no more.
        """

    def leave(self, block: Block, *, evicted: bool) -> None:
        """The block is gone: by eviction, or because it was forgotten or never came."""


_serials = itertools.count(1)


class _Order:
    """Offered blocks, least recently used first: heaps put right as they are read, one for each
    namespace, so that a quota needn't walk past the others' blocks.

    An entry counts as long as its block's `offered` is its serial.
    """

    def __init__(self) -> None:
        self._heaps: dict[Space, list[tuple[int, int, Block]]] = {}
        self._entries = 0
        self._stale = 0

    def __len__(self) -> int:
        """Entries, those that count no more included."""
        return self._entries

    def push(self, block: Block) -> None:
        """Offer a block, or move it to its new place."""
        self.drop(block)
        block.offered = next(_serials)
        self._entries += 1
        heap = self._heaps.setdefault(block.space, [])
        heapq.heappush(heap, (block.used, block.offered, block))

    def drop(self, block: Block) -> None:
        """Take a block out, if it is in. Costs no more than a push, on average."""
        if not block.offered:
            return
        block.offered = 0
        self._stale += 1
        if self._stale * 2 > self._entries + 64:
            for space, heap in self._heaps.items():
                self._heaps[space] = [entry for entry in heap if entry[2].offered == entry[1]]
                heapq.heapify(self._heaps[space])
            self._entries -= self._stale
            self._stale = 0

    def pop(self, may_go: MayGo, space: Space | None) -> Block | None:
        """Take out the first that may go. What may not is out as well, until it is offered again."""
        while heap := self._first(space):
            used, serial, block = heapq.heappop(heap)
            self._entries -= 1
            if block.offered != serial:
                self._stale -= 1
                continue
            block.offered = 0
            if not may_go(block):
                continue
            if used == block.used:
                return block
            self.push(block)
        return None

    def _first(self, space: Space | None) -> list[tuple[int, int, Block]] | None:
        if space is not None:
            return self._heaps.get(space)
        return min(filter(None, self._heaps.values()), key=itemgetter(0), default=None)


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order = _Order()

    def enter(self, blocks: Sequence[Block], tick: int) -> None:
        self.hit(blocks, tick)

    def hit(self, blocks: Iterable[Block], tick: int) -> None:
        for block in blocks:
            block.used = tick

    def offer(self, block: Block) -> None:
        if not block.offered:
            self._order.push(block)

    def demote(self, block: Block) -> bool:
        if not block.used:
            return False
        block.used = 0
        if block.offered:
            self._order.push(block)
        return True

    def victims(
        self, may_go: MayGo, names: Sequence[bytes], space: Space | None = None
    ) -> Generator[Block, None, None]:
        del names
        taken = []
        try:
            while block := self._order.pop(may_go, space):
                taken.append(block)
                yield block
        finally:
            for block in taken:
                self._order.push(block)

    def leave(self, block: Block, *, evicted: bool) -> None:
        del evicted
        self._order.drop(block)


_RECENT, _FREQUENT, _LOST = 1, 2, 3


class Arc:
    """Adaptive replacement (Megiddo and Modha, FAST 2003, figure 4): a scan passes through the
    blocks used once and leaves what was used twice alone.

    Marks: recent and frequent are the paper's T1 and T2, their ghosts its B1 and B2, `target` its
    p. Its c is the most blocks that were ever present at once. Where it cannot be followed:
    a block that must stay is passed over for the next in its list, or in the other if there is
    none; room is asked for several blocks at once, so p is moved for all of them before the
    first goes; blocks leave without being replaced (then fewer than c are present); and the
    unreachable, in a list of their own, go first and leave no ghost.
    """

    def __init__(self) -> None:
        self.target = 0.0
        self._orders = {_RECENT: _Order(), _FREQUENT: _Order(), _LOST: _Order()}
        self._present = dict.fromkeys(self._orders, 0)
        self._ghosts: dict[int, OrderedDict[bytes, None]] = {_RECENT: OrderedDict(), _FREQUENT: OrderedDict()}
        self._capacity = 0

    def enter(self, blocks: Sequence[Block], tick: int) -> None:
        self._capacity = max(self._capacity, sum(self._present.values()))
        self.target, _ = self._adapted([block.key for block in blocks])
        for block in blocks:
            block.used = tick
            block.mark = _RECENT
            for ghosts in self._ghosts.values():
                if block.key in ghosts:
                    del ghosts[block.key]
                    block.mark = _FREQUENT
            self._present[block.mark] += 1
        self._trim()

    def hit(self, blocks: Iterable[Block], tick: int) -> None:
        for block in blocks:
            block.used = tick
            if block.mark != _FREQUENT:
                self._move(block, _FREQUENT)

    def offer(self, block: Block) -> None:
        if not block.offered:
            self._orders[block.mark].push(block)

    def demote(self, block: Block) -> bool:
        if block.mark == _LOST:
            return False
        self._move(block, _LOST)
        return True

    def _move(self, block: Block, mark: int) -> None:
        offered = block.offered
        self._orders[block.mark].drop(block)
        self._present[block.mark] -= 1
        self._present[mark] += 1
        block.mark = mark
        if offered:
            self._orders[mark].push(block)

    def victims(
        self, may_go: MayGo, names: Sequence[bytes], space: Space | None = None
    ) -> Generator[Block, None, None]:
        """The paper's REPLACE, once for every block that the caller takes."""
        target, from_frequent = self._adapted(names)
        recent = self._present[_RECENT]
        taken = []
        try:
            while True:
                first_recent = recent and (recent > target or (from_frequent and recent == target))
                marks = (_RECENT, _FREQUENT) if first_recent else (_FREQUENT, _RECENT)
                for mark in (_LOST, *marks):
                    block = self._orders[mark].pop(may_go, space)
                    if block is not None:
                        break
                else:
                    return
                recent -= mark == _RECENT
                taken.append(block)
                yield block
        finally:
            for block in taken:
                self._orders[block.mark].push(block)

    def leave(self, block: Block, *, evicted: bool) -> None:
        mark = block.mark
        self._orders[mark].drop(block)
        self._present[mark] -= 1
        block.mark = 0
        if evicted and mark != _LOST:
            self._ghosts[mark][block.key] = None
            self._trim()

    def _adapted(self, names: Sequence[bytes]) -> tuple[float, bool]:
        """The paper's p once these names have been asked for, and whether one of them is in B2."""
        recent, frequent = len(self._ghosts[_RECENT]), len(self._ghosts[_FREQUENT])
        capacity = max(self._capacity, sum(self._present.values()))
        target = self.target
        back = False
        for name in names:
            if name in self._ghosts[_RECENT]:
                target = min(target + max(1.0, frequent / recent), float(capacity))
                recent -= 1
            elif name in self._ghosts[_FREQUENT]:
                target = max(target - max(1.0, recent / frequent), 0.0)
                frequent -= 1
                back = True
        return target, back

    def _trim(self) -> None:
        """|T1| + |B1| <= c, and all four lists together <= 2c."""
        recent, frequent = self._ghosts[_RECENT], self._ghosts[_FREQUENT]
        while recent and self._present[_RECENT] + len(recent) > self._capacity:
            recent.popitem(last=False)
        # Those who were let in before others went don't count beyond c.
        present = min(sum(self._present.values()), self._capacity)
        while frequent and present + len(recent) + len(frequent) > 2 * self._capacity:
            frequent.popitem(last=False)


def policy(name: str) -> Policy:
    """A fresh policy by its setting's name."""
    return Arc() if name == "arc" else Lru()
