"""What a match finds: prefixes, names, salts, leases."""

import gc
import sys
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from tests.api.houses import TOKENS, UNTOUCHED, Memory, prompt, settings

import kvtide


@pytest.fixture
async def cache() -> AsyncIterator[kvtide.Cache]:
    async with kvtide.open_cache(settings()) as opened_cache:
        yield opened_cache
        assert opened_cache.statistics().tiers[0].pinned_bytes == 0


@pytest.fixture
def memory() -> Memory:
    return Memory(16, seed=1)


@pytest.fixture
def pages(cache: kvtide.Cache, memory: Memory) -> kvtide.Pages:
    return cache.attach(memory.paged(), namespace="m")


def host(cache: kvtide.Cache) -> kvtide.TierStatistics:
    return cache.statistics().tiers[0]


@pytest.mark.parametrize("tail", range(TOKENS))
@pytest.mark.parametrize("blocks", [1, 2, 5])
async def test_S2_6_only_full_blocks_are_kept(
    cache: kvtide.Cache, pages: kvtide.Pages, blocks: int, tail: int
) -> None:
    tokens = prompt(blocks, tail=tail)
    ids = range(blocks + (tail > 0))  # a page for the tail is allowed, and ignored
    assert await pages.store(tokens, ids, after=None) == kvtide.Stored(blocks, 0, 0)
    assert host(cache).blocks == blocks
    assert cache.held([*tokens, 7]).tokens == blocks * TOKENS


@pytest.mark.parametrize("blocks", [1, 2, 5])
async def test_S2_8_at_least_one_token_is_left_to_compute(
    cache: kvtide.Cache, pages: kvtide.Pages, blocks: int
) -> None:
    tokens = prompt(blocks, tail=0)
    await pages.store(tokens, range(blocks), after=None)
    with cache.match(tokens) as hit:
        assert hit.tokens == (blocks - 1) * TOKENS <= len(tokens) - 1
    with cache.match([*tokens, 9]) as hit:
        assert hit.tokens == blocks * TOKENS
    hashes = [bytes([number]) * 32 for number in range(blocks)]
    await pages.store(None, range(blocks), hashes=hashes, after=None)
    with cache.match(hashes=hashes) as hit:
        assert hit.tokens == (blocks - 1) * TOKENS
    with cache.match(hashes=[*hashes, b"the rest"]) as hit:
        assert hit.tokens == blocks * TOKENS


