"""Bounded pools: never beyond the bound, all or nothing, first come first served."""

import threading
import time
from itertools import count

import pytest

from kvtide.kernels.pool import Pool, PoolClosed, PoolExhausted


def numbers(bound: int) -> tuple[Pool[int], list[int]]:
    made, ended = count(), list[int]()
    return Pool("numbers", lambda: next(made), ended.append, bound), ended


def test_what_came_back_last_goes_out_first() -> None:
    pool, _ = numbers(4)
    first, second = pool.take(2, timeout=None)
    pool.give([first])
    pool.give([second])
    assert pool.take(timeout=None) == [second]
    assert pool.statistics() == {"live": 2, "free": 1, "bound": 4, "waiting": 0}


def test_more_than_the_bound_is_refused_at_once() -> None:
    pool, _ = numbers(2)
    with pytest.raises(PoolExhausted, match="bound is 2"):
        pool.take(3, timeout=60)
    pool.take(2, timeout=None)
    with pytest.raises(PoolExhausted, match="in use"):
        pool.take(timeout=None)
    with pytest.raises(PoolExhausted, match="came free"):
        pool.take(timeout=0.01)
    assert pool.statistics()["waiting"] == 0


def test_a_discarded_thing_is_ended_and_replaced() -> None:
    pool, ended = numbers(1)
    pool.discard(pool.take(timeout=None))
    assert pool.take(timeout=None) == [1]
    assert ended == [0]


def test_a_failing_maker_leaves_the_pool_as_it_was() -> None:
    made = count()

    def make() -> int:
        if (number := next(made)) == 1:
            raise OSError("no more")
        return number

    pool = Pool("numbers", make, lambda _: None, 2)
    with pytest.raises(OSError, match="no more"):
        pool.take(2, timeout=None)
    assert pool.statistics() == {"live": 1, "free": 1, "bound": 2, "waiting": 0}
    assert len(pool.take(2, timeout=None)) == 2


def test_a_line_is_served_in_order_and_all_or_none() -> None:
    pool, _ = numbers(4)
    held = pool.take(4, timeout=None)
    order: list[str] = []

    def wait(name: str, wanted: int) -> None:
        taken = pool.take(wanted, timeout=30)
        order.append(name)
        pool.give(taken)

    threads = []
    for place, (name, wanted) in enumerate([("all", 4), ("one", 1)], start=1):
        threads.append(threading.Thread(target=wait, args=(name, wanted)))
        threads[-1].start()
        while pool.statistics()["waiting"] < place:
            time.sleep(0.001)
    pool.give(held[:2])
    assert order == []  # "one" would fit, but "all" was first
    pool.give(held[2:])
    for thread in threads:
        thread.join(30)
    assert order == ["all", "one"]
    assert pool.statistics()["free"] == pool.statistics()["live"] == 4


def test_who_gives_up_does_not_block_the_line() -> None:
    pool, _ = numbers(2)
    held = pool.take(1, timeout=None)
    served = threading.Event()

    def give_up() -> None:
        with pytest.raises(PoolExhausted):
            pool.take(2, timeout=0.1)

    impatient = threading.Thread(target=give_up)
    patient = threading.Thread(target=lambda: (pool.take(timeout=30), served.set()))
    impatient.start()
    while pool.statistics()["waiting"] < 1:
        time.sleep(0.001)
    patient.start()
    assert served.wait(30)
    impatient.join(30)
    patient.join(30)
    pool.give(held)


def test_close_turns_away_who_waits() -> None:
    pool, ended = numbers(1)
    pool.take(timeout=None)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            pool.take(timeout=30)
        except PoolClosed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while pool.statistics()["waiting"] < 1:
        time.sleep(0.001)
    pool.close()
    thread.join(30)
    assert len(errors) == 1
    assert ended == []  # what is still out belongs to whoever has it
    with pytest.raises(PoolClosed):
        pool.take(timeout=None)


def test_S1_3_many_threads_never_exceed_the_bound() -> None:
    alive = most = 0
    lock = threading.Lock()

    def make() -> object:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return object()

    def end(_: object) -> None:
        nonlocal alive
        with lock:
            alive -= 1

    pool = Pool("streams", make, end, 4)

    def work(number: int) -> None:
        for turn in range(200):
            things = pool.take(1 + (number + turn) % 2, timeout=30)
            (pool.discard if turn % 7 == 0 else pool.give)(things)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    # Discarded ones live until the next maker ends them: at most that many on top.
    assert pool.statistics()["live"] <= 4 + 8
    pool.close()
    assert alive == 0
