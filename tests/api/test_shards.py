"""Several ranks of one process make a block ready together; devices with one rank are replicas."""

import asyncio
import random

import pytest
from tests.api.houses import TOKENS, Memory, opened, prompt, settings

import kvtide
from kvtide.kernels.fake import FakeDevice


@pytest.mark.parametrize("count", [2, 3])
async def test_a_block_is_a_hit_when_all_ranks_have_arrived(count: int) -> None:
    memories = [Memory(12, seed=rank) for rank in range(count)]
    async with kvtide.open_cache(settings()) as cache:
        ranks = [cache.attach(m.paged(), namespace="m", shard=i, of=count) for i, m in enumerate(memories)]
        before = [memory.blocks(range(4)) for memory in memories]
        order = random.Random(count).sample(range(count), count)
        for number, rank in enumerate(order):
            assert cache.held(prompt(4)).tokens == 0, number
            with cache.match(prompt(4)) as hit:
                assert hit.tokens == 0
            assert (await ranks[rank].store(prompt(4), range(4), after=None)).stored == 4
        with cache.match(prompt(4)) as hit:
            assert hit.tokens == 4 * TOKENS
            loads = [pages.load(hit, [8, 11, 9, 10], after=None) for pages in ranks]
            assert [load.tokens for load in await asyncio.gather(*loads)] == [4 * TOKENS] * count
        for memory, images in zip(memories, before, strict=True):
            assert memory.blocks([8, 11, 9, 10]) == images
        stats = cache.statistics().tiers[0]
        assert (stats.blocks, stats.filling, stats.pinned_bytes) == (4, 0, 0)
        assert stats.used_bytes == 4 * count * 4096


async def test_ranks_that_bring_different_lengths_make_the_common_part() -> None:
    async with kvtide.open_cache(settings()) as cache:
        ranks = [cache.attach(Memory(8, seed=i).paged(), namespace="m", shard=i, of=2) for i in range(2)]
        await ranks[0].store(prompt(4), range(4), after=None)
        await ranks[1].store(prompt(2), range(2), after=None)
        assert cache.held(prompt(4)).tokens == 2 * TOKENS
        await ranks[1].store(prompt(4), [2, 3], start=2 * TOKENS, after=None)
        assert cache.held(prompt(4)).tokens == 4 * TOKENS


async def test_a_rank_is_not_stored_twice() -> None:
    async with kvtide.open_cache(settings()) as cache:
        ranks = [cache.attach(Memory(8, seed=i).paged(), namespace="m", shard=i, of=2) for i in range(2)]
        assert (await ranks[0].store(prompt(2), [0, 1], after=None)).stored == 2
        assert await ranks[0].store(prompt(2), [0, 1], after=None) == kvtide.Stored(0, 2, 0)
        assert (await ranks[1].store(prompt(2), [0, 1], after=None)).stored == 2
        assert await ranks[1].store(prompt(2), [0, 1], after=None) == kvtide.Stored(0, 2, 0)


async def test_a_failing_rank_leaves_a_miss_that_another_try_completes() -> None:
    first, second = FakeDevice(0), FakeDevice(1)
    memories = [Memory(8, seed=i) for i in range(2)]
    async with opened(first, second) as cache:
        streams = [first.stream(), second.stream()]
        ranks = [
            cache.attach(m.paged(("cuda", i)), namespace="m", shard=i, of=2) for i, m in enumerate(memories)
        ]
        second.fail_next("copy", 1)
        stores = [
            pages.store(prompt(2), [0, 1], after=stream) for pages, stream in zip(ranks, streams, strict=True)
        ]
        assert (await stores[0]).stored == 2
        with pytest.raises(kvtide.TransferFailed):
            await stores[1]
        assert cache.held(prompt(2)).tokens == 0
        assert cache.statistics().tiers[0].pinned_bytes == 0
        assert (await ranks[1].store(prompt(2), [0, 1], after=second.stream())).stored == 2
        before = [memory.blocks([0, 1]) for memory in memories]
        with cache.match(prompt(2)) as hit:
            assert hit.tokens == 2 * TOKENS
            for pages, fake in zip(ranks, (first, second), strict=True):
                await pages.load(hit, [5, 4], after=fake.stream())
        assert [memory.blocks([5, 4]) for memory in memories] == before


async def test_S4_1_every_rank_copies_on_its_own_device() -> None:
    fakes = [FakeDevice(index) for index in range(3)]
    async with opened(*fakes) as cache:
        ranks = [
            cache.attach(Memory(4, seed=i).paged(("cuda", i)), namespace="m", shard=i, of=3) for i in range(3)
        ]
        for pages, fake in zip(ranks, fakes, strict=True):
            await pages.store(prompt(2), [0, 1], after=fake.stream())
        assert [fake.counts["copy"] for fake in fakes] == [4, 4, 4]
        assert [fake.counts["submit"] for fake in fakes] == [1, 1, 1]


async def test_replicas_serve_each_other() -> None:
    first, second = FakeDevice(0), FakeDevice(1)
    one, two = Memory(8, seed=1), Memory(8)
    async with opened(first, second) as cache:
        here = cache.attach(one.paged(("cuda", 0)), namespace="m")
        there = cache.attach(two.paged(("cuda", 1)), namespace="m")
        await here.store(prompt(4), range(4), after=first.stream())
        assert await there.store(prompt(4), range(4), after=second.stream()) == kvtide.Stored(0, 4, 0)
        with cache.match(prompt(4)) as hit:
            await there.load(hit, [7, 6, 5, 4], after=second.stream())
        assert two.blocks([7, 6, 5, 4]) == one.blocks(range(4))
        assert second.counts["submit"] == 1


async def test_pages_of_another_number_of_shards_are_another_namespace() -> None:
    async with kvtide.open_cache(settings()) as cache:
        whole = cache.attach(Memory(4).paged(), namespace="m")
        half = cache.attach(Memory(4).paged(), namespace="m", shard=0, of=2)
        assert whole.namespace.digest != half.namespace.digest
