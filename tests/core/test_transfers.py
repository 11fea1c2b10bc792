"""The life that stores and loads share: cancelling, deadlines, failing, closing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.core.held import HeldMemory, at_rest, attach, prompt, small

from kvtide.core.cache import Cache
from kvtide.core.errors import (
    CacheClosed,
    DeadlineExceeded,
    InvalidRequest,
    NoRoom,
    QueueFull,
    TransferFailed,
)
from kvtide.core.settings import Settings
from kvtide.storage.memory import Faults, MemoryTier


@contextlib.asynccontextmanager
async def house(
    settings: Settings | None = None, *, hold: bool = True, lower: MemoryTier | None = None
) -> AsyncIterator[tuple[Cache, HeldMemory]]:
    memory = HeldMemory(settings or small(), hold=hold)
    cache = Cache(settings or small(), memory, lower)
    await cache.open()
    try:
        yield cache, memory
    finally:
        memory.hold = False
        for copy in memory.held:
            with contextlib.suppress(AssertionError):
                copy.finish()
        await cache.close(1.0)


async def cancelled(wait: Awaitable[Any]) -> None:
    """Begin to wait, then cancel the waiting."""
    task = asyncio.ensure_future(wait)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def held_blocks(cache: Cache, memory: HeldMemory, blocks: int, seed: int = 0) -> list[int]:
    """Store a prompt and wait for it."""
    pages = attach(cache)
    tokens = prompt(blocks, seed)
    store = pages.store(tokens, list(range(blocks)), after=None)
    if memory.hold:
        memory.held.pop().finish()
    assert (await store).stored == blocks
    return tokens


WAITS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "result": lambda transfer: transfer,
    "settled": lambda transfer: transfer.settled,
    "wait_on": lambda transfer: transfer.wait_on(None, layer=1),
}


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@pytest.mark.parametrize("wait", WAITS)
async def test_cancelling_a_waiter_leaves_nothing_behind_a_store(wait: str) -> None:
    async with house() as (cache, memory):
        store = attach(cache).store(prompt(3), [0, 1, 2], after=None)
        await cancelled(_await(WAITS[wait](store)))
        assert not store.settled.over, "cancelling ends the waiting, never the copy"
        memory.held.pop().finish()
        assert await store.settled
        assert (await store).stored == 3
        at_rest(cache, memory)
        assert cache.held(prompt(3)).tokens == 12


@pytest.mark.parametrize("wait", WAITS)
async def test_cancelling_a_waiter_leaves_nothing_behind_a_load(wait: str) -> None:
    async with house() as (cache, memory):
        tokens = await held_blocks(cache, memory, 3)
        with cache.match(tokens) as hit:
            load = attach(cache).load(hit, [5, 6, 7], after=None)
        assert cache.host.pinned_bytes, "the load keeps its own pins"
        await cancelled(_await(WAITS[wait](load)))
        assert not load.settled.over
        memory.held.pop().finish()
        assert (await load).tokens == 12
        await load.settled
        at_rest(cache, memory)


async def test_cancelling_a_waiter_that_waits_for_room() -> None:
    async with house(small(2)) as (cache, memory):
        tokens = await held_blocks(cache, memory, 2)
        hit = cache.match([*tokens, 1, 2, 3, 4])
        store = attach(cache).store(prompt(2, 1), [0, 1], after=None)
        assert cache.statistics().tiers[0].waiting_for_room == 1
        await cancelled(_await(store))
        hit.close()  # the room is given to the transfer all the same
        memory.held.pop().finish()
        assert (await store).stored == 2
        at_rest(cache, memory)


async def test_cancelling_detach_and_close() -> None:
    async with house() as (cache, memory):
        pages = attach(cache)
        store = pages.store(prompt(1), [0], after=None)
        await cancelled(pages.detach())
        closing = asyncio.ensure_future(cache.close(5.0))
        await cancelled(_await(asyncio.shield(closing)))
        memory.held.pop().finish()
        assert (await closing).stuck == ()
        assert (await store).stored == 1


async def test_wait_on_before_during_and_after() -> None:
    async with house() as (cache, memory):
        pages = attach(cache)
        store = pages.store(prompt(1), [0], after=None)
        waiting = asyncio.ensure_future(store.wait_on(None, layer=0))
        await asyncio.sleep(0)
        assert not waiting.done()
        with pytest.raises(InvalidRequest, match="no layer 2"):
            await store.wait_on(None, layer=2)
        memory.held.pop().finish()
        await waiting
        await store
        await store.wait_on(None, layer=0)
        failing = pages.store(prompt(1, 2), [0], after=None)
        memory.held.pop().finish(RuntimeError("the copy engine is on fire"))
        with pytest.raises(TransferFailed, match="on fire"):
            await failing.wait_on(None, layer=0)


# -- deadlines -------------------------------------------------------------------------------


async def test_a_deadline_while_waiting_for_room_says_what_holds_it() -> None:
    async with house(small(2)) as (cache, memory):
        tokens = await held_blocks(cache, memory, 2)
        with cache.match([*tokens, 1, 2, 3, 4]):
            store = attach(cache).store(prompt(1, 1), [0], after=None, deadline=0.05)
            with pytest.raises(NoRoom) as caught:
                await store
        assert caught.value.leased == 2 * 4096
        assert store.settled.over
        at_rest(cache, memory)
        assert cache.dropped_blocks == 1


async def test_a_deadline_while_waiting_for_its_turn() -> None:
    async with house(small(8, max_inflight_bytes=4096)) as (cache, memory):
        pages = attach(cache)
        first = pages.store(prompt(1), [0], after=None)
        second = pages.store(prompt(1, 1), [1], after=None, deadline=0.05)
        assert cache.statistics().waiting_for_turn == 1
        with pytest.raises(DeadlineExceeded, match="settled"):
            await second
        assert second.settled.over, "it never began to copy"
        memory.held.pop().finish()
        await first
        at_rest(cache, memory)
        assert cache.held(prompt(1, 1)).tokens == 0


async def test_a_deadline_while_copying_settles_only_when_the_copy_ends() -> None:
    async with house() as (cache, memory):
        store = attach(cache).store(prompt(1), [0], after=None, deadline=0.05)
        with pytest.raises(DeadlineExceeded):
            await store
        assert not store.settled.over
        assert cache.host.pinned_bytes
        memory.held.pop().finish()
        assert await store.settled
        at_rest(cache, memory)


async def test_a_deadline_while_promoting_never_touches_the_pages() -> None:
    faults = Faults()
    lower = MemoryTier(1 << 20, extent_bytes=4096, faults=faults)
    async with house(small(2), lower=lower, hold=False) as (cache, memory):
        tokens = await held_blocks(cache, memory, 2)
        await spilled(cache)
        await held_blocks(cache, memory, 2, seed=1)  # evicts the first from host memory
        await spilled(cache)
        assert cache.held(tokens).by_tier == {"memory": 8}
        faults.gate = asyncio.Event()
        copies = memory.copies
        with cache.match(tokens) as hit:
            load = attach(cache).load(hit, [0, 1], after=None, deadline=0.05)
        with pytest.raises(DeadlineExceeded):
            await load
        assert not load.settled.over, "the promotion still writes into host memory"
        faults.gate.set()
        await load.settled
        assert memory.copies == copies
        at_rest(cache, memory)
        assert cache.held(tokens).by_tier == {"host": 8}, "what was promoted is of use to others"


async def spilled(cache: Cache) -> None:
    """Wait until nothing is dirty."""
    async with asyncio.timeout(5):
        # A spill announces its end to nobody; a test asks.
        while cache.statistics().tiers[0].dirty_bytes or cache.host.pinned_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# -- failing ---------------------------------------------------------------------------------


async def test_S1_1_failing_transfers_leave_everything_as_it_was() -> None:
    async with house(hold=False) as (cache, memory):
        pages = attach(cache)
        memory.error = RuntimeError("injected")
        for _ in range(100):
            stores = [pages.store(prompt(2, seed), [0, 1], after=None) for seed in range(4)]
            for store in stores:
                with pytest.raises(TransferFailed):
                    await store
                await store.settled
        at_rest(cache, memory)
        assert cache.statistics().tiers[0].used_bytes == 0
        assert cache.statistics().errors == {"TransferFailed": 400}
        memory.error = None
        assert (await pages.store(prompt(8), list(range(8)), after=None)).stored == 8


async def test_S4_5_a_refused_submission_wakes_whoever_waits() -> None:
    async with house() as (cache, memory):
        memory.refuse = True
        store = attach(cache).store(prompt(1), [0], after=None)
        with pytest.raises(QueueFull):
            await store
        await store.settled
        at_rest(cache, memory)


async def test_the_queue_for_room_is_bounded() -> None:
    async with house(small(1, max_queued=1)) as (cache, memory):
        tokens = await held_blocks(cache, memory, 1)
        pages = attach(cache)
        with cache.match([*tokens, 1, 2, 3, 4]):
            waiting = pages.store(prompt(1, 1), [0], after=None)
            with pytest.raises(QueueFull):
                await pages.store(prompt(1, 2), [0], after=None)
        memory.held.pop().finish()
        assert (await waiting).stored == 1
        at_rest(cache, memory)


# -- sharing ---------------------------------------------------------------------------------


async def test_two_stores_of_one_block_share_one_copy() -> None:
    async with house() as (cache, memory):
        pages = attach(cache)
        first = pages.store(prompt(2), [0, 1], after=None)
        second = pages.store(prompt(2), [2, 3], after=None)
        assert memory.copies == 1
        assert not second.done
        memory.held.pop().finish()
        assert (await first).stored == 2
        assert (await second).already == 2
        at_rest(cache, memory)


async def test_a_store_that_shared_a_failed_copy_says_what_was_lost() -> None:
    async with house() as (cache, memory):
        pages = attach(cache)
        first = pages.store(prompt(2), [0, 1], after=None)
        second = pages.store(prompt(2), [2, 3], after=None)
        memory.held.pop().finish(RuntimeError("injected"))
        with pytest.raises(TransferFailed):
            await first
        assert (await second).dropped == 2
        at_rest(cache, memory)


async def test_ranks_end_in_any_order_and_a_joined_store_waits_for_its_own_rank() -> None:
    async with house() as (cache, memory):
        ranks = [attach(cache, shard=rank, of=2) for rank in range(2)]
        stores = [pages.store(prompt(1), [0], after=None) for pages in ranks]
        joined = ranks[1].store(prompt(1), [3], after=None)
        assert memory.copies == 2
        memory.held[0].finish()
        await stores[0]
        await asyncio.sleep(0)
        assert not joined.done
        assert cache.held(prompt(1)).tokens == 0, "all ranks or none (R7)"
        memory.held[1].finish()
        assert (await joined).already == 1
        assert cache.held(prompt(1)).tokens == 4
        memory.held.clear()
        at_rest(cache, memory)


async def test_a_failed_rank_leaves_a_partial_block_that_can_be_completed_or_evicted() -> None:
    async with house(small(4)) as (cache, memory):
        ranks = [attach(cache, shard=rank, of=2) for rank in range(2)]
        good = ranks[0].store(prompt(2), [0, 1], after=None)
        bad = ranks[1].store(prompt(2), [0, 1], after=None)
        memory.held[0].finish()
        memory.held[1].finish(RuntimeError("injected"))
        memory.held.clear()
        await good
        with pytest.raises(TransferFailed):
            await bad
        assert cache.statistics().tiers[0].filling == 2
        again = ranks[1].store(prompt(2), [0, 1], after=None)
        memory.held.pop().finish()
        assert (await again).stored == 2
        assert cache.held(prompt(2)).tokens == 8
        at_rest(cache, memory)


# -- too little room -------------------------------------------------------------------------


async def test_two_promotions_that_need_more_room_than_there_is_both_end() -> None:
    lower = MemoryTier(1 << 20, extent_bytes=4096)
    async with house(small(4), lower=lower, hold=False) as (cache, memory):
        prompts = [await held_blocks(cache, memory, 3, seed) for seed in range(2)]
        await spilled(cache)
        await held_blocks(cache, memory, 4, seed=9)
        await spilled(cache)
        assert [cache.held(tokens).by_tier for tokens in prompts] == [{"memory": 12}] * 2
        pages = attach(cache)
        hits = [cache.match(tokens) for tokens in prompts]
        loads = [pages.load(hit, [0, 1, 2], after=None, deadline=2.0) for hit in hits]
        results = [await load for load in loads]
        for hit in hits:
            hit.close()
        assert [result.tokens for result in results] == [12, 12]
        await spilled(cache)
        at_rest(cache, memory)


async def test_promotions_that_hold_each_others_room_end_at_their_deadline() -> None:
    lower = MemoryTier(1 << 20, extent_bytes=4096)
    async with house(small(4), lower=lower, hold=False) as (cache, memory):
        tokens = await held_blocks(cache, memory, 3)
        await spilled(cache)
        other = await held_blocks(cache, memory, 4, seed=9)
        await spilled(cache)
        with cache.match([*other, 1, 2, 3, 4]) as pinned, cache.match(tokens) as hit:
            assert pinned.tokens == 16
            loaded = await attach(cache).load(hit, [0, 1, 2], after=None, deadline=0.05)
        assert loaded.tokens == 0
        assert sum(loaded.shortfall.values()) == 12
        assert "no_room" in loaded.shortfall
        at_rest(cache, memory)


async def test_a_hit_larger_than_host_memory_loads_the_part_that_fits() -> None:
    lower = MemoryTier(1 << 20, extent_bytes=4096)
    async with house(small(2), lower=lower, hold=False) as (cache, memory):
        pages = attach(cache)
        tokens = prompt(3)
        for at in range(3):
            await pages.store(tokens[: (at + 1) * 4], [at], start=at * 4, after=None)
            await spilled(cache)
        assert cache.held(tokens).tokens == 12
        cold = await held_blocks(cache, memory, 2, seed=5)
        assert cold
        await spilled(cache)
        with cache.match(tokens) as hit:
            assert hit.by_tier == {"memory": 12}
            loaded = await pages.load(hit, [0, 1, 2], after=None)
        assert loaded.tokens == 8
        assert loaded.shortfall == {"no_room": 4}
        at_rest(cache, memory)


# -- closing ---------------------------------------------------------------------------------


async def test_close_ends_what_waits_and_awaits_what_copies() -> None:
    async with house(small(2, max_inflight_bytes=4096)) as (cache, memory):
        pages = attach(cache)
        copying = pages.store(prompt(1), [0], after=None)
        turn = pages.store(prompt(1, 1), [1], after=None)
        room = pages.store(prompt(2, 2), [2, 3], after=None)
        closing = asyncio.ensure_future(cache.close(5.0))
        await asyncio.sleep(0)
        with pytest.raises(CacheClosed):
            await turn
        with pytest.raises(CacheClosed):
            await room
        with pytest.raises(CacheClosed):
            pages.store(prompt(1, 3), [0], after=None)
        with pytest.raises(CacheClosed):
            cache.match(prompt(1))
        memory.held.pop().finish()
        assert (await closing).stuck == ()
        assert (await copying).stored == 1
        at_rest(cache, memory)


async def test_close_returns_in_time_and_names_what_is_stuck() -> None:
    async with house() as (cache, memory):
        store = attach(cache).store(prompt(2), [0, 1], after=None)
        began = time.monotonic()
        closed = await cache.close(0.2)
        assert time.monotonic() - began < 2
        assert closed.stuck == ("store of 8192 bytes",)
        assert not store.settled.over
        assert (await cache.close()) == closed
        memory.held.pop().finish()
        assert await store.settled


async def test_close_names_a_tier_that_is_stuck() -> None:
    faults = Faults(gate=asyncio.Event())
    lower = MemoryTier(1 << 20, extent_bytes=4096, faults=faults)
    async with house(small(2), lower=lower, hold=False) as (cache, memory):
        await held_blocks(cache, memory, 1)
        closed = await cache.close(0.2)
        assert closed.stuck == ("kvtide spill",)
        at_rest(cache, memory)


@pytest.mark.parametrize("kind", ["store", "load"])
async def test_S3_3_the_ledger_is_empty_only_when_results_were_applied(kind: str) -> None:
    async with house() as (cache, memory):
        tokens = await held_blocks(cache, memory, 2)
        pages = attach(cache)
        if kind == "store":
            transfer: Any = pages.store(prompt(1, 7), [0], after=None)
        else:
            with cache.match(tokens) as hit:
                transfer = pages.load(hit, [0, 1], after=None)
        assert cache.statistics().inflight_transfers == 1
        memory.held.pop().finish()
        assert cache.statistics().inflight_transfers == 0
        assert transfer.done
