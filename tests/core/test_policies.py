"""LRU and ARC against the textbook: the same pages resident, in the same order, after every step."""

import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import pytest
from tests.core.shelves import check, held, offered, put, shelf_of, space_of

from kvtide.core.policies import Arc, Lru, policy

CAPACITIES = (1, 2, 3, 8, 24)


class PlainLru:
    """Textbook."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pages: OrderedDict[bytes, None] = OrderedDict()

    def request(self, page: bytes) -> bool:
        hit = page in self.pages
        if hit:
            self.pages.move_to_end(page)
        else:
            if len(self.pages) == self.capacity:
                self.pages.popitem(last=False)
            self.pages[page] = None
        return hit


class PlainArc:
    """ARC(c) of Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache",
    FAST 2003, figure 4, line by line. Lists run from LRU to MRU."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.T1: list[bytes] = []
        self.T2: list[bytes] = []
        self.B1: list[bytes] = []
        self.B2: list[bytes] = []

    def request(self, x: bytes) -> bool:
        # Case I: x is in T1 or T2. Move x to the MRU position in T2.
        if x in self.T1 or x in self.T2:
            (self.T1 if x in self.T1 else self.T2).remove(x)
            self.T2.append(x)
            return True
        # Case II: x is in B1.
        if x in self.B1:
            delta = 1.0 if len(self.B1) >= len(self.B2) else len(self.B2) / len(self.B1)
            self.p = min(self.p + delta, float(self.c))
            self.replace(x)
            self.B1.remove(x)
            self.T2.append(x)
            return False
        # Case III: x is in B2.
        if x in self.B2:
            delta = 1.0 if len(self.B2) >= len(self.B1) else len(self.B1) / len(self.B2)
            self.p = max(self.p - delta, 0.0)
            self.replace(x)
            self.B2.remove(x)
            self.T2.append(x)
            return False
        # Case IV: x is in none of the four.
        if len(self.T1) + len(self.B1) == self.c:  # case A
            if len(self.T1) < self.c:
                self.B1.pop(0)
                self.replace(x)
            else:
                self.T1.pop(0)
        else:  # case B
            total = len(self.T1) + len(self.T2) + len(self.B1) + len(self.B2)
            if total >= self.c:
                if total == 2 * self.c:
                    self.B2.pop(0)
                self.replace(x)
        self.T1.append(x)
        return False

    def replace(self, x: bytes) -> None:
        if self.T1 and ((x in self.B2 and len(self.T1) == self.p) or len(self.T1) > self.p):
            self.B1.append(self.T1.pop(0))
        else:
            self.B2.append(self.T2.pop(0))


def name(number: int) -> bytes:
    return b"%08d" % number


def scan_with_hot_set(length: int, hot: int, seed: int) -> list[int]:
    """Two of three requests to a few pages, the third to one that never comes again."""
    dice = random.Random(seed)
    fresh = itertools.count(1000)
    return [dice.randrange(hot) if dice.random() < 0.66 else next(fresh) for _ in range(length)]


def zipf(length: int, pages: int, seed: int, skew: float = 1.0) -> list[int]:
    dice = random.Random(seed)
    return dice.choices(range(pages), [1 / rank**skew for rank in range(1, pages + 1)], k=length)


def loops(length: int, sizes: Iterable[int]) -> list[int]:
    """A loop of one size, then one of another: what makes p wander."""
    sizes = list(sizes)
    part = length // len(sizes)
    return [100 * at + step % size for at, size in enumerate(sizes) for step in range(part)]


TRACES = {
    "loops": loops(1200, [3, 12, 30, 5, 26]),
    "scan, small hot set": scan_with_hot_set(1500, 6, 1),
    "scan, large hot set": scan_with_hot_set(1500, 30, 2),
    "zipf": zipf(2000, 100, 3),
    "zipf, flat": zipf(2000, 40, 4, 0.6),
    "uniform": random.Random(5).choices(range(50), k=2000),
    "few": random.Random(6).choices(range(4), k=400),
    "mixed": zipf(500, 60, 7) + list(range(500, 600)) + scan_with_hot_set(500, 10, 8) + zipf(500, 60, 9),
}


class Replayed:
    """Prompts of one block, through a shelf of c slots: loaded if held, else stored."""

    def __init__(self, slots: int, order: str) -> None:
        self.shelf = shelf_of(slots, order)
        self.space = space_of()

    def request(self, page: bytes) -> bool:
        block = self.shelf.index.held(page)
        if block is None:
            put(self.shelf, self.space, page)
            return False
        self.shelf.touch([block])
        return True

    @property
    def policy(self) -> Any:
        return self.shelf._policies[self.space.slot_bytes]

    def in_order(self, mark: int | None = None) -> list[bytes]:
        """Resident pages by last use; of one of ARC's lists, if it is given."""
        blocks = self.shelf.index.nodes.values()
        found = [block for block in blocks if mark is None or block.mark == mark]
        return [block.key for block in sorted(found, key=lambda block: block.used)]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("trace", TRACES)
