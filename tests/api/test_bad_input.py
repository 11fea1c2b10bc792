"""Each thing that makes no sense is a typed error that changes nothing."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from tests.api.houses import TOKENS, Memory, opened, prompt, settings

import kvtide
from kvtide.kernels.fake import FakeDevice


@pytest.fixture
async def cache() -> AsyncIterator[kvtide.Cache]:
    async with kvtide.open_cache(settings()) as opened_cache:
        yield opened_cache
        stats = opened_cache.statistics()
        assert stats.inflight_transfers == 0
        assert stats.tiers[0].pinned_bytes == stats.tiers[0].filling == 0


@pytest.fixture
def pages(cache: kvtide.Cache) -> kvtide.Pages:
    return cache.attach(Memory(16, seed=1).paged(), namespace="m")


BAD_IDS: dict[str, Any] = {
    "beyond the last": [0, 16],
    "negative": [-1, 0],
    "far beyond": [0, 2**40],
    "doubled": [3, 3],
    "bool": [0, True],
    "float": [0, 1.0],
    "float tensor": torch.tensor([0.0, 1.0]),
    "two dimensions": torch.tensor([[0], [1]]),
    "text": "01",
    "none": [0, None],
    "too few": [0],
    "too many": [0, 1, 2, 3],
    "no sequence": 5,
}


@pytest.mark.parametrize("what", BAD_IDS)
async def test_block_ids_of_a_store(pages: kvtide.Pages, what: str) -> None:
    with pytest.raises(kvtide.InvalidRequest):
        pages.store(prompt(2), BAD_IDS[what], after=None)


@pytest.mark.parametrize("what", BAD_IDS)
async def test_block_ids_of_a_load(cache: kvtide.Cache, pages: kvtide.Pages, what: str) -> None:
    await pages.store(prompt(2), [0, 1], after=None)
    with cache.match(prompt(2)) as hit, pytest.raises(kvtide.InvalidRequest):
        pages.load(hit, BAD_IDS[what], after=None)


async def test_block_ids_may_be_a_tensor(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    await pages.store(prompt(2), torch.tensor([4, 2]), after=None)  # type: ignore[arg-type]
    with cache.match(prompt(2)) as hit:
        loaded = await pages.load(hit, torch.tensor([5, 6], dtype=torch.int32), after=None)  # type: ignore[arg-type]
    assert loaded.tokens == 2 * TOKENS


BAD_TOKENS: dict[str, Any] = {
    "empty": [],
    "empty tensor": torch.tensor([], dtype=torch.int64),
    "negative": [1, 2, -3, 4, 5],
    "too large": [1, 2, 2**32, 4, 5],
    "float": [1.0, 2.0, 3.0, 4.0, 5.0],
    "text": "hello world",
    "bytes": b"hello world!",
    "two dimensions": torch.ones(2, 8, dtype=torch.int64),
    "float tensor": torch.ones(8),
    "none": [None] * 8,
    "one number": 5,
}


@pytest.mark.parametrize("what", BAD_TOKENS)
@pytest.mark.parametrize("call", ["match", "held", "store"])
async def test_tokens(cache: kvtide.Cache, pages: kvtide.Pages, what: str, call: str) -> None:
    calls: dict[str, Callable[[Any], object]] = {
        "match": cache.match,
        "held": cache.held,
        "store": lambda tokens: pages.store(tokens, [0], after=None),
    }
    with pytest.raises(kvtide.InvalidRequest):
        calls[call](BAD_TOKENS[what])


BAD_HASHES: dict[str, Any] = {
    "too short": [b"1234567"],
    "too long": [b"1" * 65],
    "text": ["12345678"],
    "twice": [b"12345678", b"87654321", b"12345678"],
    "numbers": [5],
    "one": b"12345678",
}


@pytest.mark.parametrize("what", BAD_HASHES)
async def test_hashes(cache: kvtide.Cache, pages: kvtide.Pages, what: str) -> None:
    with pytest.raises(kvtide.InvalidRequest):
        cache.match(hashes=BAD_HASHES[what])
    with pytest.raises(kvtide.InvalidRequest):
        pages.store(None, [0], hashes=BAD_HASHES[what], after=None)


async def test_tokens_or_hashes(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    for both in ({}, {"tokens": prompt(1), "hashes": [b"12345678"]}):
        with pytest.raises(kvtide.InvalidRequest, match="either tokens or hashes"):
            cache.match(**both)  # type: ignore[arg-type]
    with pytest.raises(kvtide.InvalidRequest, match="either tokens or hashes"):
        pages.store(None, [], after=None)


@pytest.mark.parametrize("salt", [5, 1.5, ["a"]])
async def test_a_salt_that_is_none(cache: kvtide.Cache, pages: kvtide.Pages, salt: Any) -> None:
    with pytest.raises(kvtide.InvalidRequest):
        cache.match(prompt(1), salt=salt)


@pytest.mark.parametrize("extra", ["text", 5, {0: "text"}, [b"x"]])
async def test_an_extra_that_is_none(cache: kvtide.Cache, pages: kvtide.Pages, extra: Any) -> None:
    with pytest.raises(kvtide.InvalidRequest):
        cache.match(prompt(1), extra=extra)


@pytest.mark.parametrize("start", [1, TOKENS - 1, -TOKENS, 3 * TOKENS, 4.0, None, "0"])
async def test_start(pages: kvtide.Pages, start: Any) -> None:
    with pytest.raises(kvtide.InvalidRequest):
        pages.store(prompt(2), [0, 1], start=start, after=None)


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), "1"])
async def test_deadline(cache: kvtide.Cache, pages: kvtide.Pages, deadline: Any) -> None:
    await pages.store(prompt(1), [0], after=None)
    with pytest.raises(kvtide.InvalidRequest):
        pages.store(prompt(2), [0, 1], after=None, deadline=deadline)
    with cache.match(prompt(1)) as hit, pytest.raises(kvtide.InvalidRequest):
        pages.load(hit, [0], after=None, deadline=deadline)


async def test_a_prompt_shorter_than_a_block_is_no_error_and_no_block(
    cache: kvtide.Cache, pages: kvtide.Pages
) -> None:
    assert await pages.store([1, 2, 3], [0], after=None) == kvtide.Stored(0, 0, 0)
    assert await pages.store([1, 2, 3], [], after=None) == kvtide.Stored(0, 0, 0)
    with cache.match([1, 2, 3]) as hit:
        assert hit.tokens == 0
        assert await pages.load(hit, [], after=None) == kvtide.Loaded(0)


async def test_a_stream_on_the_cpu(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    with pytest.raises(kvtide.InvalidRequest, match="after=None"):
        pages.store(prompt(1), [0], after=object())
    await pages.store(prompt(1), [0], after=None)
    with cache.match(prompt(1)) as hit, pytest.raises(kvtide.InvalidRequest, match="after=None"):
        pages.load(hit, [0], after=0)


async def test_a_stream_that_is_none_or_of_another_device() -> None:
    first, second = FakeDevice(0), FakeDevice(1)
    async with opened(first, second) as cache:
        pages = cache.attach(Memory(16).paged(("cuda", 0)), namespace="m")
        for stream in (None, "stream", second.stream()):
            with pytest.raises(kvtide.InvalidRequest):
                pages.store(prompt(1), [0], after=stream)
        assert first.statistics()["events_live"] == first.statistics()["events_free"]


async def test_more_events_than_there_are_push_back() -> None:
    fake = FakeDevice(max_events=2)
    async with opened(fake, max_inflight_bytes=2048) as cache:
        pages = cache.attach(Memory(16).paged(("cuda", 0)), namespace="m")
        fake.hold()
        stream = fake.stream()
        first = pages.store(prompt(1), [0], after=stream)
        await first.wait_on(fake.stream("consumer"), layer=0)  # submitted: its mark is free again
        taken = [pages.store(prompt(1, number), [number], after=stream) for number in (1, 2)]
        with pytest.raises(kvtide.QueueFull):
            pages.store(prompt(1, 3), [3], after=stream)
        fake.release()
        for store in (first, *taken):
            assert (await store).stored == 1
        assert (await pages.store(prompt(1, 3), [3], after=stream)).stored == 1


async def test_after_has_no_default(pages: kvtide.Pages) -> None:
    with pytest.raises(TypeError, match="after"):
        pages.store(prompt(1), [0])  # type: ignore[call-arg]


async def test_a_layer_that_the_pages_do_not_have(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    store = pages.store(prompt(1), [0], after=None)
    with pytest.raises(kvtide.InvalidRequest, match="no layer 1"):
        await store.wait_on(None, layer=1)
    await store.wait_on(None, layer=0)
    await store


@pytest.mark.parametrize(
    "options",
    [
        {"namespace": ""},
        {"namespace": "m", "shard": 1},
        {"namespace": "m", "shard": 2, "of": 2},
        {"namespace": "m", "shard": -1, "of": 2},
        {"namespace": "m", "shard": 0, "of": 0},
        {"namespace": "m", "shard": 0, "of": -1},
        {"namespace": "m", "shard": True, "of": 2},
        {"namespace": "m", "shard": 0, "of": 1.0},
        {"namespace": "m", "shard": 2**40, "of": 2},
    ],
)
async def test_attach(cache: kvtide.Cache, options: dict[str, Any]) -> None:
    with pytest.raises(kvtide.InvalidRequest):
        cache.attach(Memory(4).paged(), **options)


@pytest.mark.parametrize("thing", [torch.zeros(4, 1024), [torch.zeros(4, 1024)], None, 5])
async def test_attach_takes_described_pages_only(cache: kvtide.Cache, thing: Any) -> None:
    with pytest.raises(kvtide.InvalidRequest, match="PagedKV"):
        cache.attach(thing, namespace="m")


async def test_device_pages_without_pinned_memory(cache: kvtide.Cache) -> None:
    with pytest.raises(kvtide.DeviceUnavailable, match="pin=True"):
        cache.attach(Memory(4).paged(("cuda", 0)), namespace="m")


async def test_a_namespace_that_nobody_attached(cache: kvtide.Cache) -> None:
    with pytest.raises(kvtide.UnknownNamespace):
        cache.match(prompt(1))
    cache.attach(Memory(4).paged(), namespace="m")
    with pytest.raises(kvtide.UnknownNamespace, match="other"):
        cache.match(prompt(1), namespace="other")
    assert cache.held(prompt(1), namespace="m").tokens == 0


async def test_several_namespaces_have_to_be_told_apart(cache: kvtide.Cache) -> None:
    cache.attach(Memory(4).paged(), namespace="a")
    cache.attach(Memory(4).paged(), namespace="b")
    with pytest.raises(kvtide.InvalidRequest, match="pass namespace="):
        cache.match(prompt(1))


async def test_one_id_with_two_geometries_needs_the_digest(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    other = cache.attach(kvtide.PagedKV.from_tensors([torch.zeros(8, 512, dtype=torch.uint8)]), namespace="m")
    await pages.store(prompt(2), [0, 1], after=None)
    with pytest.raises(kvtide.InvalidRequest, match=other.namespace.digest.hex()):
        cache.match(prompt(2), namespace="m")
    assert cache.held(prompt(2), namespace=pages.namespace.digest.hex()).tokens == 2 * TOKENS
    assert cache.held(prompt(2), namespace=other.namespace.digest.hex()).tokens == 0


async def test_a_hit_of_another_namespace(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    other = cache.attach(Memory(4).paged(), namespace="other")
    await pages.store(prompt(1), [0], after=None)
    with (
        cache.match(prompt(1), namespace="m") as hit,
        pytest.raises(kvtide.InvalidRequest, match="another namespace"),
    ):
        other.load(hit, [0], after=None)


async def test_a_hit_that_is_closed(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    await pages.store(prompt(2), [0, 1], after=None)
    with cache.match(prompt(2)) as hit:
        pass
    assert hit.closed
    with pytest.raises(kvtide.InvalidRequest, match="closed"):
        pages.load(hit, [0, 1], after=None)
    with pytest.raises(kvtide.InvalidRequest, match="closed"):
        hit[:TOKENS]
    hit.close()


@pytest.mark.parametrize(
    "part", [slice(1, 4), slice(0, 5), slice(0, 8, 2), slice(8, 0, -1), 0, "x", slice("a")]
)
async def test_a_slice_that_is_none(cache: kvtide.Cache, pages: kvtide.Pages, part: Any) -> None:
    await pages.store(prompt(2), [0, 1], after=None)
    with cache.match(prompt(2)) as hit, pytest.raises(kvtide.InvalidRequest):
        hit[part]


async def test_pages_that_were_detached(cache: kvtide.Cache, pages: kvtide.Pages) -> None:
    await pages.store(prompt(1), [0], after=None)
    await pages.detach()
    with pytest.raises(kvtide.Detached):
        pages.store(prompt(1), [0], after=None)
    with cache.match(prompt(1)) as hit:
        assert hit.tokens == TOKENS  # the blocks stay
        with pytest.raises(kvtide.Detached):
            pages.load(hit, [0], after=None)
    await pages.detach()


async def test_a_cache_that_is_closed() -> None:
    async with kvtide.open_cache(settings()) as cache:
        pages = cache.attach(Memory(4, seed=1).paged(), namespace="m")
        await pages.store(prompt(1), [0], after=None)
        hit = cache.match(prompt(1))
    assert await cache.close() == kvtide.Closed(())
    calls: list[Callable[[], object]] = [
        lambda: cache.match(prompt(1)),
        lambda: cache.held(prompt(1)),
        lambda: cache.attach(Memory(4).paged(), namespace="m"),
        lambda: pages.store(prompt(1), [0], after=None),
        lambda: pages.load(hit, [0], after=None),
    ]
    for call in calls:
        with pytest.raises(kvtide.CacheClosed):
            call()
    hit.close()


@pytest.mark.parametrize(
    "options",
    [
        {"host_bytes": 4095},
        {"extent_bytes": 5000},
        {"extent_bytes": 0},
        {"extent_bytes": 1 << 33, "host_bytes": 1 << 34},
        {"block_tokens": 0},
        {"max_inflight_bytes": 0},
        {"max_queued": 0},
        {"deadline": 0},
        {"deadline": float("inf")},
        {"deadline": float("nan")},
        {"policy": "fifo"},
        {"on_full": "explode"},
        {"quotas": {"m": 0}},
    ],
)
async def test_settings(options: dict[str, Any]) -> None:
    with pytest.raises(kvtide.InvalidRequest):
        async with kvtide.open_cache(settings(**options)):
            raise AssertionError("opened")
