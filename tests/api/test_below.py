"""A tier below host memory: spilled to, promoted from, corrupt, failing and given up."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.api.houses import TOKENS, UNTOUCHED, Memory, prompt, settings, until

import kvtide
from kvtide import Faults, MemoryTier

ROOM = 4
"""Blocks of host memory."""


@contextlib.asynccontextmanager
async def house(
    faults: Faults | None = None, blocks: int = ROOM, lower_blocks: int = 64, **changes: Any
) -> AsyncIterator[tuple[kvtide.Cache, kvtide.Pages, Memory]]:
    """A cache with little host memory over a memory tier; pages are filled, blocks 0 to 15."""
    lower = MemoryTier(lower_blocks * 4096, extent_bytes=1 << 13, faults=faults)
    memory = Memory(16, seed=1)
    async with kvtide.open_cache(settings(host_bytes=blocks * 4096, **changes), lower=lower) as cache:
        yield cache, cache.attach(memory.paged(), namespace="m"), memory


def tier(cache: kvtide.Cache, name: str) -> kvtide.TierStatistics:
    (found,) = [tier for tier in cache.statistics().tiers if tier.name == name]
    return found


async def pushed_down(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    """Prompt 0 (pages 0 to 3) is stored, then driven out of host memory by prompt 1."""
    await pages.store(prompt(4), range(4), after=None)
    await pages.store(prompt(4, 1), range(4, 8), after=None)
    assert cache.held(prompt(4)).by_tier == {"memory": 4 * TOKENS}


def at_rest(cache: kvtide.Cache) -> None:
    stats = cache.statistics()
    assert stats.inflight_transfers == stats.inflight_bytes == 0
    for each in stats.tiers:
        assert each.pinned_bytes == each.filling == each.waiting_for_room == 0


async def test_S3_1_what_leaves_host_memory_is_a_hit_below_and_comes_back_as_it_was() -> None:
    async with house() as (cache, pages, memory):
        before = memory.blocks(range(16))
        await pushed_down(cache, pages)
        memory.wipe()
        with cache.match(prompt(4)) as hit:
            assert hit.tokens == 4 * TOKENS
            assert hit.by_tier == {"memory": 4 * TOKENS}
            loaded = await pages.load(hit, [9, 8, 11, 10], after=None)
            assert loaded == kvtide.Loaded(4 * TOKENS)
        assert memory.blocks([9, 8, 11, 10]) == before[:4]
        assert all(block == UNTOUCHED for block in memory.blocks([*range(8), *range(12, 16)]))
        assert cache.held(prompt(4)).by_tier == {"host": 4 * TOKENS}
        stats = cache.statistics()
        assert stats.promoted_blocks == 4
        assert tier(cache, "memory").hit_blocks == 4
        at_rest(cache)


async def test_a_hit_shows_which_tier_holds_what() -> None:
    async with house() as (cache, pages, memory):
        before = memory.blocks(range(16))
        await pages.store(prompt(4), range(4), after=None)
        await pages.store(prompt(2, 1), [4, 5], after=None)
        # Tails go first.
        with cache.match(prompt(4)) as hit:
            assert hit.by_tier == {"host": 2 * TOKENS, "memory": 2 * TOKENS}
            assert cache.held(prompt(4)).by_tier == hit.by_tier
            with hit[: 2 * TOKENS] as head, hit[2 * TOKENS :] as tail:
                assert head.by_tier == {"host": 2 * TOKENS}
                assert tail.by_tier == {"memory": 2 * TOKENS}
        memory.wipe()
    assert memory.blocks(range(16)) != before


async def test_spilling_makes_blocks_clean_and_room_for_the_next() -> None:
    faults = Faults(gate=asyncio.Event())
    async with house(faults) as (cache, pages, _):
        assert (await pages.store(prompt(4), range(4), after=None)).stored == 4
        assert tier(cache, "host").dirty_bytes == 4 * 4096
        waiting = pages.store(prompt(4, 1), range(4), after=None)
        assert tier(cache, "host").waiting_for_room == 1
        assert faults.gate is not None
        faults.gate.set()
        assert (await waiting).stored == 4
        await until(lambda: tier(cache, "host").dirty_bytes == 0)
        assert tier(cache, "memory").blocks == 8
        assert faults.writes == 8
        at_rest(cache)


async def test_dirty_blocks_are_named_when_there_is_no_room() -> None:
    faults = Faults(gate=asyncio.Event())
    async with house(faults) as (cache, pages, _):
        await pages.store(prompt(4), range(4), after=None)
        with pytest.raises(kvtide.NoRoom) as raised:
            await pages.store(prompt(2, 1), [0, 1], after=None, deadline=0.05)
        assert raised.value.dirty == 4 * 4096
        assert cache.held(prompt(4)).tokens == 4 * TOKENS  # nothing dirty was dropped
        assert faults.gate is not None
        faults.gate.set()


async def test_a_block_that_is_held_below_is_not_stored_again() -> None:
    async with house() as (cache, pages, _):
        await pushed_down(cache, pages)
        stored = await pages.store(prompt(4), range(4), after=None)
        assert stored == kvtide.Stored(stored=0, already=4, dropped=0)


async def test_a_full_lower_tier_evicts_in_its_turn() -> None:
    async with house(lower_blocks=6) as (cache, pages, memory):
        for number in range(5):
            await pages.store(prompt(4, number), range(4), after=None)
        await until(lambda: tier(cache, "host").dirty_bytes == 0)
        below = tier(cache, "memory")
        assert below.blocks <= 6
        assert below.used_bytes <= below.capacity_bytes
        assert below.evicted_blocks > 0
        with cache.match(prompt(4, 4)) as hit:
            assert hit.tokens == 4 * TOKENS
            memory.wipe()
            assert (await pages.load(hit, range(4), after=None)).tokens == 4 * TOKENS


@pytest.mark.parametrize("bad", [0, 2])
async def test_a_corrupt_block_ends_the_load_and_becomes_a_miss(bad: int) -> None:
    faults = Faults()
    async with house(faults) as (cache, pages, memory):
        before = memory.blocks(range(16))
        await pushed_down(cache, pages)
        memory.wipe()
        with cache.match(prompt(4)) as hit, hit[: bad * TOKENS] as head:
            assert (await pages.load(head, range(8, 8 + bad), after=None)).tokens == bad * TOKENS
            faults.corrupt_reads = 1
            loaded = await pages.load(hit, range(12, 16), after=None)
        assert loaded.tokens == bad * TOKENS
        assert loaded.shortfall == {"corrupt": TOKENS, "behind": (3 - bad) * TOKENS}
        assert memory.blocks(range(12, 12 + bad)) == before[:bad]
        assert all(block == UNTOUCHED for block in memory.blocks(range(12 + bad, 16)))
        assert tier(cache, "memory").corrupt_blocks == 1
        assert cache.held(prompt(4)).tokens == bad * TOKENS
        at_rest(cache)
        # It is stored anew, and is a hit again.
        memory.fill(1)
        assert (await pages.store(prompt(4), range(4), after=None)).dropped == 0
        assert cache.held(prompt(4)).tokens == 4 * TOKENS


async def test_failing_reads_are_a_shortfall_and_the_tier_is_degraded_until_one_works() -> None:
    faults = Faults()
    async with house(faults) as (cache, pages, _):
        await pushed_down(cache, pages)
        faults.fail_reads = 1
        with cache.match(prompt(4)) as hit, hit[:TOKENS] as first:
            loaded = await pages.load(first, [9], after=None)
            assert loaded == kvtide.Loaded(0, {"tier_failed": TOKENS})
            (below,) = [part for part in cache.health() if part.name == "memory"]
            assert below.state == "degraded"
            assert "told to fail" in (below.cause or "")
            # Nothing was lost: the next try works.
            assert (await pages.load(first, [9], after=None)).tokens == TOKENS
        (below,) = [part for part in cache.health() if part.name == "memory"]
        assert below.state == "ok"
        at_rest(cache)


async def test_a_tier_that_keeps_failing_is_closed_and_the_cache_goes_on() -> None:
    faults = Faults()
    async with house(faults) as (cache, pages, memory):
        await pushed_down(cache, pages)
        faults.fail_reads = 100
        with cache.match(prompt(4)) as hit:
            loaded = await pages.load(hit, range(8, 12), after=None)
        assert loaded.tokens == 0
        assert loaded.shortfall == {"tier_failed": 4 * TOKENS}
        (below,) = [part for part in cache.health() if part.name == "memory"]
        assert below.state == "failed"
        assert "told to fail" in (below.cause or "")
        assert cache.held(prompt(4)).tokens == 0
        at_rest(cache)
        # Host memory alone from now on: nothing is dirty, and whatever is old goes.
        for number in range(2, 5):
            assert (await pages.store(prompt(4, number), range(4), after=None)).stored == 4
        assert tier(cache, "host").dirty_bytes == 0
        memory.fill(2)
        before = memory.blocks(range(4))
        await pages.store(prompt(4, 6), range(4), after=None)
        with cache.match(prompt(4, 6)) as hit:
            await pages.load(hit, range(8, 12), after=None)
        assert memory.blocks(range(8, 12)) == before


async def test_failing_writes_close_the_tier_and_free_those_who_wait_for_room() -> None:
    faults = Faults(gate=asyncio.Event(), fail_writes=100)
    async with house(faults) as (cache, pages, _):
        await pages.store(prompt(4), range(4), after=None)
        waiting = pages.store(prompt(4, 1), range(4), after=None)
        assert faults.gate is not None
        faults.gate.set()
        assert (await waiting).stored == 4
        (below,) = [part for part in cache.health() if part.name == "memory"]
        assert below.state == "failed"
        at_rest(cache)


async def test_a_write_that_fails_once_is_tried_again() -> None:
    faults = Faults(fail_writes=1)
    async with house(faults) as (cache, pages, _):
        await pages.store(prompt(4), range(4), after=None)
        await until(lambda: tier(cache, "host").dirty_bytes == 0)
        assert tier(cache, "memory").blocks == 4
        assert faults.writes == 5
        at_rest(cache)


async def test_two_promotions_that_together_need_more_room_than_there_is_both_end() -> None:
    faults = Faults()
    async with house(faults, blocks=6) as (cache, pages, memory):
        before = memory.blocks(range(16))
        await pages.store(prompt(4), range(4), after=None)
        await pages.store(prompt(4, 1), range(4, 8), after=None)
        await pages.store(prompt(6, 2), range(6), after=None)
        assert cache.held(prompt(4)).by_tier == cache.held(prompt(4, 1)).by_tier == {"memory": 4 * TOKENS}
        memory.wipe()
        faults.gate = asyncio.Event()
        async with cache.match(prompt(4)) as one, cache.match(prompt(4, 1)) as two:
            first = pages.load(one, range(4), after=None)
            second = pages.load(two, range(8, 12), after=None)
            assert tier(cache, "host").waiting_for_room == 1
            faults.gate.set()
            assert [(await first).tokens, (await second).tokens] == [4 * TOKENS] * 2
        assert memory.blocks(range(4)) == before[:4]
        assert memory.blocks(range(8, 12)) == before[4:8]
        at_rest(cache)


async def test_two_loads_of_blocks_below_read_them_once() -> None:
    faults = Faults()
    async with house(faults) as (cache, pages, memory):
        before = memory.blocks(range(16))
        await pushed_down(cache, pages)
        memory.wipe()
        faults.gate, faults.reads = asyncio.Event(), 0
        with cache.match(prompt(4)) as hit:
            first = pages.load(hit, range(4), after=None)
            second = pages.load(hit, range(8, 12), after=None)
            with hit[: 2 * TOKENS] as part:
                third = pages.load(part, range(4, 6), after=None)
            faults.gate.set()
            loaded = await asyncio.gather(first, second, third)
        assert [each.tokens for each in loaded] == [4 * TOKENS, 4 * TOKENS, 2 * TOKENS]
        assert faults.reads == 4
        assert memory.blocks(range(4)) == memory.blocks(range(8, 12)) == before[:4]
        assert memory.blocks([4, 5]) == before[:2]
        at_rest(cache)


async def test_loads_that_share_a_promotion_share_its_failure() -> None:
    faults = Faults()
    async with house(faults) as (cache, pages, _):
        await pushed_down(cache, pages)
        faults.gate = asyncio.Event()
        with cache.match(prompt(4)) as hit:
            loads = [pages.load(hit, range(4), after=None), pages.load(hit, range(8, 12), after=None)]
            faults.corrupt_reads = 4
            faults.gate.set()
            for load in loads:
                loaded = await load
                assert loaded.tokens == 0
                assert loaded.shortfall.get("corrupt", 0) > 0
                assert sum(loaded.shortfall.values()) == 4 * TOKENS
        assert cache.held(prompt(4)).tokens == 0
        at_rest(cache)


async def test_S2_5_a_block_that_is_being_promoted_is_still_a_hit_below() -> None:
    faults = Faults()
    async with house(faults) as (cache, pages, _):
        await pushed_down(cache, pages)
        faults.gate = asyncio.Event()
        with cache.match(prompt(4)) as hit:
            load = pages.load(hit, range(4), after=None)
            assert cache.held(prompt(4)).by_tier == {"memory": 4 * TOKENS}
            faults.gate.set()
            await load
        assert cache.held(prompt(4)).by_tier == {"host": 4 * TOKENS}


async def test_a_load_keeps_its_blocks_below_after_its_hit_was_closed() -> None:
    faults = Faults()
    async with house(faults) as (cache, pages, memory):
        before = memory.blocks(range(16))
        await pushed_down(cache, pages)
        faults.gate = asyncio.Event()
        memory.wipe()
        with cache.match(prompt(4)) as hit:
            load = pages.load(hit, range(4), after=None)
        assert tier(cache, "memory").pinned_bytes == 4 * 4096
        faults.gate.set()
        assert (await load).tokens == 4 * TOKENS
        assert memory.blocks(range(4)) == before[:4]
        at_rest(cache)


async def test_promotion_of_every_shard_brings_each_rank_its_own_bytes() -> None:
    lower = MemoryTier(1 << 17, extent_bytes=1 << 13)
    memories = [Memory(8, seed=rank + 1) for rank in range(2)]
    async with kvtide.open_cache(settings(host_bytes=8 * 4096), lower=lower) as cache:
        ranks = [cache.attach(m.paged(), namespace="m", shard=i, of=2) for i, m in enumerate(memories)]
        for number in range(2):
            for pages in ranks:
                await pages.store(prompt(4, number), range(4), after=None)
        assert cache.held(prompt(4)).by_tier == {"memory": 4 * TOKENS}
        before = [memory.blocks(range(4)) for memory in memories]
        for memory in memories:
            memory.wipe()
        with cache.match(prompt(4)) as hit:
            loads = [pages.load(hit, range(4, 8), after=None) for pages in ranks]
            assert [load.tokens for load in await asyncio.gather(*loads)] == [4 * TOKENS] * 2
        assert [memory.blocks(range(4, 8)) for memory in memories] == before
        at_rest(cache)


async def test_a_tier_that_raises_what_is_not_ours_ends_the_load_and_shows_in_health() -> None:
    class Broken(MemoryTier):
        async def read(self, slot: int, label: Any, into: memoryview) -> None:
            raise OSError(5, "the disk is gone")

    memory = Memory(8, seed=1)
    lower = Broken(1 << 17, extent_bytes=1 << 13)
    async with kvtide.open_cache(settings(host_bytes=4 * 4096), lower=lower) as cache:
        pages = cache.attach(memory.paged(), namespace="m")
        await pages.store(prompt(4), range(4), after=None)
        await pages.store(prompt(4, 1), range(4), after=None)
        with cache.match(prompt(4)) as hit:
            loaded = await pages.load(hit, range(4), after=None)
        assert loaded.tokens == 0
        assert loaded.shortfall.get("tier_failed", 0) > 0
        await until(lambda: any("the disk is gone" in (part.cause or "") for part in cache.health()))
        at_rest(cache)
