"""Room: extents that slot sizes take and give back (R8)."""

import itertools
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.core.errors import InvalidRequest
from kvtide.core.extents import Extents, extent_of, offset_of, slot_bytes

PAGE = 4096


def room(count: int, pages: int = 4) -> Extents:
    extents = Extents(pages * PAGE)
    for number in range(count):
        extents.add(number)
    return extents


@pytest.mark.parametrize(
    ("image", "slot"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (3 * PAGE - 1, 3 * PAGE)]
)
def test_a_slot_is_an_image_rounded_up_to_a_page(image: int, slot: int) -> None:
    assert slot_bytes(image) == slot


def test_slots_lie_side_by_side() -> None:
    extents = room(2)
    taken = extents.take(PAGE, 8)
    assert taken is not None
    assert sorted((extent_of(s), offset_of(s)) for s in taken) == [
        (number, PAGE * at) for number in range(2) for at in range(4)
    ]
    assert extents.take(PAGE, 1) is None


def test_a_size_that_does_not_divide_the_extent_leaves_its_rest() -> None:
    extents = room(1)
    taken = extents.take(3 * PAGE, 1)
    assert taken == [0]
    assert extents.available(3 * PAGE) == 0


def test_all_or_nothing() -> None:
    extents = room(2)
    assert extents.take(PAGE, 5) is not None
    before = (extents.available(PAGE), extents.free, extents.sizes())
    assert extents.take(PAGE, 4) is None
    assert (extents.available(PAGE), extents.free, extents.sizes()) == before
    assert extents.take(PAGE, 0) == []


def test_R8_two_sizes_share_and_an_emptied_extent_is_anybodys() -> None:
    extents = room(2)
    small = extents.take(PAGE, 4)
    large = extents.take(2 * PAGE, 2)
    assert small is not None
    assert large is not None
    assert extents.sizes() == {PAGE: 1, 2 * PAGE: 1}
    assert extents.available(PAGE) == extents.available(2 * PAGE) == 0
    for slot in large:
        assert extents.available(PAGE) == 0
        extents.give(slot)
    assert extents.free == 1
    assert extents.available(PAGE) == 4
    assert extents.available(2 * PAGE) == 2
    more = extents.take(PAGE, 4)
    assert more is not None
    assert {extent_of(slot) for slot in more} == {extent_of(large[0])}


def test_R8_an_image_larger_than_an_extent_gets_neighbours_of_its_own() -> None:
    extents = room(7)
    (first,) = extents.take(PAGE, 1) or []
    assert extent_of(first) == 0
    assert extents.run_of(9 * PAGE) == 3
    taken = extents.take(9 * PAGE, 2)
    assert taken is not None
    assert sorted(map(extent_of, taken)) == [1, 4]
    assert all(offset_of(slot) == 0 for slot in taken)
    assert extents.sizes() == {PAGE: 1, 9 * PAGE: 6}
    assert extents.free == 0
    run = extents.extent(5)
    assert run is extents.extent(4)
    assert run is not None
    assert (run.number, run.run) == (4, 3)
    extents.give(taken[0])
    assert extents.free == 3
    assert extents.available(9 * PAGE) == 1


def test_R8_free_extents_that_are_no_neighbours_hold_no_large_image() -> None:
    extents = room(5)
    taken = extents.take(4 * PAGE, 5)
    assert taken is not None
    for slot in taken:
        if extent_of(slot) in (0, 2, 3):
            extents.give(slot)
    assert extents.free == 3
    assert extents.available(8 * PAGE) == 1
    (large,) = extents.take(8 * PAGE, 1) or []
    assert extent_of(large) == 2
    assert extents.take(8 * PAGE, 1) is None


def test_extents_come_one_by_one_and_only_once() -> None:
    extents = Extents(4 * PAGE)
    assert extents.take(PAGE, 1) is None
    extents.add(3)
    assert extents.total == 1
    with pytest.raises(InvalidRequest, match="already"):
        extents.add(3)
    (slot,) = extents.take(PAGE, 1) or []
    with pytest.raises(InvalidRequest, match="already"):
        extents.add(3)
    assert extent_of(slot) == 3


@pytest.mark.parametrize("what", ["twice", "never", "no extent", "between two", "beyond", "middle of a run"])
def test_no_slot_is_given_back_that_is_not_taken(what: str) -> None:
    extents = room(4)
    first, second = extents.take(PAGE, 2) or []
    (run,) = extents.take(8 * PAGE, 1) or []
    extents.give(second)
    wrong = {
        "twice": second,
        "never": first + 3 * PAGE,
        "no extent": 9 << 32,
        "between two": first + 1,
        "beyond": first + 4 * PAGE,
        "middle of a run": run + (1 << 32),
    }[what]
    with pytest.raises(InvalidRequest, match="is not taken"):
        extents.give(wrong)
    assert extents.available(PAGE) == 3 + 4
    assert extents.sizes() == {PAGE: 1, 8 * PAGE: 2}


