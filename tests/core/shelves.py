"""Shelves of a few slots, and everything that must hold of a shelf at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvtide.core.extents import Extents, extent_of, offset_of
from kvtide.core.index import Block, Space
from kvtide.core.policies import Arc, Lru, _Order
from kvtide.core.shelf import Shelf
from kvtide.core.states import HELD, State

SLOT = 4096


def shelf_of(slots: int, policy: str = "lru", *, per_extent: int = 1, spills: bool = False) -> Shelf:
    """A shelf with room for so many slots of 4 KiB, `per_extent` of them to an extent."""
    extents = Extents(SLOT * per_extent)
    for number in range(slots // per_extent):
        extents.add(number)
    return Shelf("host", extents, policy, spills=spills)


def space_of(name: str = "n", *, slots: int = 1, shards: int = 1, quota: int | None = None) -> Space:
    return Space(name, "host", SLOT * slots, shards, quota)


def put(shelf: Shelf, space: Space, *keys: bytes, after: bytes | None = None) -> list[Block]:
    """Store a chain: reserved, published and let go of."""
    blocks = shelf.reserve(space, links(keys, after))
    assert blocks is not None, keys
    for block in blocks:
        shelf.publish(block)
    shelf.unpin(blocks)
    return blocks


def links(keys: Sequence[bytes], after: bytes | None = None) -> list[tuple[bytes, bytes | None]]:
    return list(zip(keys, [after, *keys[:-1]], strict=True))


def held(shelf: Shelf) -> set[bytes]:
    return {key for key, block in shelf.index.nodes.items() if block.state in HELD}


def snapshot(shelf: Shelf) -> dict[str, Any]:
    """All that a decision may change and that anyone can see, the order of eviction included."""
    nodes = shelf.index.nodes
    return {
        "nodes": {
            key: (
                b.state,
                b.pins,
                b.slots,
                b.used,
                b.mark,
                b.parent and b.parent.key,
                [child.key for child in b.children()],
                b.degree,
                b.space,
            )
            for key, b in nodes.items()
        },
        "room": (
            shelf.extents.free,
            shelf.extents.sizes(),
            {size: shelf.extents.available(size) for size in (SLOT, 2 * SLOT, 3 * SLOT)},
        ),
        "bytes": (shelf.used_bytes, shelf.pinned_bytes, shelf.dirty_bytes),
        "spaces": {b.space.name: b.space.used for b in nodes.values()},
        "states": dict(shelf.states),
        "counts": repr(shelf.counts),
        "fills": dict(shelf.fills),
        "claims": list(shelf.claims),
        # A size that never had a block may have been asked for room.
        "policies": {
            size: _policy_snapshot(policy)
            for size, policy in shelf._policies.items()
            if _policy_snapshot(policy) != _policy_snapshot(type(policy)())
        },
    }


def _policy_snapshot(policy: Any) -> Any:
    # What is offered is compared as a set in its order: entries that count no more come and go.
    orders = policy._orders if isinstance(policy, Arc) else {1: policy._order}
    order = {
        mark: sorted((b.used, b.key) for entries in _valid(one) for b in entries)
        for mark, one in orders.items()
    }
    if isinstance(policy, Lru):
        return order
    ghosts = {mark: list(names) for mark, names in policy._ghosts.items()}
    return order, policy.target, ghosts, dict(policy._present), policy._capacity


def _valid(order: _Order) -> list[list[Block]]:
    """Blocks that stand in the order and could go: leaves that nobody holds."""
    return [
        [
            entry[2]
            for entry in heap
            if entry[2].offered == entry[1] and entry[2].child is None and not entry[2].pins
        ]
        for heap in order._heaps.values()
    ]


def offered(shelf: Shelf) -> set[Block]:
    found = set()
    for policy in shelf._policies.values():
        orders = policy._orders.values() if isinstance(policy, Arc) else [policy._order]  # type: ignore[attr-defined]
        for order in orders:
            entries = [entry for heap in order._heaps.values() for entry in heap]
            assert len(entries) == len(order)
            stale = sum(entry[2].offered != entry[1] for entry in entries)
            assert stale == order._stale
            assert stale * 2 <= len(entries) + 64, "the heaps grow without bound"
            found |= {entry[2] for entry in entries if entry[2].offered == entry[1]}
    return found


def check(shelf: Shelf, doomed: Sequence[Block] = ()) -> None:
    """R1 to R8, as far as one shelf can be looked at."""
    nodes = shelf.index.nodes
    blocks = [*nodes.values(), *doomed]
    present = [block for block in blocks if block.state is not State.ABSENT]

    # No slot twice, none outside its extent, each known to its extent, and nothing else is taken.
    per_extent: Counter[int] = Counter()
    seen = set()
    for block in present:
        size = block.space.slot_bytes
        assert len(block.all_slots()) == block.space.shards
        for rank, slot in enumerate(block.all_slots()):
            assert block.slot(rank) == slot
            number, offset = extent_of(slot), offset_of(slot)
            extent = shelf.extents.extent(number)
            assert extent is not None
            assert (extent.number, extent.slot_bytes) == (number, size)
            assert offset % size == 0
            assert offset + size <= extent.run * shelf.extents.extent_bytes
            assert slot not in seen
            seen.add(slot)
            assert extent.blocks[offset // size] is block
            assert not extent.vacant >> (offset // size) & 1
            per_extent[number] += 1
    for size in shelf.extents.sizes():
        for extent in shelf.extents._by_size[size].values():
            assert extent.slots - extent.free == per_extent[extent.number] > 0
            assert extent.free == extent.vacant.bit_count() == extent.blocks.count(None)
        spare = sum(extent.free for extent in shelf.extents._by_size[size].values())
        assert shelf.extents.spare(size) == spare
    assert shelf.extents.free + sum(shelf.extents.sizes().values()) == shelf.extents.total

    # What is counted is what is there.
    used: Counter[Space] = Counter()
    for block in present:
        used[block.space] += block.space.block_bytes
    for space, nbytes in used.items():
        assert space.used == nbytes
        assert space.quota is None or nbytes <= space.quota
    assert shelf.used_bytes == used.total()
    assert shelf.pinned_bytes == sum(b.space.block_bytes for b in present if b.pins)
    dirty = (State.DIRTY, State.SPILLING)
    assert shelf.dirty_bytes == sum(b.space.block_bytes for b in present if b.state in dirty)
    for state in State:
        if state is not State.ABSENT:
            assert shelf.states[state] == sum(b.state is state for b in present), state

    # The tree: links agree both ways, no circle, absent nodes only above others.
    for key, node in nodes.items():
        assert node.key == key
        assert node.state is not State.DOOMED
        assert node.pins >= 0
        children = list(node.children())
        assert node.degree == len(children) == len(set(children))
        for child in children:
            assert child.parent is node
            assert nodes[child.key] is child
        if node.parent is not None:
            assert node in list(node.parent.children())
        if node.state is State.ABSENT:
            assert children, "an absent node has nothing below it"
            assert node.slots is None
            assert not node.pins
        steps, at = 0, node.parent
        while at is not None:
            steps, at = steps + 1, at.parent
            assert steps <= len(nodes)
    for block in doomed:
        assert block.state is State.DOOMED
        assert block.pins > 0
        assert block.parent is block.child is None
        assert nodes.get(block.key) is not block

    # Whatever may go is in some order of eviction, and nothing that is gone.
    may_go = {
        b
        for b in nodes.values()
        if b.state in (State.CLEAN, State.PARTIAL) and not b.pins and b.child is None
    }
    standing = offered(shelf)
    assert may_go <= standing
    assert all(nodes.get(b.key) is b and b.state is not State.ABSENT for b in standing)
    for policy in shelf._policies.values():
        if isinstance(policy, Arc):
            _check_arc(policy, nodes)


def _check_arc(policy: Arc, nodes: dict[bytes, Block]) -> None:
    ghosts = policy._ghosts
    known = sum(policy._present.values())
    assert all(count >= 0 for count in policy._present.values())
    assert 0.0 <= policy.target <= max(policy._capacity, known)
    assert len(ghosts[1]) + len(ghosts[2]) <= 2 * max(policy._capacity, known)
    assert not ghosts[1].keys() & ghosts[2].keys()
