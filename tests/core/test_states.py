"""The table of a block's life (R1)."""

import itertools

import pytest

from kvtide.core.errors import IllegalTransition
from kvtide.core.index import Block, Space
from kvtide.core.states import EVICTABLE, HELD, TABLE, State, Step, after

A, F, P, D, S, C, X = State  # absent, filling, partial, dirty, spilling, clean, doomed

# As the design tells it, written down a second time.
ALLOWED = {
    (A, Step.RESERVE): F,
    (F, Step.PAUSE): P,
    (P, Step.RESUME): F,
    (F, Step.PUBLISH_DIRTY): D,
    (F, Step.PUBLISH_CLEAN): C,
    (F, Step.ABORT): A,
    (P, Step.ABORT): A,
    (D, Step.SPILL): S,
    (S, Step.SPILLED): C,
    (S, Step.SPILL_FAILED): D,
    (D, Step.SPILLED): C,  # there is no lower tier any more
    (C, Step.EVICT): A,
    (P, Step.EVICT): A,
    **{(state, Step.DROP): A for state in (P, D, C)},
    **{(state, Step.DOOM): X for state in (F, P, D, S, C)},
    (X, Step.RELEASE): A,
}


@pytest.mark.parametrize(("state", "step"), list(itertools.product(State, Step)))
def test_every_pair(state: State, step: Step) -> None:
    block = Block(b"key", Space("n", "host", 4096, 1))
    block.state, block.pins, block.slots = state, 2, 7
    if (state, step) in ALLOWED:
        assert after(state, step) is ALLOWED[state, step]
        block.step(step)
        assert block.state is ALLOWED[state, step]
    else:
        with pytest.raises(IllegalTransition, match=f"{step.name} is not allowed in state {state.name}"):
            after(state, step)
        with pytest.raises(IllegalTransition):
            block.step(step)
        assert block.state is state
    assert (block.pins, block.slots) == (2, 7)


def test_the_table_has_nothing_else() -> None:
    assert TABLE == ALLOWED


def test_every_state_can_be_reached_and_left() -> None:
    reached = {A}
    while more := {after for (state, _), after in TABLE.items() if state in reached} - reached:
        reached |= more
    assert reached == set(State)
    assert {state for state, _ in TABLE} == set(State)


def test_S2_5_what_is_not_ready_is_no_hit() -> None:
    assert {D, S, C} == HELD
    assert F not in HELD
    assert P not in HELD


def test_only_what_is_clean_or_unfinished_is_evicted() -> None:
    assert EVICTABLE == {state for state, step in TABLE if step is Step.EVICT} == {C, P}
