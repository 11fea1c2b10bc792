"""The tier below host memory: promotions out of it, spills into it, and when to give it up."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from kvtide.core.errors import CorruptImage, KVTideError, NoRoom, TierFailed
from kvtide.core.extents import Extents
from kvtide.core.index import Block
from kvtide.core.outcome import Outcome
from kvtide.core.protocols import Component, Label, Tier
from kvtide.core.shelf import Claim, Shelf
from kvtide.core.states import State

if TYPE_CHECKING:
    from kvtide.core.cache import Cache

SPILLS_AT_ONCE = 8
FAILURES_TO_CLOSE = 3


class Below:
    """A lower tier with its shelf. After three failures in a row it is closed, and the cache
    goes on without it."""

    def __init__(self, cache: Cache, tier: Tier, policy: str) -> None:
        self.tier = tier
        self.shelf = Shelf(tier.name, Extents(tier.extent_bytes), policy)
        for number in range(tier.capacity_bytes // tier.extent_bytes):
            self.shelf.extents.add(number)
        self.failures = 0
        self._cache = cache
        self._in_a_row = 0
        self._queue: deque[Block] = deque()
        self._running = 0
        self._since = time.time()
        self._cause: str | None = None
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether it takes and gives blocks."""
        return not self._closed

    def health(self) -> Component:
        """`degraded` after a failure, `failed` once closed."""
        state = "failed" if self._closed else "degraded" if self._in_a_row else "ok"
        return Component(self.tier.name, state, self._since, self._cause)

    # -- spilling: called under the lock ------------------------------------------------------

    def spill(self, blocks: Sequence[Block]) -> None:
        """Queue dirty blocks; each is pinned until it has been spilled."""
        if self._closed:
            return
        dirty = [block for block in blocks if block.state is State.DIRTY]
        self._queue.extend(dirty)
        self._pump()

    def _pump(self) -> None:
        while self._queue and self._running < SPILLS_AT_ONCE and not self._closed:
            block = self._queue.popleft()
            if block.state is not State.DIRTY:
                continue
            self._running += 1
            host = self._cache.host
            host.spilling(block)
            host.pin([block])
            self._cache.tasks.spawn("spill", self._spill(block))

    async def _spill(self, block: Block) -> None:
        host, lock = self._cache.host, self._cache.lock
        target: Block | None = None
        ok = again = False
        try:
            target = await self._room(block)
            if target is not None:
                for rank in range(block.space.shards):
                    label = self._label(block, rank)
                    image = self._cache.image(block, rank)
                    await self._io(self.tier.write(target.slot(rank), label, image))
            ok = True
        except NoRoom:
            again = True  # paced by the deadline of the wait that just ended
        except TierFailed as error:
            with lock:
                self._failed(error)
            again = not self._closed
        finally:
            with lock:
                if target is not None:
                    if ok:
                        self.shelf.publish(target)
                        self._worked()
                    else:
                        self.shelf.abort(target)
                    if target.pins:
                        self.shelf.unpin([target])
                host.spilled(block, ok=ok)
                host.unpin([block])
                self._running -= 1
                if self._closed:
                    host.clean()
                elif again and block.state is State.DIRTY:
                    self._queue.append(block)
                self._pump()

    async def _room(self, block: Block) -> Block | None:
        """A slot below for a block, waited for in the queue; None if it is held there already."""
        space = self._cache.space_below(block.space)
        parent = block.parent.key if block.parent is not None else None
        room: Outcome[Block | None] = Outcome()

        def attempt() -> bool:
            node = self.shelf.index.nodes.get(block.key)
            if node is not None and node.state is not State.ABSENT:
                room.set(None)
                return True
            reserved = self.shelf.reserve(space, [(block.key, parent)])
            if reserved is None:
                return False
            room.set(reserved[0])
            return True

        def give_up(error: KVTideError) -> None:
            room.fail(error)

        claim = Claim(attempt, give_up)
        with self._cache.lock:
            self.shelf.ask(claim)
        try:
            async with asyncio.timeout(self._cache.settings.deadline):
                return await room
        except TimeoutError:
            self._leave(claim, room)
            raise self.shelf.no_room("no room below for a spill") from None
        except asyncio.CancelledError:
            self._leave(claim, room)
            raise

    def _leave(self, claim: Claim, room: Outcome[Block | None]) -> None:
        """Stop waiting for room, and give back what came too late to be seen."""
        with self._cache.lock:
            if not self.shelf.withdraw(claim) and room.error is None:
                late = room.result()
                if late is not None:
                    self.shelf.abort(late)
                    self.shelf.serve()

    # -- promoting ----------------------------------------------------------------------------

    def promote(self, blocks: Sequence[Block], below: Sequence[Block]) -> None:
        """Fill reserved host blocks from here. Called under the lock; ends every fill."""
        self._cache.tasks.spawn("promote", self._promote(dict(zip(blocks, below, strict=True))))

    async def _promote(self, left: dict[Block, Block]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for block in list(left):
                    group.create_task(self._promote_one(block, left))
        finally:
            # Whatever ended this, nobody waits for what will not come.
            with self._cache.lock:
                for block in list(left):
                    self._end_fill(block, left, "tier_failed")

    async def _promote_one(self, block: Block, left: dict[Block, Block]) -> None:
        source = left[block]
        error: KVTideError | None = None
        failure = ""
        try:
            for rank in range(block.space.shards):
                into = self._cache.image(block, rank)
                await self._io(self.tier.read(source.slot(rank), self._label(block, rank), into))
        except CorruptImage as corrupt:
            error, failure = corrupt, "corrupt"
        except TierFailed as broken:
            error, failure = broken, "tier_failed"
        with self._cache.lock:
            if isinstance(error, CorruptImage):
                if source.state is not State.DOOMED:
                    self.shelf.forget(source, corrupt=True)
            elif error is not None:
                self._failed(error)
            else:
                self._worked()
            self._end_fill(block, left, failure)

    def _end_fill(self, block: Block, left: dict[Block, Block], failure: str) -> None:
        if left.pop(block, None) is None:
            return
        host = self._cache.host
        fill = host.fills.get(block)
        if failure:
            host.abort(block)
        else:
            host.publish(block, clean=True)
            self._cache.promoted_blocks += 1
        if block.pins:
            host.unpin([block])
        if fill is not None:
            fill.failure = failure
            fill.wake()

    # -- failing ------------------------------------------------------------------------------

    async def _io(self, work: Awaitable[None]) -> None:
        """The edge at which what a tier raises becomes ours (R11)."""
        try:
            await work
        except KVTideError:
            raise
        except Exception as error:  # a tier's author may let anything through
            raise TierFailed(f"{type(error).__name__}: {error}") from error

    def _label(self, block: Block, rank: int) -> Label:
        namespace = self._cache.namespaces[block.space.name]
        return Label(namespace.digest, block.key, rank, namespace.image_bytes)

    def _worked(self) -> None:
        if self._in_a_row:
            self._in_a_row = 0
            self._since, self._cause = time.time(), None

    def _failed(self, error: KVTideError) -> None:
        self.failures += 1
        self._in_a_row += 1
        self._cause = f"{type(error).__name__}: {error}"
        if self._in_a_row == 1:
            self._since = time.time()
        if self._in_a_row >= FAILURES_TO_CLOSE and not self._closed:
            self._closed = True
            self._since = time.time()
            self._queue.clear()
            self.shelf.fail_claims(TierFailed(f"the {self.tier.name} tier was closed: {error}"))
            self._cache.host.clean()
