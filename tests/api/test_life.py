"""Opening, counting, waiting without a loop, and closing."""

import asyncio
import dataclasses
import json
import os
import threading
import time
from typing import Any

import pytest
from tests.api.houses import TOKENS, UNTOUCHED, Memory, opened, prompt, settings, until

import kvtide
from kvtide.kernels.fake import FakeDevice


def kvtide_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvtide")}


def all_ended(threads: set[threading.Thread]) -> bool:
    """The one that closed the cache may be on its last line still."""
    for thread in threads:
        thread.join(1.0)
    return not any(thread.is_alive() for thread in threads)


# -- the blocking facade ----------------------------------------------------------------------


def test_callers_without_a_loop() -> None:
    memory = Memory(8, seed=1)
    before = memory.blocks(range(4))
    threads = kvtide_threads()
    with kvtide.open_blocking(settings()) as cache:
        pages = cache.attach(memory.paged(), namespace="m")
        assert pages.store(prompt(4), range(4), after=None).wait(5.0).stored == 4
        with cache.match(prompt(4)) as hit:
            load = pages.load(hit, [7, 6, 5, 4], after=None)
            assert load.wait(5.0) == kvtide.Loaded(4 * TOKENS)
            assert load.settled.wait(5.0)
    assert memory.blocks([7, 6, 5, 4]) == before
    assert all_ended(kvtide_threads() - threads)
    with pytest.raises(kvtide.CacheClosed):
        cache.match(prompt(4))


def test_a_blocking_wait_that_takes_too_long_ends_alone() -> None:
    faults = kvtide.Faults(gate=asyncio.Event())
    lower = kvtide.MemoryTier(1 << 16, extent_bytes=1 << 13, faults=faults)
    with kvtide.open_blocking(settings(host_bytes=2 * 4096), lower=lower, close_deadline=0.5) as cache:
        pages = cache.attach(Memory(8, seed=1).paged(), namespace="m")
        pages.store(prompt(2), [0, 1], after=None).wait(5.0)
        stuck = pages.store(prompt(2, 1), [2, 3], after=None)
        with pytest.raises(TimeoutError, match="goes on"):
            stuck.wait(0.02)
        assert not stuck.done
    with pytest.raises(kvtide.CacheClosed):
        stuck.wait(1.0)


def test_an_error_inside_the_block_comes_out_and_closes_the_cache() -> None:
    threads = kvtide_threads()
    with pytest.raises(RuntimeError, match="mine"), kvtide.open_blocking(settings()) as cache:
        raise RuntimeError("mine")
    assert all_ended(kvtide_threads() - threads)
    with pytest.raises(kvtide.CacheClosed):
        cache.match(prompt(4))


def test_a_cache_that_does_not_open_leaves_no_thread() -> None:
    class Broken(kvtide.MemoryTier):
        async def open(self) -> None:
            raise kvtide.TierFailed("no disk")

    threads = kvtide_threads()
    with (
        pytest.raises(kvtide.TierFailed, match="no disk"),
        kvtide.open_blocking(settings(), lower=Broken(1 << 16, extent_bytes=1 << 13)),
    ):
        raise AssertionError("opened")
    assert all_ended(kvtide_threads() - threads)


async def test_the_blocking_facade_refuses_to_run_on_a_loop() -> None:
    with pytest.raises(kvtide.WouldBlockLoop), kvtide.open_blocking(settings()):
        raise AssertionError("opened")
    async with kvtide.open_cache(settings()) as cache:
        pages = cache.attach(Memory(4).paged(), namespace="m")
        store = pages.store(prompt(1), [0], after=None)
        with pytest.raises(kvtide.WouldBlockLoop):
            store.wait(1.0)
        await store
        with pytest.raises(kvtide.WouldBlockLoop):
            store.settled.wait(1.0)
        # Another thread may.
        assert (await asyncio.to_thread(store.wait, 1.0)).stored == 1


