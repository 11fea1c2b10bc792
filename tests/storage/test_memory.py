"""The contract of every tier below host memory, and what the memory tier adds to it.

A later tier joins by an entry in `TIERS`.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import kvtide
from kvtide.core.extents import Extents, slot_bytes
from kvtide.core.protocols import Label, Tier
from kvtide.storage.memory import Faults, MemoryTier

EXTENT = 1 << 16
CAPACITY = 4 * EXTENT

TIERS: dict[str, Callable[[Path], Tier]] = {
    "memory": lambda path: MemoryTier(CAPACITY, extent_bytes=EXTENT),
}


@pytest.fixture(params=sorted(TIERS))
async def tier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tier]:
    made = TIERS[request.param](tmp_path)
    await made.open()
    yield made
    await made.close()


def label(key: int = 0, nbytes: int = 5000, rank: int = 0) -> Label:
    return Label(b"n" * 32, key.to_bytes(32, "big"), rank, nbytes)


def image(seed: int, nbytes: int = 5000) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def room(tier: Tier) -> Extents:
    extents = Extents(tier.extent_bytes)
    for number in range(tier.capacity_bytes // tier.extent_bytes):
        extents.add(number)
    return extents


def slots(tier: Tier, count: int, nbytes: int = 5000) -> list[int]:
    taken = room(tier).take(slot_bytes(nbytes), count)
    assert taken is not None
    return taken


async def put(tier: Tier, slot: int, name: Label, data: bytes) -> None:
    await tier.write(slot, name, memoryview(bytearray(data)))


async def get(tier: Tier, slot: int, name: Label) -> bytes:
    into = bytearray(name.nbytes)
    await tier.read(slot, name, memoryview(into))
    return bytes(into)


# -- every tier -------------------------------------------------------------------------------


def test_a_tier_says_what_it_is(tier: Tier) -> None:
    assert tier.name
    assert isinstance(tier.durable, bool)
    assert tier.capacity_bytes >= tier.extent_bytes > 0
    assert tier.extent_bytes % 4096 == 0


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 65536, 100_000])
async def test_every_slot_gives_back_what_was_written(tier: Tier, nbytes: int) -> None:
    extents = room(tier)
    taken = extents.take(slot_bytes(nbytes), extents.available(slot_bytes(nbytes)))
    assert taken
    for number, slot in enumerate(taken):
        await put(tier, slot, label(number, nbytes), image(number, nbytes))
    for number, slot in reversed(list(enumerate(taken))):
        assert await get(tier, slot, label(number, nbytes)) == image(number, nbytes)


async def test_many_operations_at_once_keep_to_their_own_slots(tier: Tier) -> None:
    taken = slots(tier, 20)
    await asyncio.gather(*(put(tier, slot, label(n), image(n)) for n, slot in enumerate(taken)))
    found = await asyncio.gather(*(get(tier, slot, label(n)) for n, slot in enumerate(taken)))
    assert found == [image(n) for n in range(20)]


async def test_an_image_may_be_reused_once_the_write_has_returned(tier: Tier) -> None:
    (slot,) = slots(tier, 1)
    source = bytearray(image(1))
    await tier.write(slot, label(), memoryview(source))
    source[:] = bytes(len(source))
    assert await get(tier, slot, label()) == image(1)


async def test_a_slot_is_overwritten(tier: Tier) -> None:
    (slot,) = slots(tier, 1)
    await put(tier, slot, label(1), image(1))
    await put(tier, slot, label(2), image(2))
    assert await get(tier, slot, label(2)) == image(2)
    with pytest.raises(kvtide.CorruptImage):
        await get(tier, slot, label(1))


async def test_an_empty_slot_is_no_image(tier: Tier) -> None:
    (slot,) = slots(tier, 1)
    with pytest.raises(kvtide.CorruptImage):
        await get(tier, slot, label())


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": b"m" * 32},
        {"key": b"k" * 32},
        {"rank": 1},
        {"nbytes": 4999},
        {"nbytes": 5001},
    ],
)
async def test_an_image_is_read_only_by_its_label(tier: Tier, change: dict[str, object]) -> None:
    (slot,) = slots(tier, 1)
    await put(tier, slot, label(), image(1))
    other = dataclasses.replace(label(), **change)  # type: ignore[arg-type]
    into = bytearray(other.nbytes)
    with pytest.raises(kvtide.CorruptImage):
        await tier.read(slot, other, memoryview(into))
    assert bytes(into) == bytes(other.nbytes)  # nothing wrong is ever handed out
    assert await get(tier, slot, label()) == image(1)


async def test_a_write_that_does_not_fit_its_label_is_refused(tier: Tier) -> None:
    (slot,) = slots(tier, 1)
    with pytest.raises(kvtide.TierFailed):
        await put(tier, slot, label(), image(1, 4000))


async def test_room_that_changed_its_slot_size_never_gives_an_old_image(tier: Tier) -> None:
    extents = room(tier)
    small = extents.take(4096, extents.available(4096))
    assert small
    for number, slot in enumerate(small):
        await put(tier, slot, label(number, 4096), image(number, 4096))
    large = room(tier).take(EXTENT, 4)
    assert large
    for number, slot in enumerate(large):
        await put(tier, slot, label(100 + number, EXTENT), image(number, EXTENT))
    for number, slot in enumerate(small):
        with pytest.raises(kvtide.CorruptImage):
            await get(tier, slot, label(number, 4096))
    for number, slot in enumerate(large):
        assert await get(tier, slot, label(100 + number, EXTENT)) == image(number, EXTENT)


async def test_a_tier_can_be_closed_twice(tier: Tier) -> None:
    await tier.close()
    await tier.close()


async def test_a_closed_tier_refuses(tier: Tier) -> None:
    (slot,) = slots(tier, 1)
    await put(tier, slot, label(), image(1))
    await tier.close()
    with pytest.raises(kvtide.TierFailed):
        await put(tier, slot, label(), image(1))
    with pytest.raises(kvtide.TierFailed):
        await get(tier, slot, label())


# -- the memory tier --------------------------------------------------------------------------


@pytest.fixture
async def faults() -> Faults:
    return Faults()


@pytest.fixture
async def memory(faults: Faults) -> AsyncIterator[MemoryTier]:
    made = MemoryTier(CAPACITY, extent_bytes=EXTENT, faults=faults)
    await made.open()
    yield made
    await made.close()


async def test_so_many_reads_are_corrupt(memory: MemoryTier, faults: Faults) -> None:
    (slot,) = slots(memory, 1)
    await put(memory, slot, label(), image(1))
    faults.corrupt_reads = 2
    for _ in range(2):
        with pytest.raises(kvtide.CorruptImage, match="checksum"):
            await get(memory, slot, label())
    assert await get(memory, slot, label()) == image(1)
    assert faults.reads == 3


@pytest.mark.parametrize("which", ["reads", "writes"])
async def test_so_many_operations_fail(memory: MemoryTier, faults: Faults, which: str) -> None:
    (slot,) = slots(memory, 1)
    await put(memory, slot, label(), image(1))
    setattr(faults, f"fail_{which}", 2)

    def operation() -> Awaitable[object]:
        return get(memory, slot, label()) if which == "reads" else put(memory, slot, label(), image(2))

    for _ in range(2):
        with pytest.raises(kvtide.TierFailed, match="told to fail"):
            await operation()
    assert await get(memory, slot, label()) == image(1)
    await operation()
    assert getattr(faults, f"fail_{which}") == 0


async def test_a_delay_and_a_gate_hold_operations_up(memory: MemoryTier, faults: Faults) -> None:
    (slot,) = slots(memory, 1)
    await put(memory, slot, label(), image(1))
    faults.delay = 0.05
    began = time.monotonic()
    await get(memory, slot, label())
    assert time.monotonic() - began >= 0.045
    faults.delay, faults.gate = 0.0, asyncio.Event()
    held = asyncio.ensure_future(get(memory, slot, label()))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not held.done()
    faults.gate.set()
    assert await held == image(1)


@pytest.mark.parametrize(
    ("capacity", "extent"), [(4095, 4096), (0, 4096), (-1, 4096), (8192, 0), (8192, 4097), (8192, -4096)]
)
def test_sizes_that_cannot_be(capacity: int, extent: int) -> None:
    with pytest.raises(kvtide.InvalidRequest):
        MemoryTier(capacity, extent_bytes=extent)


async def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(kvtide.TierFailed, match="cannot map"):
        await MemoryTier(1 << 60).open()