async def test_S2_2_all_requests_of_a_step_are_stored(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    stores = [pages.store(prompt(2, number), [2 * number, 2 * number + 1], after=None) for number in range(3)]
    assert [(await store).stored for store in stores] == [2, 2, 2]
    assert [cache.held(prompt(2, number)).tokens for number in range(3)] == [2 * TOKENS] * 3


async def test_a_match_is_the_longest_held_prefix(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    await pages.store(prompt(4), range(4), after=None)
    other = [*prompt(2, tail=0), *range(500, 520)]
    with cache.match(other) as hit:
        assert hit.tokens == 2 * TOKENS
        assert hit.by_tier == {"host": 2 * TOKENS}
        assert len(hit.hashes) == 2
    with cache.match([99, *prompt(4)]) as hit:
        assert hit.tokens == 0
        assert hit.by_tier == {}


async def test_blocks_behind_a_gap_are_no_hit(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    await pages.store(prompt(4), range(4)[2:], start=2 * TOKENS, after=None)
    assert cache.held(prompt(4)).tokens == 0
    await pages.store(prompt(2), range(2), after=None)
    assert cache.held(prompt(4)).tokens == 4 * TOKENS


async def test_tokens_may_be_any_sequence_of_integers(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    import numpy

    await pages.store(prompt(2), range(2), after=None)
    others: list[Any] = [tuple(prompt(2)), numpy.array(prompt(2)), torch.tensor(prompt(2)), range(9)]
    assert [cache.held(tokens).tokens for tokens in others] == [2 * TOKENS] * 4
    largest = [2**32 - 1] * 5
    await pages.store(largest, [3], after=None)
    assert cache.held(largest).tokens == TOKENS


async def test_salts_extras_and_the_engines_hashes_do_not_meet(
    cache: kvtide.Cache, pages: kvtide.Pages, memory: Memory
) -> None:
    """The same tokens under each name are blocks of their own."""
    names: list[dict[str, Any]] = [
        {},
        {"salt": b"one"},
        {"salt": b"two"},
        {"extra": b"lora"},
        {"extra": {0: b"image"}},
        {"extra": {1: b"image"}},
        {"salt": b"one", "extra": b"lora"},
    ]
    for number, name in enumerate(names):
        shared = 1 if name.get("extra") == {1: b"image"} else 0  # its first block is the plain one
        assert cache.held(prompt(2), **name).tokens == shared * TOKENS
        stored = await pages.store(prompt(2), [2 * number, 2 * number + 1], after=None, **name)
        assert (stored.stored, stored.already) == (2 - shared, shared)
    before = memory.blocks(range(16))
    target = Memory(2)
    others = cache.attach(target.paged(), namespace="m")
    for number, name in enumerate(names):
        with cache.match(prompt(2), **name) as hit:
            assert hit.tokens == 2 * TOKENS
            await others.load(hit, [0, 1], after=None)
        first = 0 if name.get("extra") == {1: b"image"} else 2 * number
        assert target.blocks([0, 1]) == [before[first], before[2 * number + 1]]
    hashes = [bytes([1]) * 16, bytes([2]) * 16]
    await pages.store(None, [14, 15], hashes=hashes, salt=b"one", after=None)
    assert cache.held(hashes=[*hashes, b"12345678"]).tokens == 0
    assert cache.held(hashes=[*hashes, b"12345678"], salt=b"one").tokens == 2 * TOKENS
    assert cache.held(hashes=[*hashes, b"12345678"], salt="one").tokens == 2 * TOKENS


async def test_namespaces_do_not_meet(cache: kvtide.Cache, pages: kvtide.Pages, memory: Memory) -> None:
    await pages.store(prompt(2), range(2), after=None)
    cache.attach(memory.paged(), namespace="m", weights="v2")
    cache.attach(memory.paged(), namespace="n")
    assert cache.held(prompt(2), namespace="n").tokens == 0
    assert cache.held(prompt(2), namespace=pages.namespace.digest.hex()).tokens == 2 * TOKENS


async def test_slices_load_parts(cache: kvtide.Cache, pages: kvtide.Pages, memory: Memory) -> None:
    before = memory.blocks(range(16))
    await pages.store(prompt(6), range(6), after=None)
    memory.wipe()
    with cache.match(prompt(6)) as hit:
        with hit[2 * TOKENS : 4 * TOKENS] as middle, hit[-TOKENS:] as last, hit[TOKENS:] as more:
            rest = more[TOKENS:]
            assert [part.tokens for part in (middle, last, rest)] == [2 * TOKENS, TOKENS, 4 * TOKENS]
            assert middle.hashes == hit.hashes[2:4]
            await pages.load(middle, [10, 8], after=None)
            await pages.load(last, [12], after=None)
            rest.close()
        with hit[6 * TOKENS :] as nothing, hit[3 * TOKENS : TOKENS] as less:
            assert nothing.tokens == less.tokens == 0
    assert memory.blocks([10, 8, 12]) == [before[2], before[3], before[5]]
    assert memory.block(9) == UNTOUCHED
    gc.collect()


async def test_a_slice_is_a_lease_of_its_own(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    await pages.store(prompt(4), range(4), after=None)
    hit = cache.match(prompt(4))
    part = hit[: 2 * TOKENS]
    hit.close()
    assert host(cache).pinned_bytes == 2 * 4096
    assert (await pages.load(part, [0, 1], after=None)).tokens == 2 * TOKENS
    part.close()
    part.close()
    assert host(cache).pinned_bytes == 0


async def test_held_takes_no_pin_and_counts_as_no_lookup(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    await pages.store(prompt(4), range(4), after=None)
    assert cache.held(prompt(4)) == kvtide.Held(4 * TOKENS, {"host": 4 * TOKENS})
    assert cache.statistics().lookups == 0
    assert host(cache).pinned_bytes == 0


async def test_a_lease_keeps_blocks_from_eviction(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    """32 blocks of room; four are leased."""
    await pages.store(prompt(4), range(4), after=None)
    with cache.match(prompt(4)) as hit:
        for number in range(1, 10):
            await pages.store(prompt(7, number), range(7), after=None)
        assert hit.tokens == cache.held(prompt(4)).tokens == 4 * TOKENS
    for number in range(1, 10):
        await pages.store(prompt(7, 20 + number), range(7), after=None)
    assert cache.held(prompt(4)).tokens == 0


async def test_a_forgotten_lease_warns_and_lets_go(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    import asyncio

    await pages.store(prompt(2), range(2), after=None)
    hit = cache.match(prompt(2))
    assert host(cache).pinned_bytes == 2 * 4096
    with pytest.warns(ResourceWarning, match="8 tokens was never closed"):
        del hit
    await asyncio.sleep(0)
    assert host(cache).pinned_bytes == 0


async def test_a_forgotten_lease_lets_go_also_where_warnings_are_errors(
    cache: kvtide.Cache, pages: kvtide.Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: seen.append(type(what.exc_value)))
    await pages.store(prompt(2), range(2), after=None)
    hit = cache.match(prompt(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del hit
    assert seen == [ResourceWarning]
    await asyncio.sleep(0)
    assert host(cache).pinned_bytes == 0


async def test_an_empty_hit_needs_no_closing(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    hit = cache.match(prompt(2))
    assert hit.tokens == 0
    assert not hit.closed
    assert await pages.load(hit, [], after=None) == kvtide.Loaded(0)
    del hit
    gc.collect()


async def test_S2_5_a_block_that_is_being_stored_is_no_hit() -> None:
    from tests.api.houses import opened

    from kvtide.kernels.fake import FakeDevice

    fake = FakeDevice()
    async with opened(fake) as cache:
        pages = cache.attach(Memory(4, seed=1).paged(("cuda", 0)), namespace="m")
        fake.hold()
        store = pages.store(prompt(2), [0, 1], after=fake.stream())
        assert cache.held(prompt(2)).tokens == 0
        with cache.match(prompt(2)) as hit:
            assert hit.tokens == 0
        fake.release()
        await store
        assert cache.held(prompt(2)).tokens == 2 * TOKENS
