"""Small frozen values of what is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtide.core.shelf import Shelf
from kvtide.core.states import State


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One tier: bytes of room, blocks by state, and what happened to them since it was opened."""

    name: str
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    dirty_bytes: int
    blocks: int
    filling: int
    hit_blocks: int
    evicted_blocks: int
    forgotten_blocks: int
    corrupt_blocks: int
    waiting_for_room: int


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The whole cache. Counters run since it was opened; `inflight` and `waiting` are now."""

    tiers: tuple[TierStatistics, ...]
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    inflight_transfers: int
    inflight_bytes: int
    waiting_for_turn: int
    stored_bytes: int
    loaded_bytes: int
    promoted_blocks: int
    dropped_blocks: int
    errors: Mapping[str, int]


def tier_statistics(shelf: Shelf) -> TierStatistics:
    """A shelf's numbers."""
    states = shelf.states
    return TierStatistics(
        name=shelf.name,
        capacity_bytes=shelf.extents.total * shelf.extents.extent_bytes,
        used_bytes=shelf.used_bytes,
        pinned_bytes=shelf.pinned_bytes,
        dirty_bytes=shelf.dirty_bytes,
        blocks=states[State.DIRTY] + states[State.SPILLING] + states[State.CLEAN],
        filling=states[State.FILLING] + states[State.PARTIAL],
        hit_blocks=shelf.counts.hits,
        evicted_blocks=shelf.counts.evicted,
        forgotten_blocks=shelf.counts.forgotten,
        corrupt_blocks=shelf.counts.corrupt,
        waiting_for_room=len(shelf.claims),
    )