async def test_any_thread_may_decide_while_the_loop_runs() -> None:
    async with kvtide.open_cache(settings()) as cache:
        memories = [Memory(8, seed=number) for number in range(4)]
        attached = [cache.attach(memory.paged(), namespace="m") for memory in memories]

        def work(number: int) -> int:
            tokens = 0
            for turn in range(20):
                own = prompt(4, 10 * number + turn % 3)
                attached[number].store(own, range(4), after=None).wait(5.0)
                with cache.match(own) as hit:
                    ids = range(4, 4 + hit.tokens // TOKENS)
                    tokens += attached[number].load(hit, ids, after=None).wait(5.0).tokens
            return tokens

        loaded = await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(4)))
        assert all(tokens > 0 for tokens in loaded)
        stats = cache.statistics()
        assert stats.inflight_transfers == stats.inflight_bytes == stats.tiers[0].pinned_bytes == 0


# -- counting ---------------------------------------------------------------------------------


async def test_statistics_are_plain_values_that_json_takes() -> None:
    lower = kvtide.MemoryTier(1 << 16, extent_bytes=1 << 13)
    async with kvtide.open_cache(settings(), lower=lower) as cache:
        pages = cache.attach(Memory(8, seed=1).paged(), namespace="m")
        await pages.store(prompt(4), range(4), after=None)
        with cache.match(prompt(6)) as hit:
            await pages.load(hit, range(4), after=None)
        await pages.store(prompt(4, 3), range(4), after=None)
        stats = cache.statistics()
        document = json.loads(json.dumps(dataclasses.asdict(stats)))
        assert [tier["name"] for tier in document["tiers"]] == ["host", "memory"]
        assert document["lookups"] == 1
        assert document["lookup_tokens"] == 6 * TOKENS
        assert document["hit_tokens"] == 4 * TOKENS
        assert document["stored_bytes"] == 8 * 2048
        assert document["loaded_bytes"] == 4 * 2048
        assert stats == dataclasses.replace(stats)
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.lookups = 5  # type: ignore[misc]
        assert json.dumps([dataclasses.asdict(part) for part in cache.health()])


async def test_failures_are_counted_by_name() -> None:
    fake = FakeDevice()
    async with opened(fake) as cache:
        pages = cache.attach(Memory(8, seed=1).paged(("cuda", 0)), namespace="m")
        fake.fail_next("copy", 0)
        with pytest.raises(kvtide.TransferFailed, match="copy failed with code 1"):
            await pages.store(prompt(1), [0], after=fake.stream())
        assert cache.statistics().errors == {"TransferFailed": 1}
        assert cache.held(prompt(1)).tokens == 0


async def test_a_lost_device_closes_its_pages_and_shows_in_health() -> None:
    first, second = FakeDevice(0), FakeDevice(1)
    async with opened(first, second) as cache:
        lost = cache.attach(Memory(8, seed=1).paged(("cuda", 1)), namespace="m")
        other = cache.attach(Memory(8, seed=1).paged(("cuda", 0)), namespace="m")
        stream = second.stream()
        second.fail_next("copy", 0, code=719, lost=True)
        with pytest.raises(kvtide.DeviceUnavailable):
            await lost.store(prompt(1), [0], after=stream)
        with pytest.raises(kvtide.DeviceUnavailable, match="lost"):
            lost.store(prompt(1), [0], after=stream)
        states = {part.name: part.state for part in cache.health()}
        assert states["fake:1"] == "failed"
        assert states["fake:0"] == "ok"
        assert (await other.store(prompt(1), [0], after=first.stream())).stored == 1


# -- the end ----------------------------------------------------------------------------------


async def test_closing_leaves_no_thread_task_or_descriptor() -> None:
    threads, tasks, fds = kvtide_threads(), asyncio.all_tasks(), set(os.listdir("/proc/self/fd"))
    lower = kvtide.MemoryTier(1 << 16, extent_bytes=1 << 13)
    async with kvtide.open_cache(settings(host_bytes=4 * 4096), lower=lower) as cache:
        pages = cache.attach(Memory(8, seed=1).paged(), namespace="m")
        for number in range(3):
            await pages.store(prompt(4, number), range(4), after=None)
        with cache.match(prompt(4)) as hit:
            await pages.load(hit, range(4), after=None)
    await until(lambda: kvtide_threads() == threads)
    assert asyncio.all_tasks() == tasks
    assert set(os.listdir("/proc/self/fd")) == fds
    assert await cache.close() == kvtide.Closed(())


