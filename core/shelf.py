"""One tier's decisions: what it holds, who gets room, what has to go for it.

All methods are synchronous and are called under the cache's one lock (R16).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtide.core.errors import IllegalTransition, InvalidRequest, KVTideError, NoRoom
from kvtide.core.eviction import Plan
from kvtide.core.extents import Extents
from kvtide.core.index import Block, Index, Space
from kvtide.core.policies import Policy
from kvtide.core.policies import policy as make_policy
from kvtide.core.states import EVICTABLE, State, Step

Link = tuple[bytes, bytes | None]
"""A block's name and its parent's; None where the parent is a chain's root."""


@dataclass(eq=False, slots=True)
class Claim:
    """A place in the queue for room.

    attempt: tries to take all that is needed, for good; True ends the claim.
    give_up: told why the claim ended without room.
    """

    attempt: Callable[[], bool]
    give_up: Callable[[KVTideError], None]


@dataclass(eq=False, slots=True)
class Fill:
    """Who fills a block: the ranks that have arrived and those on their way, and who waits.

    waiters: called under the lock whenever a rank has ended, whichever way; True ends the waiting.
    failure: why the bytes will not come (a load's shortfall reason), once that is known.
    """

    arrived: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    waiters: list[Callable[[], bool]] = field(default_factory=list)
    failure: str = ""

    def wake(self) -> None:
        """Tell those who wait to look again; who has seen what it waited for leaves."""
        waiters, self.waiters = self.waiters, []
        self.waiters += [waiter for waiter in waiters if not waiter()]


@dataclass(slots=True)
class Counts:
    """What happened on this shelf since it was opened, in blocks."""

    evicted: int = 0
    forgotten: int = 0
    corrupt: int = 0
    lookups: int = 0
    hits: int = 0


