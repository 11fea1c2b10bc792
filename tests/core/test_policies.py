"""LRU and ARC against the textbook: the same pages resident, in the same order, after every step."""

import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Iterable

import pytest
from tests.core.shelves import check, held, links, offered, put, shelf_of, space_of

from kvtide.core.policies import Arc, Lru, policy
from kvtide.core.shelf import Shelf

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


def request(shelf: Shelf, page: bytes) -> bool:
    """A prompt of one block: loaded if it is held, else stored."""
    block = shelf.index.held(page)
    if block is not None:
        shelf.touch([block])
        return True
    put(shelf, SPACES[shelf], page)
    return False


SPACES: dict[Shelf, object] = {}


@pytest.fixture(autouse=True)
def _no_spaces_left():
    yield
    SPACES.clear()


def shelf_with_space(slots: int, order: str) -> Shelf:
    shelf = shelf_of(slots, order)
    SPACES[shelf] = space_of()
    return shelf
