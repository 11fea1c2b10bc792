"""A load: held blocks into pages, promoted to host memory first where they lie lower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvtide.core.errors import KVTideError, NoRoom
from kvtide.core.index import Block
from kvtide.core.protocols import Mark
from kvtide.core.shelf import Fill, Link
from kvtide.core.states import HELD, State
from kvtide.core.transfers import Transfer

if TYPE_CHECKING:
    from kvtide.core.cache import Cache
    from kvtide.core.pages import Pages


@dataclass(frozen=True, slots=True)
class Loaded:
    """What arrived: the contiguous prefix of the hit.

    tokens: counted from the hit's first. shortfall: tokens to be recomputed, by reason
    (`no_room`, `corrupt`, `tier_failed`, and `behind` for what lay behind one of these).
    """

    tokens: int
    shortfall: Mapping[str, int] = field(default_factory=dict)


class Load(Transfer[Loaded]):
    """Blocks of one rank on their way into pages.

    found: for each block of the hit, what the hit pinned: a host block, or one below.
    """

    def __init__(
        self,
        cache: Cache,
        pages: Pages,
        links: Sequence[Link],
        found: Sequence[Block],
        page_ids: Sequence[int],
        mark: Mark,
        deadline: float,
    ) -> None:
        super().__init__(cache, pages, mark, deadline)
        self._links = links
        self._found = found
        self._page_ids = page_ids
        self._sources: list[Block | None] = [None] * len(links)
        self._below: list[Block] = []
        self._reasons: dict[bytes, str] = {}
        self._awaited = 0
        self._count = 0
        self._given_up = False
        # Its own pins, from the call on: the caller may close its hit at once.
        cache.pin(found)

    def _needs_no_room(self) -> bool:
        return not self._missing()

    def _missing(self) -> list[int]:
        """Positions to promote: neither in host memory nor on their way there.

        A hit may be larger than host memory: then the first that fit beside what is there.
        """
        host = self._cache.host
        missing = []
        for at, (link, found) in enumerate(zip(self._links, self._found, strict=True)):
            if self._cache.in_host(found):
                continue
            block = host.index.nodes.get(link[0])
            if block is None or (block.state not in HELD and block.state is not State.FILLING):
                missing.append(at)
        room = host.capacity(self._pages.space) - (len(self._links) - len(missing))
        return missing[: max(0, room)]

    def _attempt(self) -> bool:
        cache, host = self._cache, self._cache.host
        missing = self._missing()
        reserved = host.reserve(self._pages.space, [self._links[at] for at in missing], keep=self._names())
        if reserved is None:
            return False
        self._claim = None
        for block in reserved:
            host.fills[block] = Fill(running=set(range(block.space.shards)))
        self._pin_sources()
        if reserved:
            below = [self._found[at] for at in missing]
            cache.promote(reserved, below)
        self._maybe_copy()
        return True

    def _names(self) -> list[bytes]:
        return [key for key, _ in self._links]

    def _pin_sources(self) -> None:
        """Hold what is in host memory or on its way there, and hear of the latter."""
        for at, (link, found) in enumerate(zip(self._links, self._found, strict=True)):
            if self._cache.in_host(found):
                block: Block | None = found
            else:
                block = self._cache.host.index.nodes.get(link[0])
                if block is not None and block.state not in (*HELD, State.FILLING):
                    block = None
            if block is None:
                continue
            self._sources[at] = block
            self._cache.host.pin([block])
            fill = self._cache.host.fills.get(block)
            if fill is not None:
                self._awaited += 1
                fill.waiters.append(partial(self._fill_ended, block, fill))

    def _fill_ended(self, block: Block, fill: Fill) -> bool:
        if fill.failure:
            self._reasons[block.key] = fill.failure
        self._awaited -= 1
        self._maybe_copy()
        return True

    def _maybe_copy(self) -> None:
        if self._awaited:
            return
        if self._given_up:
            self._drop_mark()
            self._unpin()
            self._settle()
            return
        self._count = 0
        for block in self._sources:
            # A doomed block's bytes stay while it is pinned; one that was doomed while it was
            # being filled has a fill, or no bytes at all.
            if block is None or not (block.state in HELD or self._whole(block)):
                break
            self._count += 1
        if not self._count:
            self._end_empty()
            return
        self.nbytes = self._count * self._pages.image_bytes
        self._enter_gate()

    def _whole(self, block: Block) -> bool:
        return block.state is State.DOOMED and block in self._found

    def _no_room(self, error: KVTideError, *, late: bool) -> None:
        if not isinstance(error, NoRoom):
            self._drop_mark()
            self._finish_error(error)
            self._unpin()
            self._settle()
            return
        for at in self._missing():
            self._reasons[self._links[at][0]] = "no_room"
        if late:
            self._end_empty()
            return
        # What lies in host memory still can be had.
        self._pin_sources()
        self._maybe_copy()

    def _end_empty(self) -> None:
        """Nothing of it arrived, and nothing was copied."""
        self._count = 0
        self._drop_mark()
        self._finish(self._loaded())
        self._unpin()
        self._settle()

    def _loaded(self) -> Loaded:
        tokens = self._pages.block_tokens
        shortfall: dict[str, int] = {}
        default = "no_room"  # of the first: it was not even tried
        for key, _ in self._links[self._count :]:
            reason = self._reasons.get(key, default)
            default = "behind"
            shortfall[reason] = shortfall.get(reason, 0) + tokens
        return Loaded(tokens=self._count * tokens, shortfall=shortfall)

    def _start(self) -> None:
        rank = self._pages.rank
        slots = [block.slot(rank) for block in self._sources[: self._count] if block is not None]
        self._pages.endpoint.load(
            self._page_ids[: self._count], slots, self._mark, self._on_submitted, self._on_done
        )

    def _let_go(self, error: BaseException | None) -> None:
        if error is None:
            self._cache.loaded_bytes += self.nbytes
            self._finish(self._loaded())
        self._unpin()

    def _unpin(self) -> None:
        sources = [block for block in self._sources if block is not None]
        found, self._sources, self._found = self._found, [], []
        self._cache.host.unpin(sources)
        self._cache.unpin(found)

    def _abandon(self) -> bool:
        # Others' fills, or its own promotions, go on into host memory; the pages are not
        # touched any more, but the blocks stay pinned until those end.
        self._given_up = True
        return False
