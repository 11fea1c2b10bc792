"""How much is copied at once (S1-7, R13)."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.gate import Gate


class Copies:
    """Starters that note their names."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def __call__(self, name: Any) -> Callable[[], None]:
        return lambda: self.started.append(name)


def test_S1_7_copies_beyond_the_limit_wait_in_order() -> None:
    gate, copies = Gate(100, 10), Copies()
    for name, nbytes in (("a", 60), ("b", 50), ("c", 10)):
        gate.enter(nbytes, copies(name))
    assert copies.started == ["a"]  # c would fit, and does not overtake b
    assert (gate.bytes, gate.copies, len(gate)) == (60, 1, 2)
    gate.leave(60)
    assert copies.started == ["a", "b", "c"]
    assert (gate.bytes, gate.copies, len(gate)) == (60, 2, 0)


def test_S1_7_by_number_as_well() -> None:
    gate, copies = Gate(1000, 2), Copies()
    for name in range(5):
        gate.enter(1, copies(name))
    assert copies.started == [0, 1]
    gate.leave(1)
    assert copies.started == [0, 1, 2]


def test_exactly_the_limit_fits() -> None:
    gate, copies = Gate(100, 10), Copies()
    gate.enter(60, copies("a"))
    gate.enter(40, copies("b"))
    assert copies.started == ["a", "b"]


def test_one_that_is_larger_than_the_limit_goes_alone() -> None:
    gate, copies = Gate(100, 10), Copies()
    gate.enter(10, copies("small"))
    gate.enter(500, copies("large"))
    gate.enter(10, copies("next"))
    assert copies.started == ["small"]
    gate.leave(10)
    assert copies.started == ["small", "large"]
    gate.leave(500)
    assert copies.started == ["small", "large", "next"]


def test_who_withdraws_leaves_its_place() -> None:
    gate, copies = Gate(100, 10), Copies()
    first, large, last = copies("first"), copies("large"), copies("last")
    gate.enter(60, first)
    gate.enter(90, large)
    gate.enter(10, last)
    assert not gate.withdraw(first)  # it has begun
    assert gate.withdraw(large)
    assert copies.started == ["first", "last"]
    assert not gate.withdraw(large)
    assert len(gate) == 0


def test_ten_thousand_copies_that_fail_as_they_start_do_not_nest() -> None:
    gate, ended = Gate(1, 1), []

    def failing() -> None:
        ended.append(1)
        gate.leave(1)

    gate.enter(1, lambda: None)
    for _ in range(10_000):
        gate.enter(1, failing)
    gate.leave(1)
    assert len(ended) == 10_000
    assert (gate.bytes, gate.copies, len(gate)) == (0, 0, 0)


def test_a_start_that_raises_leaves_the_gate_usable() -> None:
    gate, copies = Gate(100, 10), Copies()

    def broken() -> None:
        gate.leave(10)
        raise ValueError("as it started")

    with pytest.raises(ValueError, match="as it started"):
        gate.enter(10, broken)
    gate.enter(10, copies("next"))
    assert copies.started == ["next"]
    assert (gate.bytes, gate.copies) == (10, 1)


@given(st.lists(st.one_of(st.integers(1, 150), st.sampled_from(["leave", "withdraw"])), max_size=60))
def test_never_more_than_the_limit_never_out_of_order(steps: list[Any]) -> None:
    gate, copies = Gate(100, 4), Copies()
    running: list[int] = []
    waiting: list[tuple[int, int, Callable[[], None]]] = []
    for number, step in enumerate(steps):
        if step == "leave":
            if running:
                gate.leave(running.pop(0))
        elif step == "withdraw":
            if waiting:
                assert gate.withdraw(waiting.pop()[2])
        else:
            start = copies(number)
            waiting.append((number, step, start))
            gate.enter(step, start)
        while copies.started:
            name, nbytes, _ = waiting.pop(0)
            assert copies.started.pop(0) == name
            running.append(nbytes)
        assert (gate.bytes, gate.copies, len(gate)) == (sum(running), len(running), len(waiting))
        assert sum(running) <= 100 or len(running) == 1
        assert len(running) <= 4
        # Nobody waits for nothing.
        assert not waiting or (running and (sum(running) + waiting[0][1] > 100 or len(running) == 4))
