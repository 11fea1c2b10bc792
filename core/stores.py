"""A store: pages to host memory. Done when the host holds every block; spilling goes on behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvtide.core.errors import KVTideError
from kvtide.core.index import Block
from kvtide.core.protocols import Mark
from kvtide.core.shelf import Fill, Link
from kvtide.core.states import State
from kvtide.core.transfers import Transfer

if TYPE_CHECKING:
    from kvtide.core.cache import Cache
    from kvtide.core.pages import Pages


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a store's blocks.

    stored: copied by this transfer. already: held, or brought by another transfer.
    dropped: not held: no room under `on_full="drop"`, or the other transfer failed.
    """

    stored: int
    already: int
    dropped: int


class Store(Transfer[Stored]):
    """Blocks of one rank on their way into host memory."""

    def __init__(
        self,
        cache: Cache,
        pages: Pages,
        links: Sequence[Link],
        page_ids: Sequence[int],
        mark: Mark,
        deadline: float,
    ) -> None:
        super().__init__(cache, pages, mark, deadline)
        self._links = links
        self._page_ids = page_ids
        self._blocks: list[Block] = []
        self._sources: list[int] = []
        self._joined: list[bytes] = []
        self._awaited = 0
        self._already = 0
        self._dropped = 0
        self._own_part_over = False

    def _needs_no_room(self) -> bool:
        nodes = self._cache.host.index.nodes
        return all(
            (key in nodes and nodes[key].state is not State.ABSENT) or self._cache.held_below(key) is not None
            for key, _ in self._links
        )

    def _attempt(self) -> bool:
        host, rank = self._cache.host, self._pages.rank
        joined, ours, sources, missing, missing_ids = [], [], [], [], []
        fills: list[Fill] = []
        already = 0
        for link, page_id in zip(self._links, self._page_ids, strict=True):
            key = link[0]
            block = host.index.nodes.get(key)
            if block is None or block.state is State.ABSENT:
                if self._cache.held_below(key) is None:
                    missing.append(link)
                    missing_ids.append(page_id)
                else:
                    already += 1
            elif block.state in (State.FILLING, State.PARTIAL):
                fill = host.fills[block]
                if rank in fill.arrived:
                    already += 1
                elif rank in fill.running:
                    joined.append(key)
                    fills.append(fill)
                else:
                    ours.append(block)
                    sources.append(page_id)
            else:
                already += 1
        reserved = host.reserve(self._pages.space, missing, keep=[b.key for b in ours])
        if reserved is None:
            if self._cache.settings.on_full == "drop":
                self._dropped = len(missing)
                self._cache.dropped_blocks += len(missing)
                reserved, missing_ids = [], []
            elif len(missing) <= host.capacity(self._pages.space):
                return False
            else:
                self._impossible(len(missing))
                return True
        sources.extend(missing_ids)
        host.pin(ours)
        for block in ours:
            host.resume(block)
            host.fills[block].running.add(rank)
        for block in reserved:
            host.fills[block] = Fill(running={rank})
        self._claim = None
        self._blocks = ours + reserved
        self._sources = sources
        self._joined = joined
        self._already = already
        self._awaited = len(fills)
        for fill in fills:
            fill.waiters.append(partial(self._other_ended, fill))
        if self._blocks:
            self.nbytes = len(self._blocks) * self._pages.image_bytes
            self._enter_gate()
        else:
            self._drop_mark()
            self._own_part_over = True
            self._maybe_finish()
        return True

    def _impossible(self, count: int) -> None:
        space = self._pages.space
        limit = "its quota" if space.quota is not None else "the host tier"
        error = self._cache.host.no_room(
            f"{count} blocks of {space.block_bytes} bytes can never fit into {limit}: "
            "raise host_bytes (or the quota), or store fewer blocks at once"
        )
        self._no_room(error, late=False)

    def _no_room(self, error: KVTideError, *, late: bool) -> None:
        del late
        self._drop_mark()
        self._cache.dropped_blocks += len(self._links)
        self._finish_error(error)
        self._settle()

    def _start(self) -> None:
        slots = [block.slot(self._pages.rank) for block in self._blocks]
        self._pages.endpoint.store(self._sources, slots, self._mark, self._on_submitted, self._on_done)

    def _let_go(self, error: BaseException | None) -> None:
        host, rank = self._cache.host, self._pages.rank
        published = []
        woken = []
        for block in self._blocks:
            fill = host.fills.get(block)
            if fill is None:
                continue  # forgotten meanwhile, by a clear
            fill.running.discard(rank)
            woken.append(fill)
            if error is None:
                fill.arrived.add(rank)
            if len(fill.arrived) == self._pages.space.shards:
                host.publish(block)
                published.append(block)
            elif not fill.running:
                if fill.arrived:
                    host.pause(block)
                else:
                    host.abort(block)
        host.unpin([block for block in self._blocks if block.pins])
        if error is None:
            self._cache.stored_bytes += self.nbytes
        self._cache.spill(published)
        for fill in woken:
            fill.wake()
        self._own_part_over = True
        if error is None:
            self._maybe_finish()

    def _other_ended(self, fill: Fill) -> bool:
        if self._pages.rank in fill.running:
            return False
        self._awaited -= 1
        self._maybe_finish()
        return True

    def _maybe_finish(self) -> None:
        if not self._own_part_over or self._awaited or self._result.over:
            return
        lost = 0
        for key in self._joined:
            block = self._cache.host.index.nodes.get(key)
            fill = self._cache.host.fills.get(block) if block is not None else None
            arrived = fill is not None and self._pages.rank in fill.arrived
            if not arrived and self._cache.host.index.held(key) is None:
                lost += 1
        self._finish(
            Stored(
                stored=len(self._blocks),
                already=self._already + len(self._joined) - lost,
                dropped=self._dropped + lost,
            )
        )
        if not self._copying:
            self._settle()

    def _abandon(self) -> bool:
        # Only blocks of other transfers are awaited; this one copies nothing any more.
        return self._own_part_over
