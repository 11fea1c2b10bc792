"""Room in host memory: who gets it, who waits, who is told that there is none."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from tests.api.houses import TOKENS, Memory, prompt, settings, until

import kvtide

SLOT = 4096


@contextlib.asynccontextmanager
async def house(blocks: int = 8, **changes: Any) -> AsyncIterator[tuple[kvtide.Cache, kvtide.Pages]]:
    async with kvtide.open_cache(settings(host_bytes=blocks * SLOT, **changes)) as cache:
        yield cache, cache.attach(Memory(32, seed=1).paged(), namespace="m")


def host(cache: kvtide.Cache) -> kvtide.TierStatistics:
    return cache.statistics().tiers[0]


async def test_no_room_says_what_is_leased() -> None:
    async with house() as (cache, pages):
        await pages.store(prompt(6), range(6), after=None)
        with cache.match(prompt(6)) as hit:
            assert hit.tokens == 6 * TOKENS
            with pytest.raises(kvtide.NoRoom, match="leased: 24576 bytes") as raised:
                await pages.store(prompt(4, 1), range(4), after=None, deadline=0.05)
            assert (raised.value.leased, raised.value.dirty) == (6 * SLOT, 0)
            assert cache.held(prompt(6)).tokens == 6 * TOKENS
        assert (await pages.store(prompt(4, 1), range(4), after=None)).stored == 4


async def test_who_waits_gets_the_room_that_a_lease_gives_back() -> None:
    async with house() as (cache, pages):
        await pages.store(prompt(6), range(6), after=None)
        hit = cache.match(prompt(6))
        waiting = pages.store(prompt(4, 1), range(4), after=None)
        behind = pages.store(prompt(1, 2), [9], after=None)  # it would fit, but keeps its place
        assert host(cache).waiting_for_room == 2
        assert not waiting.done
        assert not behind.done
        hit.close()
        assert (await waiting).stored == 4
        assert (await behind).stored == 1


async def test_what_can_never_fit_is_said_so_at_once() -> None:
    async with house() as (cache, pages):
        with pytest.raises(kvtide.NoRoom, match="can never fit into the host tier: raise host_bytes"):
            await pages.store(prompt(9), range(9), after=None)
        assert (await pages.store(prompt(8), range(8), after=None)).stored == 8
        assert cache.statistics().dropped_blocks == 9


async def test_on_full_drop_counts_what_it_drops() -> None:
    async with house(on_full="drop") as (cache, pages):
        await until(lambda: host(cache).capacity_bytes == 8 * SLOT)
        assert (await pages.store(prompt(8), range(8), after=None)).stored == 8
        dropped = cache.statistics().dropped_blocks
        with cache.match(prompt(8)) as hit:
            assert hit.tokens == 8 * TOKENS
            stored = await pages.store(prompt(3, 1), range(3), after=None)
            assert stored == kvtide.Stored(stored=0, already=0, dropped=3)
            assert cache.statistics().dropped_blocks == dropped + 3
        assert (await pages.store(prompt(3, 1), range(3), after=None)).stored == 3


async def test_a_store_does_not_evict_the_prefix_that_it_continues() -> None:
    """Blocks behind a lost one are unreachable, so that would be work for nothing."""
    async with house() as (cache, pages):
        await pages.store(prompt(6), range(6), after=None)
        await pages.store(prompt(2, 1), [6, 7], after=None)
        assert (await pages.store(prompt(8), range(8), after=None)).stored == 2
        assert cache.held(prompt(8)).tokens == 8 * TOKENS
        assert cache.held(prompt(2, 1)).tokens == 0


async def test_a_store_from_start_on_does_not_evict_what_lies_before() -> None:
    async with house() as (cache, pages):
        await pages.store(prompt(6), range(6), after=None)
        await pages.store(prompt(2, 1), [6, 7], after=None)
        stored = await pages.store(prompt(8), [6, 7], start=6 * TOKENS, after=None)
        assert stored.stored == 2
        assert cache.held(prompt(8)).tokens == 8 * TOKENS


async def test_a_store_that_cannot_fit_beside_its_own_prefix_ends() -> None:
    async with house() as (cache, pages):
        await pages.store(prompt(6), range(6), after=None)
        with pytest.raises(kvtide.NoRoom):
            await pages.store(prompt(10), range(6, 10), start=6 * TOKENS, after=None, deadline=0.5)
        assert cache.held(prompt(10)).tokens == 6 * TOKENS


async def test_tails_go_before_heads() -> None:
    async with house() as (cache, pages):
        await pages.store(prompt(8), range(8), after=None)
        await pages.store(prompt(3, 1), range(3), after=None)
        assert cache.held(prompt(8)).tokens == 5 * TOKENS
        assert host(cache).evicted_blocks == 3


async def test_a_quota_is_a_limit_and_evicts_only_its_own() -> None:
    async with house(blocks=16, quotas={"small": 4 * SLOT + 1}) as (cache, pages):
        small = cache.attach(Memory(16, seed=2).paged(), namespace="small")
        await pages.store(prompt(8), range(8), after=None)
        for number in range(4):
            assert (await small.store(prompt(3, number), range(3), after=None)).stored == 3
        assert cache.held(prompt(8), namespace="m").tokens == 8 * TOKENS
        assert host(cache).blocks <= 8 + 4
        held = [cache.held(prompt(3, number), namespace="small").tokens for number in range(4)]
        assert held[3] == 3 * TOKENS
        assert sum(held) <= 4 * TOKENS
        with pytest.raises(kvtide.NoRoom, match="quota"):
            await small.store(prompt(5, 9), range(5), after=None)


async def test_each_namespace_of_an_id_has_the_quota_to_itself() -> None:
    async with house(blocks=16, quotas={"small": 4 * SLOT}) as (cache, _):
        one = cache.attach(Memory(16).paged(), namespace="small")
        other = cache.attach(Memory(16).paged(), namespace="small", weights="v2")
        await one.store(prompt(4), range(4), after=None)
        await other.store(prompt(4), range(4), after=None)
        assert host(cache).used_bytes == 8 * SLOT
        await other.store(prompt(4, 1), range(4), after=None)
        assert host(cache).used_bytes == 8 * SLOT


async def test_namespaces_of_different_slot_sizes_share_the_arena() -> None:
    async with house(blocks=16) as (cache, pages):
        tensor = torch.zeros(16, 8192, dtype=torch.uint8)
        large = cache.attach(kvtide.PagedKV.from_tensors([tensor]), namespace="large")
        await pages.store(prompt(16), range(16), after=None)
        assert (await large.store(prompt(4), range(4), after=None)).stored == 4
        assert cache.held(prompt(4), namespace="large").tokens == 4 * TOKENS
        left = cache.held(prompt(16), namespace="m").tokens
        assert 0 < left <= 8 * TOKENS
        assert (await pages.store(prompt(4, 5), range(4), after=None)).stored == 4
        assert host(cache).used_bytes <= host(cache).capacity_bytes == 16 * SLOT


async def test_two_stores_of_the_same_blocks_copy_once() -> None:
    from tests.api.houses import opened

    from kvtide.kernels.fake import FakeDevice

    fake = FakeDevice()
    async with opened(fake) as cache:
        stream = fake.stream()
        pages = cache.attach(Memory(16, seed=1).paged(("cuda", 0)), namespace="m")
        fake.hold()
        first = pages.store(prompt(4), range(4), after=stream)
        second = pages.store(prompt(4), range(8, 12), after=stream)
        third = pages.store(prompt(5), range(5), after=stream)
        fake.release()
        assert await first == kvtide.Stored(4, 0, 0)
        assert await second == kvtide.Stored(0, 4, 0)
        assert await third == kvtide.Stored(1, 4, 0)
        assert fake.counts["copy"] == 5 * 2  # planes


async def test_S1_7_copies_beyond_the_limit_wait_their_turn() -> None:
    from tests.api.houses import opened

    from kvtide.kernels.fake import FakeDevice

    fake = FakeDevice()
    async with opened(fake, max_inflight_bytes=2 * 2048) as cache:
        stream = fake.stream()
        pages = cache.attach(Memory(16, seed=1).paged(("cuda", 0)), namespace="m")
        fake.hold()
        stores = [pages.store(prompt(1, number), [number], after=stream) for number in range(6)]
        stats = cache.statistics()
        assert (stats.inflight_bytes, stats.waiting_for_turn) == (2 * 2048, 4)
        assert stats.inflight_transfers == 6
        fake.release()
        assert [(await store).stored for store in stores] == [1] * 6
        large = pages.store(prompt(8, 9), range(8), after=stream)  # more than the limit: alone
        assert (await large).stored == 8
        assert cache.statistics().inflight_bytes == 0