def test_lru_is_the_textbooks(trace: str, capacity: int) -> None:
    plain, ours = PlainLru(capacity), Replayed(capacity, "lru")
    for number in TRACES[trace]:
        assert ours.request(name(number)) == plain.request(name(number))
        assert ours.in_order() == list(plain.pages)
    check(ours.shelf)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("trace", TRACES)
def test_arc_is_the_papers(trace: str, capacity: int) -> None:
    plain, ours = PlainArc(capacity), Replayed(capacity, "arc")
    for number in TRACES[trace]:
        assert ours.request(name(number)) == plain.request(name(number))
        policy = ours.policy
        assert ours.in_order(1) == plain.T1
        assert ours.in_order(2) == plain.T2
        assert list(policy._ghosts[1]) == plain.B1
        assert list(policy._ghosts[2]) == plain.B2
        assert policy.target == plain.p
    check(ours.shelf)


def test_the_traces_reach_every_case_of_the_paper() -> None:
    """So that agreeing with the reference means something."""
    cases, targets = set(), set()
    for trace, capacity in itertools.product(TRACES.values(), CAPACITIES):
        plain = PlainArc(capacity)
        for number in trace:
            page = name(number)
            if page in plain.T1 + plain.T2:
                cases.add("I")
            elif page in plain.B1:
                cases.add("II, small B2" if len(plain.B1) >= len(plain.B2) else "II, large B2")
            elif page in plain.B2:
                cases.add("III, small B1" if len(plain.B2) >= len(plain.B1) else "III, large B1")
                if plain.T1 and len(plain.T1) == max(0.0, plain.p - 1.0):
                    cases.add("III, |T1| = p")
            elif len(plain.T1) + len(plain.B1) == capacity:
                cases.add("IV A, ghosts" if len(plain.T1) < capacity else "IV A, no ghost")
            elif len(plain.T1) + len(plain.T2) + len(plain.B1) + len(plain.B2) == 2 * capacity:
                cases.add("IV B, 2c")
            else:
                cases.add("IV B")
            plain.request(page)
            targets.add(plain.p)
    assert len(targets) > 30
    assert cases == {
        "I",
        "II, small B2",
        "II, large B2",
        "III, small B1",
        "III, large B1",
        "III, |T1| = p",
        "IV A, ghosts",
        "IV A, no ghost",
        "IV B, 2c",
        "IV B",
    }


def test_arc_keeps_a_hot_set_through_a_scan_that_empties_lru() -> None:
    kept = {}
    for order in ("lru", "arc"):
        ours = Replayed(20, order)
        for _ in range(3):
            for number in range(10):
                ours.request(name(number))
        for number in range(1000, 1200):
            ours.request(name(number))
        kept[order] = len(held(ours.shelf) & {name(number) for number in range(10)})
    assert kept == {"lru": 0, "arc": 10}


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_R5_heads_outlive_tails(order: str) -> None:
    shelf, space = shelf_of(8, order), space_of()
    put(shelf, space, b"a0", b"a1", b"a2", b"a3")
    put(shelf, space, b"b0", b"b1", b"b2", b"b3")
    gone = []
    for number in range(8):
        before = held(shelf)
        put(shelf, space, b"x%d" % number)
        gone += [key for key in before - held(shelf) if key[:1] != b"x"]
    assert gone == [b"a3", b"a2", b"a1", b"a0", b"b3", b"b2", b"b1", b"b0"]


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_R5_a_head_that_several_share_goes_last(order: str) -> None:
    shelf, space = shelf_of(5, order), space_of()
    put(shelf, space, b"head")
    for tail in (b"t0", b"t1", b"t2", b"t3"):
        put(shelf, space, tail, after=b"head")
    for number in range(4):
        put(shelf, space, b"x%d" % number)
        assert b"head" in held(shelf)
        check(shelf)
    assert held(shelf) == {b"head", b"x0", b"x1", b"x2", b"x3"}


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_R5_a_hit_keeps_the_whole_prefix(order: str) -> None:
    shelf, space = shelf_of(6, order), space_of()
    old = put(shelf, space, b"a0", b"a1", b"a2")
    put(shelf, space, b"b0", b"b1", b"b2")
    shelf.touch(old)
    put(shelf, space, b"x0", b"x1", b"x2")
    assert {b"a0", b"a1", b"a2"} <= held(shelf)


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_R5_what_lies_below_a_forgotten_block_goes_first(order: str) -> None:
    shelf, space = shelf_of(8, order), space_of()
    put(shelf, space, b"old")
    head, *_ = chain = put(shelf, space, b"a0", b"a1", b"a2", b"a3")
    for _ in range(3):
        shelf.touch(chain)  # the hottest of all, and used more than once
    assert shelf.forget(head)
    check(shelf)
    put(shelf, space, b"x0", b"x1", b"x2", b"x3")
    assert b"old" in held(shelf)
    assert held(shelf) == {b"old", b"a1", b"a2", b"a3", b"x0", b"x1", b"x2", b"x3"}
    for number, left in enumerate(({b"a1", b"a2"}, {b"a1"}, set[bytes]())):
        put(shelf, space, b"y%d" % number)
        assert {key for key in held(shelf) if key[:1] == b"a"} == left
    assert b"old" in held(shelf)


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_what_is_reached_again_is_not_the_first_to_go(order: str) -> None:
    shelf, space = shelf_of(4, order), space_of()
    head, tail = put(shelf, space, b"a0", b"a1")
    put(shelf, space, b"old")
    shelf.forget(head)
    (again,) = put(shelf, space, b"a0")
    shelf.touch([again, tail])
    put(shelf, space, b"x0", b"x1")
    assert held(shelf) == {b"a0", b"a1", b"x0", b"x1"}


