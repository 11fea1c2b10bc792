"""Bytes that go pages -> host -> other pages arrive as they were, in every layout."""

import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from tests.api.houses import Memory, ScatteredDevice, opened, prompt
from tests.storage.geometries import BLOCKS, LAYOUTS, TOKENS, Layout

import kvtide
from kvtide.core.cache import Cache
from kvtide.kernels.fake import FakeDevice


@contextlib.asynccontextmanager
async def on(kind: str) -> AsyncIterator[tuple[Cache, tuple[str, int], object]]:
    """A cache, the device that its pages are on, and that device's stream."""
    room = {"host_bytes": 1 << 19, "extent_bytes": 1 << 15}
    if kind == "cpu":
        async with kvtide.open_cache(kvtide.Settings(block_tokens=TOKENS, pin=False, **room)) as cache:
            yield cache, ("cpu", 0), None
        return
    fake = FakeDevice(strict=True) if kind == "shifted" else ScatteredDevice()
    async with opened(fake, **room) as cache:
        yield cache, ("cuda", 0), fake.stream()


@pytest.mark.parametrize("kind", ["cpu", "shifted", "scattered"])
@pytest.mark.parametrize("make", LAYOUTS)
async def test_S2_4_blocks_go_to_host_and_to_other_pages(make: Callable[[], Layout], kind: str) -> None:
    source, target, expected = make(), make(), make()
    source.fill(1)
    target.fill(2)
    expected.fill(2)
    there = random.Random(3).sample(range(BLOCKS), 5)
    here = random.Random(4).sample(range(BLOCKS), 3)
    tokens = list(range(5 * TOKENS + 1))
    async with on(kind) as (cache, device, stream):
        pages = cache.attach(source.paged(device), namespace="model")
        before = source.dump()
        # In two parts, the second first: a chain needs no order.
        await pages.store(tokens, there[2:], start=2 * TOKENS, after=stream)
        with cache.match(tokens) as hit:
            assert hit.tokens == 0
        await pages.store(tokens[: 3 * TOKENS], there[:3], after=stream)
        assert source.dump() == before
        source.fill(5)

        others = cache.attach(target.paged(device), namespace="model")
        with cache.match(tokens) as hit, hit[TOKENS : 4 * TOKENS] as part:
            assert hit.tokens == 5 * TOKENS
            loaded = await others.load(part, here, after=stream)
        assert loaded == kvtide.Loaded(3 * TOKENS)

        original = make()
        original.fill(1)
        for page, block in zip(here, there[1:4], strict=True):
            expected.put(page, original, block)
            assert target.image(page) == original.image(block)
        assert target.dump() == expected.dump()  # all else, padding included, is as it was


@pytest.mark.parametrize("fake", [FakeDevice, ScatteredDevice])
async def test_S0_3_the_device_gets_the_address_that_registration_returned(fake: type[FakeDevice]) -> None:
    device = fake(strict=True) if fake is FakeDevice else fake()
    memory, other = Memory(12, seed=1), Memory(12)
    async with opened(device) as cache:
        stream = device.stream()
        pages = cache.attach(memory.paged(("cuda", 0)), namespace="m")
        others = cache.attach(other.paged(("cuda", 0)), namespace="m")
        await pages.store(prompt(12), range(12), after=stream)  # six extents
        with cache.match(prompt(12)) as hit:
            await others.load(hit, range(12), after=stream)
    assert other.blocks(range(12)) == memory.blocks(range(12))
    assert not device.ranges


async def test_pages_of_an_image_larger_than_an_extent() -> None:
    tensor = torch.randint(0, 256, (4, 20_000), dtype=torch.uint8)
    other = torch.zeros_like(tensor)
    async with kvtide.open_cache(
        kvtide.Settings(host_bytes=1 << 17, extent_bytes=1 << 13, block_tokens=4, pin=False)
    ) as cache:
        pages = cache.attach(kvtide.PagedKV.from_tensors([tensor]), namespace="m")
        await pages.store(prompt(4), [3, 1, 0, 2], after=None)
        others = cache.attach(kvtide.PagedKV.from_tensors([other]), namespace="m")
        with cache.match(prompt(4)) as hit:
            await others.load(hit, [0, 1, 2, 3], after=None)
    assert torch.equal(other, tensor[[3, 1, 0, 2]])


async def test_a_device_cannot_copy_an_image_that_spans_extents() -> None:
    fake = FakeDevice()
    memory = torch.zeros(4, 20_000, dtype=torch.uint8)
    made = kvtide.PagedKV.from_tensors([memory])
    paged = kvtide.PagedKV(made.planes_at, blocks=4, dtype="uint8", device=("cuda", 0))
    async with opened(fake) as cache:
        with pytest.raises(kvtide.GeometryMismatch, match="extent_bytes"):
            cache.attach(paged, namespace="m")


async def test_S1_6_pages_of_another_block_size_are_refused_at_attach() -> None:
    tensor = torch.zeros(8, 32, 16)
    async with kvtide.open_cache(
        kvtide.Settings(host_bytes=1 << 17, extent_bytes=1 << 13, block_tokens=16, pin=False)
    ) as cache:
        with pytest.raises(kvtide.GeometryMismatch, match="32 tokens a block, the cache 16"):
            cache.attach(kvtide.PagedKV.from_tensors([tensor], block_tokens=32), namespace="m")
        with pytest.raises(kvtide.GeometryMismatch, match="cannot hold 16 equal tokens"):
            cache.attach(kvtide.PagedKV.from_tensors([torch.zeros(8, 7, 3)]), namespace="m")
        cache.attach(kvtide.PagedKV.from_tensors([torch.zeros(8, 16, 3)], block_tokens=16), namespace="m")
