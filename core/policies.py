"""In which order blocks are evicted: `lru` and `arc` behind one small protocol.

A policy only orders; what may go (unpinned, clean, without descendants) is the shelf's to say.
Both orders keep prefix heads longer than tails: a hit touches a whole prefix with one tick of
the clock, and only a block without descendants is ever offered.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from typing import Protocol

from kvtide.core.index import Block

MayGo = Callable[[Block], bool]
"""Whether a block may be evicted now, given what is already chosen."""


class Policy(Protocol):
    """The order of eviction among the blocks of one slot size."""

    def miss(self, keys: Iterable[bytes]) -> None:
        """Room is about to be asked for these names."""

    def admit(self, block: Block, tick: int) -> None:
        """A block has become present."""

    def hit(self, blocks: Iterable[Block], tick: int) -> None:
        """A prefix was matched, head first. Called on the hot path."""

    def offer(self, block: Block) -> None:
        """The block may be evicted from now on (until it may not; that is checked later)."""

    def demote(self, block: Block) -> None:
        """The block is unreachable: it goes before all others."""

    def victims(self, may_go: MayGo) -> Generator[Block, None, None]:
        """Blocks to evict, first to go first. The caller may stop at any point and choose none;
        choosing happens by `leave`. A parent follows once `may_go` says that it may."""

    def leave(self, block: Block, *, evicted: bool) -> None:
        """The block is gone: by eviction, or because it was forgotten."""


class _Recency:
    """Offered blocks of one mark, least recently used first: a heap put right as it is read."""

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self._heap: list[tuple[int, int, Block]] = []
        self._count = 0
        self._stale = 0

    def push(self, block: Block) -> None:
        self._count += 1
        block.offered = True
        heapq.heappush(self._heap, (block.used, self._count, block))

    def drain(self, may_go: MayGo, offer: Callable[[Block], None]) -> Generator[Block, None, None]:
        """Blocks in order of use. What was read stays offered; `leave` is what removes."""
        heap, kept = self._heap, []
        try:
            while heap:
                entry = heapq.heappop(heap)
                used, _, block = entry
                if block.mark != self._mark:
                    continue  # gone, or it stands in the other list by now
                if not may_go(block):
                    block.offered = False  # offered again when it may
                    continue
                if used != block.used:
                    self.push(block)
                    continue
                kept.append(entry)
                yield block
                above = block.parent
                if above is not None and not above.offered and may_go(above):
                    offer(above)
        finally:
            for entry in kept:
                heapq.heappush(heap, entry)

    def left(self) -> None:
        """An offered block is gone: its entry is dropped when half of the heap is such."""
        self._stale += 1
        if self._stale * 2 > len(self._heap) + 64:
            self._heap = [e for e in self._heap if e[2].mark == self._mark and e[2].offered]
            heapq.heapify(self._heap)
            self._stale = 0


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order = _Recency(1)

    def miss(self, keys: Iterable[bytes]) -> None:
        del keys

    def admit(self, block: Block, tick: int) -> None:
        block.mark = 1
        block.used = tick

    def hit(self, blocks: Iterable[Block], tick: int) -> None:
        for block in blocks:
            block.used = tick

    def offer(self, block: Block) -> None:
        if not block.offered:
            block.mark = 1
            self._order.push(block)

    def demote(self, block: Block) -> None:
        block.used = 0
        if block.offered:
            # A second entry at its new place; the old one is put right when it is read.
            self._order.push(block)

    def victims(self, may_go: MayGo) -> Generator[Block, None, None]:
        return self._order.drain(may_go, self.offer)

    def leave(self, block: Block, *, evicted: bool) -> None:
        del evicted
        if block.offered:
            self._order.left()
        block.mark = 0
        block.offered = False


class Arc:
    """Adaptive replacement (Megiddo and Modha, FAST 2003): a scan passes through `recent` and
    leaves what was used twice alone.

    `recent` and `frequent` are the paper's T1 and T2 (marks 1 and 2), the ghosts its B1 and B2,
    `target` its p. The capacity is the most blocks that were ever present at once.
    """

    def __init__(self) -> None:
        self._orders = {1: _Recency(1), 2: _Recency(2)}
        self._present = {1: 0, 2: 0}
        self._ghosts: dict[int, OrderedDict[bytes, None]] = {1: OrderedDict(), 2: OrderedDict()}
        self._returning: set[bytes] = set()
        self._capacity = 0
        self.target = 0.0

    def miss(self, keys: Iterable[bytes]) -> None:
        recent, frequent = self._ghosts[1], self._ghosts[2]
        for key in keys:
            if key in recent:
                step = max(len(frequent) / len(recent), 1.0)
                self.target = min(self.target + step, float(self._capacity))
                del recent[key]
                self._returning.add(key)
            elif key in frequent:
                step = max(len(recent) / len(frequent), 1.0)
                self.target = max(self.target - step, 0.0)
                del frequent[key]
                self._returning.add(key)

    def admit(self, block: Block, tick: int) -> None:
        if block.mark:  # a partial block that was offered before it was whole
            self._present[block.mark] -= 1
            if block.offered:
                self._orders[block.mark].left()
                block.offered = False
        block.mark = 2 if block.key in self._returning else 1
        self._returning.discard(block.key)
        block.used = tick
        self._present[block.mark] += 1
        self._capacity = max(self._capacity, self._present[1] + self._present[2])

    def hit(self, blocks: Iterable[Block], tick: int) -> None:
        promoted = 0
        for block in blocks:
            block.used = tick
            if block.mark == 1:
                block.mark = 2
                promoted += 1
                if block.offered:
                    self._orders[1].left()
                    self._orders[2].push(block)
        self._present[1] -= promoted
        self._present[2] += promoted

    def offer(self, block: Block) -> None:
        if not block.offered:
            if not block.mark:
                block.mark = 1
                self._present[1] += 1
            self._orders[block.mark].push(block)

    def demote(self, block: Block) -> None:
        block.used = 0
        if block.offered:
            self._orders[block.mark].push(block)

    def victims(self, may_go: MayGo) -> Generator[Block, None, None]:
        """The paper's REPLACE, once for every block that the caller takes."""
        left = dict(self._present)
        with contextlib.ExitStack() as stack:

            def drain(mark: int) -> Generator[Block, None, None]:
                order = self._orders[mark].drain(may_go, self.offer)
                return stack.enter_context(contextlib.closing(order))

            orders = {1: drain(1), 2: drain(2)}
            while True:
                first = 1 if left[1] and left[1] > self.target else 2
                for mark in (first, 3 - first):
                    block = next(orders[mark], None)
                    if block is None:
                        # It had run dry before: a parent may have come up in it since.
                        orders[mark] = drain(mark)
                        block = next(orders[mark], None)
                    if block is not None:
                        left[mark] -= 1
                        yield block
                        break
                else:
                    return

    def leave(self, block: Block, *, evicted: bool) -> None:
        if not block.mark:
            return
        mark = block.mark
        if block.offered:
            self._orders[mark].left()
        self._present[mark] -= 1
        if evicted:
            self._ghosts[mark][block.key] = None
            self._trim()
        block.mark = 0
        block.offered = False

    def _trim(self) -> None:
        """|T1| + |B1| <= c and all four lists together <= 2c."""
        recent, frequent = self._ghosts[1], self._ghosts[2]
        while recent and self._present[1] + len(recent) > self._capacity:
            recent.popitem(last=False)
        total = self._present[1] + self._present[2] + len(recent) + len(frequent)
        while total > 2 * self._capacity and frequent:
            frequent.popitem(last=False)
            total -= 1


def policy(name: str) -> Policy:
    """A fresh policy by its setting's name."""
    return Arc() if name == "arc" else Lru()