def test_an_extent_must_be_addressable_by_a_slot() -> None:
    with pytest.raises(InvalidRequest, match="4 GiB"):
        Extents(1 << 32)


def test_S2_1_the_last_byte_of_the_last_slot_lies_inside() -> None:
    for pages in range(1, 9):
        for size in range(1, 12):
            extents = room(12, pages)
            count = extents.available(size * PAGE)
            taken = extents.take(size * PAGE, count)
            assert taken is not None
            ends = [extent_of(s) * pages * PAGE + offset_of(s) + size * PAGE for s in taken]
            assert max(ends) <= 12 * pages * PAGE
            run = -(-size // pages)
            assert count == 12 // run * max(1, pages // size)


STEP = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.just("give"), st.integers(0, 200), st.integers(1, 8)),
    st.tuples(st.just("add"), st.integers(0, 15), st.just(0)),
)


@settings(max_examples=200, deadline=2000)
@given(st.lists(STEP, max_size=50), st.integers(1, 4))
def test_R8_no_slot_is_ever_given_twice(steps: list[Any], pages: int) -> None:
    extents = Extents(pages * PAGE)
    here: set[int] = set()
    taken: dict[int, int] = {}  # slot to size
    for what, one, two in steps:
        if what == "add" and one not in here:
            extents.add(one)
            here.add(one)
        elif what == "take":
            size = one * PAGE
            available = extents.available(size)
            got = extents.take(size, two)
            assert (got is not None) == (two <= available)
            for slot in got or []:
                assert slot not in taken
                taken[slot] = size
        elif what == "give":
            for slot in random.Random(one).sample(sorted(taken), min(two, len(taken))):
                extents.give(slot)
                del taken[slot]
        _look_at(extents, here, taken, pages)


def _look_at(extents: Extents, here: set[int], taken: dict[int, int], pages: int) -> None:
    size_of: dict[int, int] = {}
    pieces = []
    for slot, size in taken.items():
        run = -(-size // (pages * PAGE))
        for number in range(extent_of(slot), extent_of(slot) + run):
            assert number in here
            assert size_of.setdefault(number, size) == size
        start = extent_of(slot) * pages * PAGE + offset_of(slot)
        pieces.append((start, start + size))
    pieces.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(pieces))
    free = here - size_of.keys()
    assert extents.free == len(free)
    assert extents.total == len(here)
    sizes: dict[int, int] = {}
    for size in size_of.values():
        sizes[size] = sizes.get(size, 0) + 1
    assert extents.sizes() == sizes
    for size in {*sizes, PAGE, (pages + 1) * PAGE}:
        run, per = -(-size // (pages * PAGE)), max(1, pages * PAGE // size)
        had = len({extent_of(slot) for slot, s in taken.items() if s == size}) * per
        spare = had - sum(s == size for s in taken.values())
        runs, streak = 0, 0
        for number in range(max(free, default=-1) + 1):
            streak = streak + 1 if number in free else 0
            if streak == run:
                runs, streak = runs + 1, 0
        assert extents.spare(size) == spare
        assert extents.available(size) == spare + runs * per


def test_windows_are_what_others_have() -> None:
    extents = room(6)
    (own,) = extents.take(8 * PAGE, 1) or []
    assert extent_of(own) == 0
    extents.take(4 * PAGE, 2)  # 2 and 3; 4 and 5 stay free
    numbers = [sorted(e.number for e in window) for window in extents.windows(2, 8 * PAGE)]
    assert numbers == [[2, 3], [3]]
    assert [[e.number for e in window] for window in extents.windows(1, 4 * PAGE)] == [[0]]


def test_an_arena_of_a_terabyte_is_handed_out_in_linear_time() -> None:
    extents = Extents(8 * PAGE)
    for number in range(65_536):
        extents.add(number)
    began = time.perf_counter()
    for size, count in ((8 * PAGE, 65_536), (16 * PAGE, 5_000)):
        taken = extents.take(size, count)
        assert taken is not None
        for slot in taken:
            extents.give(slot)
    took = time.perf_counter() - began
    print(f"65,536 extents taken and given back, 5,000 runs as well: {took:.2f} s")
    assert took < 5
