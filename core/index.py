"""The blocks of one tier, by name, as a tree of prefixes.

A node whose block is absent stays while it has descendants, so that a block which comes back
finds them. Nodes are small: a million of them must fit (see `kvtide bench`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtide.core.states import HELD, State, Step, after


@dataclass(eq=False, slots=True)
class Space:
    """A namespace as a tier sees it: how large its slots are and how much it may use.

    tier: name of the tier that this is about. slot_bytes: one image with its padding.
    shards: slots a block. quota: bytes, or None. used: bytes of slots that its blocks have.
    block_bytes: room that a block takes, all shards.
    """

    name: str
    tier: str
    slot_bytes: int
    shards: int
    quota: int | None = None
    used: int = 0
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.block_bytes = self.slot_bytes * self.shards


class Block:
    """A block in one tier.

    slots: an int for one shard, a tuple of ints by rank for several, None while absent.
    pins: leases and copies that hold it. used: the clock at the last use.
    mark: the policy's own note (0: not known to it). offered: its place in the policy's queue,
    0 if it stands in none. degree: how many children it has.
    """

    __slots__ = (
        "child",
        "degree",
        "key",
        "mark",
        "next",
        "offered",
        "parent",
        "pins",
        "prev",
        "slots",
        "space",
        "state",
        "used",
    )

    def __init__(self, key: bytes, space: Space) -> None:
        self.key = key
        self.space = space
        self.state = State.ABSENT
        self.pins = 0
        self.slots: Any = None
        self.used = 0
        self.mark = 0
        self.offered = 0
        self.degree = 0
        self.parent: Block | None = None
        self.child: Block | None = None
        self.next: Block | None = None
        self.prev: Block | None = None

    def step(self, step: Step) -> None:
        """Move along the table of `states`; raises and changes nothing if it says no."""
        self.state = after(self.state, step)

    def slot(self, rank: int) -> int:
        """The slot of one shard's image."""
        slots = self.slots
        return int(slots if self.space.shards == 1 else slots[rank])

    def all_slots(self) -> tuple[int, ...]:
        """The slots of all shards, by rank."""
        return (self.slots,) if self.space.shards == 1 else self.slots

    def children(self) -> Iterator[Block]:
        """Direct descendants, present or not."""
        node = self.child
        while node is not None:
            yield node
            node = node.next

    def __repr__(self) -> str:
        return f"<Block {self.key.hex()[:8]} {self.state.name} pins={self.pins}>"


class Index:
    """Name to block, and the tree over them."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Block] = {}

    def __len__(self) -> int:
        """Nodes, absent ones included."""
        return len(self.nodes)

    def held(self, key: bytes) -> Block | None:
        """The block if it is a hit here."""
        node = self.nodes.get(key)
        return node if node is not None and node.state in HELD else None

    def node(self, key: bytes, parent: bytes | None, space: Space) -> Block:
        """The node of a name, made and linked below its parent's if need be."""
        nodes = self.nodes
        node = nodes.get(key)
        if node is None:
            node = nodes[key] = Block(key, space)
        if parent is not None and node.parent is None:
            above = nodes.get(parent)
            if above is None:
                above = nodes[parent] = Block(parent, space)
            # An engine's own hashes may name each other in a circle; a walk would never end in it.
            if node.child is None or not _descends(above, node):
                _link(node, above)
        return node

    def prune(self, node: Block) -> Block | None:
        """Remove a node that is absent and without descendants, and its like above it.

        Returns the lowest node that stays above, whose last descendant may have gone.
        """
        at: Block | None = node
        while at is not None and at.state is State.ABSENT and at.child is None:
            above = at.parent
            if above is not None:
                _unlink(at)
            del self.nodes[at.key]
            at = above
        return at

    def forget(self, node: Block) -> Block | None:
        """Take a doomed block's name away: an absent node takes its place in the tree.

        Returns what `prune` does.
        """
        stand_in = Block(node.key, node.space)
        self.nodes[node.key] = stand_in
        if node.parent is not None:
            above = node.parent
            _unlink(node)
            _link(stand_in, above)
        for child in list(node.children()):
            _unlink(child)
            _link(child, stand_in)
        return self.prune(stand_in)


def _descends(node: Block, above: Block) -> bool:
    at: Block | None = node
    while at is not None and at is not above:
        at = at.parent
    return at is not None


def _link(node: Block, above: Block) -> None:
    node.parent = above
    node.prev = None
    node.next = above.child
    above.degree += 1
    if above.child is not None:
        above.child.prev = node
    above.child = node


def _unlink(node: Block) -> None:
    above = node.parent
    assert above is not None
    above.degree -= 1
    if node.prev is None:
        above.child = node.next
    else:
        node.prev.next = node.next
    if node.next is not None:
        node.next.prev = node.prev
    node.parent = node.prev = node.next = None
