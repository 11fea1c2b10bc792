"""The whole path on a real GPU, through the public API: bytes, order, deadlines, devices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import kvtide

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.blocks_loop("the first use of a GPU is the test's own")]

MIB = 1 << 20
DEVICES = range(torch.cuda.device_count() if torch.cuda.is_available() else 1)


def settings(**changes: Any) -> kvtide.Settings:
    return kvtide.Settings(**{"host_bytes": 512 * MIB, "extent_bytes": 16 * MIB, "pin": True} | changes)


def run(test: Callable[[kvtide.Cache], Coroutine[Any, Any, None]], **changes: Any) -> None:
    async def inside() -> None:
        async with kvtide.open_cache(settings(**changes)) as cache:
            await test(cache)

    asyncio.run(inside())


def noise(*shape: int, device: str) -> Any:
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)


BLOCKS = 96


def geometries(device: str) -> dict[str, tuple[list[Any], int]]:
    """Name: tensors (or tuples a layer), the dimension that counts blocks."""
    padded = noise(BLOCKS, 16 * 8 * 64 + 40, device=device)[:, : 16 * 8 * 64]
    heads = noise(1, 4, BLOCKS * 16, 32, device=device).unflatten(2, (BLOCKS, 16))
    return {
        "k_and_v_apart": ([noise(2, BLOCKS, 16, 8, 64, device=device) for _ in range(3)], 1),
        "k_and_v_tuples": (
            [tuple(noise(BLOCKS, 16, 8, 64, device=device) for _ in range(2)) for _ in range(3)],
            0,
        ),
        "packed_in_a_cell": ([noise(BLOCKS, 16, 8, 128, device=device) for _ in range(3)], 0),
        "blocks_outermost": ([noise(BLOCKS, 2, 16, 8, 64, device=device) for _ in range(3)], 0),
        "one_plane_a_layer": ([noise(BLOCKS, 16, 576, device=device) for _ in range(3)], 0),
        "different_sizes": ([noise(BLOCKS, 16, n, device=device) for n in (64, 33, 576, 1)], 0),
        "padded": ([padded, noise(BLOCKS, 16, 3, device=device)], 0),
        "transformers": ([heads, noise(1, 2, BLOCKS, 16, 32, device=device)], 2),
    }


def flat(tensors: list[Any]) -> list[Any]:
    return [t for entry in tensors for t in (entry if isinstance(entry, tuple) else (entry,))]


@pytest.mark.parametrize("index", DEVICES)
@pytest.mark.parametrize("name", list(geometries("cpu")))
def test_bytes_come_back_to_other_pages_and_no_others_change(name: str, index: int) -> None:
    async def test(cache: kvtide.Cache) -> None:
        tensors, block_dim = geometries(f"cuda:{index}")[name]
        pages = cache.attach(kvtide.PagedKV.from_tensors(tensors, block_dim=block_dim), namespace=name)
        stream = torch.cuda.current_stream(index)
        for count in (1, 7, 40):
            tokens = [random.randrange(2**32) for _ in range(count * 16 + 1)]
            source = random.sample(range(BLOCKS), count)
            target = random.sample(range(BLOCKS), count)
            at = torch.tensor(source, device=f"cuda:{index}")
            to = torch.tensor(target, device=f"cuda:{index}")
            expected = [t.index_select(block_dim, at) for t in flat(tensors)]
            stored = await pages.store(tokens, source, after=stream)
            assert stored.stored == count
            for t in flat(tensors):
                t.copy_(noise(*t.shape, device=f"cuda:{index}"))
            before = [t.clone() for t in flat(tensors)]
            with cache.match(tokens) as hit:
                assert hit.tokens == count * 16
                loaded = await pages.load(hit, target, after=stream)
            assert loaded.tokens == count * 16
            for t, old, want in zip(flat(tensors), before, expected, strict=True):
                assert torch.equal(t.index_select(block_dim, to), want)
                rest = torch.tensor([b for b in range(BLOCKS) if b not in target], device=t.device)
                assert torch.equal(t.index_select(block_dim, rest), old.index_select(block_dim, rest))

    run(test)


def one_plane(device: str = "cuda:0", blocks: int = 64) -> Any:
    return torch.zeros(blocks, 16, 512, dtype=torch.int32, device=device)


def test_S1_4_a_store_sees_the_final_bytes() -> None:
    async def test(cache: kvtide.Cache) -> None:
        kv = one_plane()
        pages = cache.attach(kvtide.PagedKV.from_tensors([kv]), namespace="m")
        stream = torch.cuda.Stream()
        for turn in range(1, 1001):
            kv.fill_(-turn)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)
                kv[3].fill_(turn)
            tokens = [turn] * 16 + [0]
            await pages.store(tokens, [3], after=stream)
            with cache.match(tokens) as hit:
                await pages.load(hit, [9], after=stream)
            assert bool((kv[9] == turn).all()), turn

    run(test)


def test_S1_4_a_load_is_not_overtaken_by_what_was_enqueued_before() -> None:
    async def test(cache: kvtide.Cache) -> None:
        kv = one_plane()
        pages = cache.attach(kvtide.PagedKV.from_tensors([kv]), namespace="m")
        kv[0].fill_(77)
        tokens = [1] * 16 + [0]
        await pages.store(tokens, [0], after=torch.cuda.current_stream())
        stream = torch.cuda.Stream()
        copy = torch.zeros_like(kv[5])
        with cache.match(tokens) as hit:
            for turn in range(1000):
                kv[5].fill_(turn)
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(100_000)
                    copy.copy_(kv[5])  # a pending read ...
                    kv[5].fill_(-1)  # ... and a pending write
                await pages.load(hit, [5], after=stream)
                assert bool((copy == turn).all()), "the load overtook a read"
                assert bool((kv[5] == 77).all()), "a write overtook the load"

    run(test)


def test_wait_on_before_submission_during_the_queue_and_after_the_end() -> None:
    async def test(cache: kvtide.Cache) -> None:
        kv = [one_plane() for _ in range(4)]
        pages = cache.attach(kvtide.PagedKV.from_tensors(kv), namespace="m")
        for layer, plane in enumerate(kv):
            plane[0].fill_(layer + 1)
        tokens = [1] * 16 + [0]
        await pages.store(tokens, [0], after=torch.cuda.current_stream())
        engine, consumer = torch.cuda.Stream(), torch.cuda.Stream()
        seen = [torch.zeros_like(kv[0][0]) for _ in kv]
        with cache.match(tokens) as hit:
            for phase in ("before", "during", "after"):
                for plane in kv:
                    plane[7].zero_()
                torch.cuda.synchronize()
                with torch.cuda.stream(engine):
                    torch.cuda._sleep(20_000_000)
                load = pages.load(hit, [7], after=engine)
                if phase == "during":
                    await asyncio.sleep(0.002)
                if phase == "after":
                    await load
                for layer, plane in enumerate(kv):
                    await load.wait_on(consumer, layer=layer)
                    with torch.cuda.stream(consumer):
                        seen[layer].copy_(plane[7])
                consumer.synchronize()
                for layer, copy in enumerate(seen):
                    assert bool((copy == layer + 1).all()), (phase, layer)
                await load

    run(test)


def test_block_ids_are_reused_only_after_settled() -> None:
    async def test(cache: kvtide.Cache) -> None:
        kv = one_plane()
        pages = cache.attach(kvtide.PagedKV.from_tensors([kv]), namespace="m")
        kv[0].fill_(5)
        tokens = [1] * 16 + [0]
        await pages.store(tokens, [0], after=torch.cuda.current_stream())
        torch.cuda.synchronize()
        stalled = torch.cuda.Stream()
        with torch.cuda.stream(stalled):
            torch.cuda._sleep(1_000_000_000)
        with cache.match(tokens) as hit:
            load = pages.load(hit, [8], after=stalled, deadline=0.05)
        with pytest.raises(kvtide.DeadlineExceeded):
            await load
        assert not load.settled.over
        assert cache.statistics().tiers[0].pinned_bytes, "its host memory is not reusable either"
        assert await load.settled
        with torch.cuda.stream(torch.cuda.Stream()):
            kv[8].fill_(9)
        torch.cuda.synchronize()
        assert bool((kv[8] == 9).all()), "the late copy fell on reused pages"
        assert not cache.statistics().tiers[0].pinned_bytes

    run(test)


def test_R21_the_loop_is_free_while_many_loads_wait_behind_a_stalled_stream() -> None:
    async def test(cache: kvtide.Cache) -> None:
        kv = one_plane(blocks=4096)
        pages = cache.attach(kvtide.PagedKV.from_tensors([kv]), namespace="m")
        tokens = [1] * 16 + [0]
        await pages.store(tokens, [0], after=torch.cuda.current_stream())
        stalled = torch.cuda.Stream()
        with torch.cuda.stream(stalled):
            torch.cuda._sleep(1_000_000_000)
        loop = asyncio.get_running_loop()
        lag = 0.0
        with cache.match(tokens) as hit:
            loads = []
            for page in range(1, 2001):
                began = loop.time()
                loads.append(pages.load(hit, [page], after=stalled))
                await asyncio.sleep(0)
                lag = max(lag, loop.time() - began)
            for load in loads:
                assert (await load).tokens == 16
        print(f"largest lag of the loop over 2,000 loads: {lag * 1e3:.1f} ms")
        assert lag < 0.1

    run(test)


def test_pages_on_a_gpu_need_pinned_memory_and_large_enough_extents() -> None:
    async def unpinned() -> None:
        async with kvtide.open_cache(settings(pin=False)) as cache:
            with pytest.raises(kvtide.DeviceUnavailable, match="pin=True"):
                cache.attach(kvtide.PagedKV.from_tensors([one_plane()]), namespace="m")

    asyncio.run(unpinned())

    async def small(cache: kvtide.Cache) -> None:
        with pytest.raises(kvtide.GeometryMismatch, match="extent_bytes"):
            cache.attach(kvtide.PagedKV.from_tensors([one_plane()]), namespace="m")

    run(small, extent_bytes=16384, host_bytes=65536)


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs")
def test_S4_1_ranks_on_two_gpus_make_a_block_together() -> None:
    async def test(cache: kvtide.Cache) -> None:
        kv = [one_plane(f"cuda:{index}") for index in (0, 1)]
        ranks = [
            cache.attach(kvtide.PagedKV.from_tensors([plane]), namespace="m", shard=rank, of=2)
            for rank, plane in enumerate(kv)
        ]
        tokens = [3] * 16 + [0]
        for rank, plane in enumerate(kv):
            plane[0].fill_(rank + 1)
        await ranks[0].store(tokens, [0], after=torch.cuda.current_stream(0))
        assert cache.held(tokens).tokens == 0
        await ranks[1].store(tokens, [0], after=torch.cuda.current_stream(1))
        with cache.match(tokens) as hit:
            for rank, pages in enumerate(ranks):
                await pages.load(hit, [4], after=torch.cuda.current_stream(rank))
        assert torch.cuda.current_device() == 0
        for rank, plane in enumerate(kv):
            assert bool((plane[4] == rank + 1).all())

    run(test)


def test_completed_takes_streams_and_events() -> None:
    async def inside() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
        event = stream.record_event()
        await kvtide.completed(stream)
        await kvtide.completed(event)
        assert stream.query()

    asyncio.run(inside())