@pytest.mark.parametrize("reads", [1, 100])
async def test_closing_after_failing_reads_leaves_nothing_stuck(reads: int) -> None:
    """An error that was caught keeps what its frames saw: a view of host memory must not be among it."""
    faults = kvtide.Faults()
    lower = kvtide.MemoryTier(1 << 16, extent_bytes=1 << 13, faults=faults)
    async with opened(lower=lower, host_bytes=4 * 4096) as cache:
        pages = cache.attach(Memory(8, seed=1).paged(), namespace="m")
        await pages.store(prompt(4), range(4), after=None)
        await pages.store(prompt(4, 1), range(4), after=None)
        faults.fail_reads = reads
        with cache.match(prompt(4)) as hit:
            await pages.load(hit, range(4), after=None)


async def test_close_tells_who_waits_for_room_or_for_its_turn() -> None:
    fake = FakeDevice()
    async with opened(fake, host_bytes=8 * 4096, max_inflight_bytes=2048) as cache:
        pages = cache.attach(Memory(16, seed=1).paged(("cuda", 0)), namespace="m")
        stream = fake.stream()
        fake.hold()
        copying = pages.store(prompt(1), [0], after=stream)
        turn = pages.store(prompt(1, 1), [1], after=stream)
        room = pages.store(prompt(8, 2), range(8), after=stream)
        waiters = [asyncio.ensure_future(_of(transfer)) for transfer in (turn, room)]
        closing = asyncio.ensure_future(cache.close(5.0))
        for error in await asyncio.gather(*waiters, return_exceptions=True):
            assert isinstance(error, kvtide.CacheClosed)
        assert not copying.done
        fake.release()
        assert (await copying).stored == 1
        assert await closing == kvtide.Closed(())


async def test_close_tells_who_waits_for_a_promotion_and_leaves_the_pages_alone() -> None:
    faults = kvtide.Faults()
    lower = kvtide.MemoryTier(1 << 16, extent_bytes=1 << 13, faults=faults)
    memory = Memory(8, seed=1)
    async with kvtide.open_cache(settings(host_bytes=4 * 4096), lower=lower) as cache:
        pages = cache.attach(memory.paged(), namespace="m")
        await pages.store(prompt(4), range(4), after=None)
        await pages.store(prompt(4, 1), range(4), after=None)
        memory.wipe()
        faults.gate = asyncio.Event()
        with cache.match(prompt(4)) as hit:
            load = pages.load(hit, range(4), after=None)
        closing = asyncio.ensure_future(cache.close(2.0))
        with pytest.raises(kvtide.CacheClosed):
            async with asyncio.timeout(1.0):
                await load
        faults.gate.set()
        assert await closing == kvtide.Closed(())
        assert await load.settled
        assert all(block == UNTOUCHED for block in memory.blocks(range(8)))


async def test_close_returns_in_time_and_names_what_is_stuck() -> None:
    fake = FakeDevice()
    made = settings(pin=True)
    from tests.api.houses import devices

    from kvtide.core.cache import Cache
    from kvtide.storage.arena import Arena

    memory = Memory(8, seed=1)
    arena = Arena(made, devices(fake))
    cache = Cache(made, arena, None)
    await cache.open()
    await until(lambda: cache.statistics().tiers[0].capacity_bytes == made.host_bytes)
    pages = cache.attach(memory.paged(("cuda", 0)), namespace="m")
    fake.hold()
    store = pages.store(prompt(2), [0, 1], after=fake.stream())
    began = time.monotonic()
    closed = await cache.close(0.2)
    assert time.monotonic() - began < 1.5
    assert any("store" in name for name in closed.stuck)
    assert fake.ranges  # the memory under the copy stays, and stays registered
    assert not store.settled.over
    fake.release()
    await store.settled
    assert arena.view(0, 2048).tobytes() in memory.blocks(range(2))
    await asyncio.to_thread(arena.close, 5.0, keep=False)
    fake.close()


async def _of(transfer: Any) -> Any:
    return await transfer
