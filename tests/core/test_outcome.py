"""A result that comes once: from any thread, to any loop or thread."""

import asyncio
import contextlib
import threading
import time
import traceback

import pytest

from kvtide.core.errors import KVTideError, WouldBlockLoop
from kvtide.core.outcome import Outcome


class Broken(KVTideError):
    pass


async def test_it_is_over_once() -> None:
    outcome: Outcome[int] = Outcome()
    assert not outcome.over
    with pytest.raises(asyncio.InvalidStateError):
        outcome.result()
    assert outcome.set(1)
    assert not outcome.set(2)
    assert not outcome.fail(Broken())
    assert (outcome.over, outcome.error, outcome.result()) == (True, None, 1)
    assert await outcome == 1
    assert await outcome == 1


async def test_an_error_goes_to_everyone_who_waits_or_will() -> None:
    outcome: Outcome[int] = Outcome()
    waiters = [asyncio.ensure_future(_awaited(outcome)) for _ in range(3)]
    await asyncio.sleep(0)
    error = Broken("why")
    assert outcome.fail(error)
    assert await asyncio.gather(*waiters, return_exceptions=True) == [error] * 3
    with pytest.raises(Broken):
        await outcome


async def _awaited(outcome: Outcome[int]) -> int:
    return await outcome


async def test_none_is_a_result() -> None:
    outcome: Outcome[None] = Outcome()
    outcome.set(None)
    assert outcome.over
    assert await outcome is None


async def test_set_from_a_thread() -> None:
    outcome: Outcome[int] = Outcome()
    thread = threading.Timer(0.02, outcome.set, [7])
    thread.start()
    async with asyncio.timeout(5):
        assert await outcome == 7
    thread.join()


async def test_cancelling_one_waiter_leaves_the_others() -> None:
    outcome: Outcome[int] = Outcome()
    first, second = (asyncio.ensure_future(_awaited(outcome)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not outcome.over
    assert not second.done()
    outcome.set(5)
    assert await second == 5


async def test_a_cancelled_waiter_is_forgotten() -> None:
    outcome: Outcome[int] = Outcome()
    for _ in range(10):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await outcome
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(outcome.wait, 0.0)
    assert not outcome._wakers


def test_many_loops_on_many_threads_at_once() -> None:
    outcome: Outcome[int] = Outcome()
    ready = threading.Barrier(9)
    heard: list[int] = []

    async def waits() -> None:
        tasks = [asyncio.ensure_future(_awaited(outcome)) for _ in range(5)]
        await asyncio.sleep(0)
        ready.wait()
        heard.extend(await asyncio.wait_for(asyncio.gather(*tasks), 10))

    threads = [threading.Thread(target=asyncio.run, args=[waits()]) for _ in range(8)]
    for thread in threads:
        thread.start()
    ready.wait()
    outcome.set(3)
    for thread in threads:
        thread.join(10)
    assert heard == [3] * 40


def test_only_one_of_many_setters_wins() -> None:
    for _ in range(50):
        outcome: Outcome[int] = Outcome()
        ready = threading.Barrier(4)
        won: list[int] = []

        def race(
            number: int,
            outcome: Outcome[int] = outcome,
            ready: threading.Barrier = ready,
            won: list[int] = won,
        ) -> None:
            ready.wait()
            if outcome.set(number):
                won.append(number)

        threads = [threading.Thread(target=race, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [outcome.result()]


def test_a_thread_waits() -> None:
    outcome: Outcome[int] = Outcome()
    timer = threading.Timer(0.02, outcome.set, [4])
    timer.start()
    assert outcome.wait(5) == 4
    assert outcome.wait() == 4
    timer.join()


def test_a_thread_waits_no_longer_than_told() -> None:
    outcome: Outcome[int] = Outcome()
    with pytest.raises(TimeoutError, match="goes on"):
        outcome.wait(0.01)
    assert not outcome.over
    outcome.fail(Broken())
    with pytest.raises(Broken):
        outcome.wait(0.0)


async def test_waiting_refuses_on_the_thread_of_a_loop() -> None:
    outcome: Outcome[int] = Outcome()
    with pytest.raises(WouldBlockLoop):
        outcome.wait(1)
    outcome.set(1)
    with pytest.raises(WouldBlockLoop):  # also when it would not block: the same call, the same answer
        outcome.wait(1)


def test_a_loop_that_was_closed_under_its_waiter_keeps_nothing_from_the_others() -> None:
    outcome: Outcome[int] = Outcome()
    loop = asyncio.new_event_loop()
    task = loop.create_task(_awaited(outcome))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    heard: list[str] = []
    outcome.when_over(lambda: heard.append("after"))
    assert outcome.set(1)
    assert heard == ["after"]
    # Its task will never run again; it is ours to end, or the interpreter complains of it.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):
        task.get_coro().close()  # type: ignore[union-attr]


def test_when_over() -> None:
    outcome: Outcome[int] = Outcome()
    heard: list[str] = []
    outcome.when_over(lambda: heard.append("first"))
    taken_back = outcome.when_over(lambda: heard.append("never"))
    outcome.when_over(lambda: heard.append("second"))
    taken_back()
    assert heard == []
    outcome.set(1)
    assert heard == ["first", "second"]
    outcome.when_over(lambda: heard.append("late"))()
    assert heard == ["first", "second", "late"]
    taken_back()


def test_S4_4_one_that_raises_as_it_is_told_keeps_nothing_from_the_others() -> None:
    outcome: Outcome[int] = Outcome()
    heard: list[int] = []

    def raises() -> None:
        raise ValueError("told")

    outcome.when_over(raises)
    outcome.when_over(lambda: heard.append(outcome.result()))
    with pytest.raises(ValueError, match="told"):
        outcome.set(1)
    assert heard == [1]


async def test_waking_may_ask_for_more() -> None:
    outcome: Outcome[int] = Outcome()
    heard: list[int] = []
    outcome.when_over(lambda: outcome.when_over(lambda: heard.append(outcome.result())) and None)
    outcome.set(2)
    assert heard == [2]


def test_an_error_that_many_wait_for_does_not_grow() -> None:
    outcome: Outcome[int] = Outcome()
    outcome.fail(Broken())
    for _ in range(100):
        with pytest.raises(Broken) as told:
            outcome.wait(0)
    assert len(traceback.extract_tb(told.value.__traceback__)) < 10


def test_ten_thousand_waiters_leave_in_linear_time() -> None:
    outcome: Outcome[int] = Outcome()
    forget = [outcome.when_over(lambda: None) for _ in range(20_000)]
    began = time.perf_counter()
    for one in reversed(forget):
        one()
    assert time.perf_counter() - began < 1.0
    assert not outcome._wakers