def test_arc_learns_nothing_from_what_was_forgotten() -> None:
    ours = Replayed(4, "arc")
    for number in range(4):
        ours.request(name(number))
    for number in range(4):
        ours.shelf.forget(ours.shelf.index.nodes[name(number)])
    assert not ours.policy._ghosts[1]
    ours.request(name(0))
    assert ours.shelf.index.nodes[name(0)].mark == 1


def test_arc_forgets_what_was_reserved_and_never_came() -> None:
    ours = Replayed(2, "arc")
    for number in (0, 0, 1, 2):  # 1 went for 2, and is a ghost of B1
        ours.request(name(number))
    assert list(ours.policy._ghosts[1]) == [name(1)]
    reserved = ours.shelf.reserve(ours.space, [(name(1), None)])
    assert reserved is not None
    ours.shelf.abort(reserved[0])
    assert sum(ours.policy._present.values()) == 1
    assert name(1) not in ours.policy._ghosts[1]
    check(ours.shelf)


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_heaps_stay_bounded_under_every_cycle(order: str) -> None:
    shelf, space = shelf_of(8, order), space_of()
    head, tail = put(shelf, space, b"head", b"tail")
    for number in range(3000):
        # store and forget
        (block,) = put(shelf, space, b"x%d" % number)
        shelf.forget(block)
        # hit and demote
        shelf.touch([head, tail])
        shelf.forget(head)
        (head,) = put(shelf, space, b"head")
        # pin and unpin, extend and cut
        shelf.pin([tail])
        shelf.unpin([tail])
        (leaf,) = put(shelf, space, b"leaf", after=b"tail")
        shelf.forget(leaf)
    offered(shelf)  # checks the bound
    for entry in shelf._policies.values():
        orders = entry._orders.values() if isinstance(entry, Arc) else [entry._order]  # type: ignore[attr-defined]
        assert sum(map(len, orders)) < 300
    check(shelf)


@pytest.mark.parametrize("order", ["lru", "arc"])
@pytest.mark.parametrize("shape", ["apart", "fan", "fan, newest first", "chain"])
def test_ten_thousand_evictions_take_well_under_a_second(order: str, shape: str) -> None:
    count = 10_000
    shelf, space = shelf_of(count, order, per_extent=8), space_of()
    keys = [b"%d" % number for number in range(count)]
    if shape == "chain":
        put(shelf, space, *keys)
    else:
        (head,) = put(shelf, space, keys[0])
        fan = [put(shelf, space, key, after=keys[0] if shape != "apart" else None)[0] for key in keys[1:]]
        if shape == "fan, newest first":
            for block in reversed(fan):
                shelf.touch([head, block])
    began = time.perf_counter()
    assert shelf.reserve(space, [(b"new%d" % number, None) for number in range(count)])
    took = time.perf_counter() - began
    print(f"{order}, {shape}: {took:.3f} s")
    assert shelf.counts.evicted == count
    assert took < 1.5


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_a_long_chain_is_forgotten_head_first_in_linear_time(order: str) -> None:
    shelf, space = shelf_of(10_000, order, per_extent=8), space_of()
    chain = put(shelf, space, *(b"%d" % number for number in range(10_000)))
    began = time.perf_counter()
    for block in chain:
        assert shelf.forget(block)
    assert time.perf_counter() - began < 1.5
    assert not shelf.index.nodes
    check(shelf)


@pytest.mark.parametrize("order", ["lru", "arc"])
def test_a_quota_does_not_walk_past_everyone_elses_blocks(order: str) -> None:
    shelf = shelf_of(10_000, order, per_extent=8)
    small, large = space_of("small", quota=20 * 4096), space_of("large")
    for number in range(9_900):
        put(shelf, large, b"l%d" % number)
    began = time.perf_counter()
    for number in range(1_000):
        put(shelf, small, b"s%d" % number)
    took = time.perf_counter() - began
    assert small.used == 20 * 4096
    assert large.used == 9_900 * 4096
    assert took < 1.5


def test_by_name() -> None:
    assert isinstance(policy("lru"), Lru)
    assert isinstance(policy("arc"), Arc)