class Shelf:
    """The blocks and the room of one tier.

    name: as in statistics. spills: whether its blocks are dirty until a lower tier has them.
    """

    def __init__(self, name: str, extents: Extents, policy: str, *, spills: bool = False) -> None:
        self.name = name
        self.extents = extents
        self.spills = spills
        self.planned_extents = 0
        self.index = Index()
        self.counts = Counts()
        self.claims: deque[Claim] = deque()
        self.fills: dict[Block, Fill] = {}
        self._policy_name = policy
        self._policies: dict[int, Policy] = {}
        self._tick = 0
        self._serving = False
        self.states = dict.fromkeys(State, 0)
        self.pinned_bytes = 0
        self.dirty_bytes = 0
        self.used_bytes = 0

    # -- looking up and pinning -------------------------------------------------------------

    def touch(self, blocks: Sequence[Block]) -> None:
        """Count a hit on a prefix, head first; a prefix lies in one namespace."""
        if blocks:
            self._tick += 1
            self._policy(blocks[0].space.slot_bytes).hit(blocks, self._tick)

    def pin(self, blocks: Iterable[Block]) -> None:
        """Hold blocks: not evicted, their bytes not reused, until unpinned as often."""
        nbytes = 0
        for block in blocks:
            if not block.pins:
                nbytes += block.space.block_bytes
            block.pins += 1
        self.pinned_bytes += nbytes

    def unpin(self, blocks: Iterable[Block]) -> None:
        """Let go of blocks; room that becomes free goes to those who wait for it."""
        for block in blocks:
            if block.pins < 1:
                raise IllegalTransition(f"{block} is not pinned")
            block.pins -= 1
            if not block.pins:
                self.pinned_bytes -= block.space.block_bytes
                if block.state is State.DOOMED:
                    self._step(block, Step.RELEASE)
                    self._free(block)
                else:
                    self._offer(block)
        self.serve()

    # -- room -------------------------------------------------------------------------------

    def reserve(self, space: Space, links: Sequence[Link], keep: Iterable[bytes] = ()) -> list[Block] | None:
        """Room for blocks that are absent here, or None and no change.

        keep: names that may not go for it; what the blocks hang on doesn't either, unless a lower
        tier has it. What comes back is FILLING and pinned once, for the transfer that fills it
        (R2). Raises `IllegalTransition` and changes nothing if one is here already.
        """
        if not links:
            return []
        nbytes = len(links) * space.block_bytes
        if self.pinned_bytes + nbytes > self.extents.total * self.extents.extent_bytes:
            return None  # whatever may be evicted; those who wait are tried often, so this comes first
        names = [key for key, _ in links]
        self._check_absent(names)
        kept = {*keep}
        if not self.spills:
            # What the blocks hang on would be lost; where a lower tier has it, it may go.
            kept.update(parent for _, parent in links if parent is not None)
        plan = Plan(self.extents, self._policy, names, kept)
        made = plan.make_room(space, len(links))
        # What was refused for this plan's sake alone is offered to the next.
        kept.difference_update(names)
        for name in kept if made else (*kept, *(block.key for block in plan.chosen)):
            node = self.index.nodes.get(name)
            if node is not None:
                self._offer(node)
        if not made:
            return None
        self._tick += 1
        blocks = [self.index.node(key, parent, space) for key, parent in links]
        for block in blocks:
            block.space = space
            self._step(block, Step.RESERVE)
        # The policy learns who comes before it sees who goes.
        self._policy(space.slot_bytes).enter(blocks, self._tick)
        for victim in plan.chosen:
            self._evict(victim)
        slots = self.extents.take(space.slot_bytes, len(blocks) * space.shards)
        assert slots is not None, "the plan freed less than it promised"
        for number, block in enumerate(blocks):
            own = slots[number * space.shards : (number + 1) * space.shards]
            block.slots = own[0] if space.shards == 1 else tuple(own)
            for slot in own:
                self.extents.hold(slot, block)
        space.used += nbytes
        self.used_bytes += nbytes
        self.pin(blocks)
        return blocks

    def capacity(self, space: Space) -> int:
        """How many blocks of a namespace could ever be held at once, when all extents are here."""
        size = space.slot_bytes
        runs = max(self.extents.total, self.planned_extents) // self.extents.run_of(size)
        blocks = runs * self.extents.per_extent(size) // space.shards
        return blocks if space.quota is None else min(blocks, space.quota // space.block_bytes)

    def ask(self, claim: Claim) -> None:
        """Join the queue; served at once if it is empty and the room is there."""
        self.claims.append(claim)
        self.serve()

    def withdraw(self, claim: Claim) -> bool:
        """Leave the queue. False if the claim has ended already."""
        try:
            self.claims.remove(claim)
        except ValueError:
            return False
        self.serve()
        return True

    def serve(self) -> None:
        """Give room to the head of the queue, and to the next, as long as it suffices."""
        if self._serving:
            return  # an attempt that frees something does not overtake itself
        self._serving = True
        try:
            while self.claims:
                claim = self.claims[0]
                if not claim.attempt():
                    break
                if self.claims and self.claims[0] is claim:  # else it has withdrawn itself
                    self.claims.popleft()
        finally:
            self._serving = False

    def fail_claims(self, error: KVTideError) -> None:
        """Everyone who waits for room is told that none will come."""
        while self.claims:
            self.claims.popleft().give_up(error)

    def no_room(self, what: str) -> NoRoom:
        """The error for a reservation that ends without room."""
        return NoRoom(what, leased=self.pinned_bytes, dirty=self.dirty_bytes)

    # -- a block's life ---------------------------------------------------------------------

    def publish(self, block: Block, *, clean: bool = False) -> None:
        """All its bytes are here: it is a hit from now on, unless it was forgotten meanwhile.

        clean: a lower tier has it already.
        """
        if block.state is not State.DOOMED:
            self._step(block, Step.PUBLISH_DIRTY if self.spills and not clean else Step.PUBLISH_CLEAN)
            self._offer(block)
        self.fills.pop(block, None)

    def abort(self, block: Block) -> None:
        """Its bytes will not come: free the room unless somebody else holds it, too.

        Nobody who waits is served yet; `unpin` does that, when the caller has let go of all.
        """
        if block.state is State.DOOMED:
            return
        if block.pins > 1:
            self._doom(block)
            return
        self._step(block, Step.ABORT)
        self._policy(block.space.slot_bytes).leave(block, evicted=False)
        self._depart(block)

    def pause(self, block: Block) -> None:
        """Some ranks have arrived, none is on its way."""
        if block.state is State.FILLING:
            self._step(block, Step.PAUSE)

    def resume(self, block: Block) -> None:
        """Another rank's bytes are on their way."""
        if block.state is State.PARTIAL:
            self._step(block, Step.RESUME)

    def spilling(self, block: Block) -> None:
        """A lower tier is being given the block."""
        self._step(block, Step.SPILL)

    def spilled(self, block: Block, *, ok: bool) -> None:
        """A lower tier has it, or could not take it."""
        if block.state is State.DOOMED:
            return
        self._step(block, Step.SPILLED if ok else Step.SPILL_FAILED)
        self._offer(block)

    def clean(self) -> list[Block]:
        """No lower tier will take anything any more: nothing is dirty from now on."""
        self.spills = False
        dirty = [b for b in self.index.nodes.values() if b.state is State.DIRTY]
        for block in dirty:
            self._step(block, Step.SPILLED)
            self._offer(block)
        self.serve()
        return dirty

    def forget(self, block: Block, *, corrupt: bool = False) -> bool:
        """Take a block's name away (clear, corruption). Its bytes stay while it is pinned.

        Its descendants are unreachable and go first. True if the room is free at once.
        """
        freed = not block.pins
        if freed:
            self._step(block, Step.DROP)
            self._demote_below(block)
            self._policy(block.space.slot_bytes).leave(block, evicted=False)
            self._depart(block)
        else:
            self._doom(block)
        self.counts.forgotten += 1
        self.counts.corrupt += corrupt
        if freed:
            self.serve()
        return freed

    # -- inside -----------------------------------------------------------------------------

    def _policy(self, size: int) -> Policy:
        found = self._policies.get(size)
        if found is None:
            found = self._policies[size] = make_policy(self._policy_name)
        return found

    def _check_absent(self, names: Sequence[bytes]) -> None:
        if len(set(names)) != len(names):
            raise InvalidRequest("one reservation names a block twice")
        nodes = self.index.nodes
        for name in names:
            node = nodes.get(name)
            if node is not None and node.state is not State.ABSENT:
                raise IllegalTransition(f"{node} is here already")

    def _step(self, block: Block, step: Step) -> None:
        before = block.state
        block.step(step)
        self.states[before] -= 1
        self.states[block.state] += 1
        dirty = (State.DIRTY, State.SPILLING)
        self.dirty_bytes += block.space.block_bytes * ((block.state in dirty) - (before in dirty))

    def _offer(self, block: Block) -> None:
        """Tell the policy of a block that may go now."""
        if block.child is None and not block.pins and block.state in EVICTABLE:
            self._policy(block.space.slot_bytes).offer(block)

    def _free(self, block: Block) -> None:
        self.fills.pop(block, None)
        for slot in block.all_slots():
            self.extents.give(slot)
        block.slots = None
        block.space.used -= block.space.block_bytes
        self.used_bytes -= block.space.block_bytes

    def _depart(self, block: Block) -> None:
        """The room of a block that has become absent is free, and so may be its parent."""
        if block.pins:
            block.pins = 0
            self.pinned_bytes -= block.space.block_bytes
        self._free(block)
        stays = self.index.prune(block)
        if stays is not None:
            self._offer(stays)

    def _doom(self, block: Block) -> None:
        """Its name goes, its bytes stay until the last pin is gone."""
        self._step(block, Step.DOOM)
        self._demote_below(block)
        self._policy(block.space.slot_bytes).leave(block, evicted=False)
        stays = self.index.forget(block)
        if stays is not None:
            self._offer(stays)

    def _demote_below(self, block: Block) -> None:
        """Its descendants are unreachable and go first."""
        stack = list(block.children())
        while stack:
            at = stack.pop()
            # Below what was demoted already, all was: forgetting a chain head first stays linear.
            if at.state is State.ABSENT or self._policy(at.space.slot_bytes).demote(at):
                stack.extend(at.children())

    def _evict(self, block: Block) -> None:
        self._step(block, Step.EVICT)
        self._policy(block.space.slot_bytes).leave(block, evicted=True)
        self.counts.evicted += 1
        self._depart(block)
