"""The life of a block in one tier, as one table (R1). What is not in it raises.

    absent -> FILLING -> CLEAN                      no lower tier holds or wants it
                      -> DIRTY -> SPILLING -> CLEAN  a lower tier shall have it first
    PARTIAL: some ranks have arrived and none is on its way; evictable, never a hit
    DOOMED:  its name is forgotten, its bytes stay until the last pin is gone

The state of a block that is not there is ABSENT; such a node stays in the tree only while it
has descendants.
"""

from __future__ import annotations

import enum

from kvtide.core.errors import IllegalTransition


class State(enum.IntEnum):
    """Where a block is in its life."""

    ABSENT = 0
    FILLING = 1
    PARTIAL = 2
    DIRTY = 3
    SPILLING = 4
    CLEAN = 5
    DOOMED = 6

    # An enum hashes its name in Python; states are looked up on the hot path.
    __hash__ = int.__hash__


class Step(enum.IntEnum):
    """What can happen to a block."""

    RESERVE = 0
    PAUSE = 1
    RESUME = 2
    PUBLISH_DIRTY = 3
    PUBLISH_CLEAN = 4
    ABORT = 5
    SPILL = 6
    SPILLED = 7
    SPILL_FAILED = 8
    EVICT = 9
    DROP = 10
    DOOM = 11
    RELEASE = 12

    __hash__ = int.__hash__


_S, _T = State, Step

TABLE: dict[tuple[State, Step], State] = {
    (_S.ABSENT, _T.RESERVE): _S.FILLING,
    (_S.FILLING, _T.PAUSE): _S.PARTIAL,
    (_S.PARTIAL, _T.RESUME): _S.FILLING,
    (_S.FILLING, _T.PUBLISH_DIRTY): _S.DIRTY,
    (_S.FILLING, _T.PUBLISH_CLEAN): _S.CLEAN,
    (_S.FILLING, _T.ABORT): _S.ABSENT,
    (_S.PARTIAL, _T.ABORT): _S.ABSENT,
    (_S.PARTIAL, _T.EVICT): _S.ABSENT,
    (_S.DIRTY, _T.SPILL): _S.SPILLING,
    (_S.DIRTY, _T.SPILLED): _S.CLEAN,
    (_S.SPILLING, _T.SPILLED): _S.CLEAN,
    (_S.SPILLING, _T.SPILL_FAILED): _S.DIRTY,
    (_S.CLEAN, _T.EVICT): _S.ABSENT,
    # Clear and corruption: forgotten at once where nobody holds it, doomed where somebody does.
    (_S.PARTIAL, _T.DROP): _S.ABSENT,
    (_S.DIRTY, _T.DROP): _S.ABSENT,
    (_S.CLEAN, _T.DROP): _S.ABSENT,
    (_S.FILLING, _T.DOOM): _S.DOOMED,
    (_S.PARTIAL, _T.DOOM): _S.DOOMED,
    (_S.DIRTY, _T.DOOM): _S.DOOMED,
    (_S.SPILLING, _T.DOOM): _S.DOOMED,
    (_S.CLEAN, _T.DOOM): _S.DOOMED,
    (_S.DOOMED, _T.RELEASE): _S.ABSENT,
}

HELD = frozenset({State.DIRTY, State.SPILLING, State.CLEAN})
"""The states in which a block is a hit."""

EVICTABLE = frozenset({State.PARTIAL, State.CLEAN})
"""The states that eviction may take, if the block is also unpinned and without descendants."""


def after(state: State, step: Step) -> State:
    """The state that follows. Raises `IllegalTransition` for a pair that is not in the table."""
    try:
        return TABLE[state, step]
    except KeyError:
        raise IllegalTransition(f"{step.name} is not allowed in state {state.name}") from None
