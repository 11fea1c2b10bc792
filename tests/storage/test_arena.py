"""The host arena: its addresses, its registration in the background, its failures and its end."""

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.api.houses import Memory, devices, opened, prompt, settings

import kvtide
from kvtide.core.extents import Extents, slot_bytes
from kvtide.kernels.device import DeviceError
from kvtide.kernels.fake import FakeDevice
from kvtide.storage.arena import Arena

EXTENT = 1 << 13


class Watch:
    """What an arena reports while it prepares itself."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.error: BaseException | None = None
        self.over = threading.Event()
        self._wanted = 0
        self._some = threading.Event()

    def start(self, arena: Arena, wanted: int | None = None) -> None:
        """Return once `wanted` extents are ready (all, by default) or it has failed."""
        self._wanted = arena.extents if wanted is None else wanted
        arena.start(self._ready, self._failed)
        assert self._some.wait(5.0)

    def _ready(self, number: int) -> None:
        self.ready.append(number)
        if len(self.ready) >= self._wanted:
            self._some.set()

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self._some.set()
        self.over.set()


class SlowDevice(FakeDevice):
    """Registers as many ranges as it is let."""

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.turns = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.entered = threading.Event()

    def register(self, address: int, nbytes: int) -> int:
        self.entered.set()
        assert self.turns.acquire(timeout=10.0)
        if self.error is not None:
            raise self.error
        return super().register(address, nbytes)


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    device = FakeDevice()
    yield device
    device.close()


@pytest.fixture
def slow() -> Iterator[SlowDevice]:
    device = SlowDevice()
    yield device
    device.turns.release(1000)
    device.close()


def pinned(device: FakeDevice, extents: int = 8) -> Arena:
    return Arena(settings(pin=True, host_bytes=extents * EXTENT), devices(device))


def plain(extents: int = 8) -> Arena:
    return Arena(settings(host_bytes=extents * EXTENT))


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvtide-")}


# -- addresses --------------------------------------------------------------------------------


@hypothesis_settings(max_examples=40, deadline=None)
@given(image=st.integers(1, 3 * EXTENT), extents=st.integers(3, 9))
def test_S2_1_every_slot_is_aligned_and_writable_to_its_last_byte(image: int, extents: int) -> None:
    arena = plain(extents)
    watch = Watch()
    try:
        watch.start(arena)
        room = Extents(EXTENT)
        for number in watch.ready:
            room.add(number)
        size = slot_bytes(image)
        slots = room.take(size, room.available(size))
        assert slots
        ends = []
        for slot in slots:
            view = arena.view(slot, size)
            assert len(view) == size
            assert arena.address(slot) % 4096 == 0
            assert arena.address(slot) == arena.device_address(slot) == address_of(view)
            view[-1] = 7
            ends.append((arena.address(slot), arena.address(slot) + size))
            view.release()
        ends.sort()
        assert arena.base <= ends[0][0]
        assert ends[-1][1] <= arena.base + extents * EXTENT
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    finally:
        assert arena.close(5.0, keep=False) == []


def test_S0_3_device_addresses_are_those_that_registration_returned(fake: FakeDevice) -> None:
    arena = pinned(fake)
    Watch().start(arena)
    for slot in (0, 4096, 3 << 32, 7 << 32 | 4096):
        assert arena.device_address(slot) == arena.address(slot) + fake.delta
    assert arena.close(5.0, keep=False) == []


def test_no_registered_range_is_larger_than_an_extent(fake: FakeDevice) -> None:
    arena = pinned(fake)
    Watch().start(arena)
    assert fake.ranges == {arena.base + number * EXTENT: EXTENT for number in range(8)}
    assert arena.close(5.0, keep=False) == []


def test_memory_that_cannot_be_had_says_how_much_was_asked() -> None:
    with pytest.raises(kvtide.TierFailed, match=str(1 << 60)):
        Arena(kvtide.Settings(host_bytes=1 << 60))


# -- registration -----------------------------------------------------------------------------


@pytest.mark.parametrize("good", [0, 3])
def test_S0_2_a_failed_registration_is_reported_and_rolled_back(fake: FakeDevice, good: int) -> None:
    others = threads()
    fake.fail_next("register", good)
    arena, watch = pinned(fake), Watch()
    began = time.monotonic()
    watch.start(arena)
    assert watch.over.wait(1.0)
    assert time.monotonic() - began < 1.0
    assert isinstance(watch.error, kvtide.TierFailed)
    assert isinstance(watch.error.__cause__, DeviceError)
    assert f"{good} of 8" in str(watch.error)
    assert watch.ready == list(range(good))  # what was handed out stays in use (R24)
    host = arena.health()[0]
    assert (host.name, host.state) == ("host", "degraded" if good else "failed")
    assert host.cause is not None
    assert "register failed" in host.cause
    assert arena.close(5.0, keep=False) == []
    assert fake.counts["unregister"] == good
    assert not fake.ranges
    assert threads() == others


@pytest.mark.parametrize("error", [RuntimeError("anything"), OSError(12, "no memory"), MemoryError()])
def test_S0_2_whatever_the_registration_raises_is_reported(slow: SlowDevice, error: BaseException) -> None:
    slow.error = error
    slow.turns.release()
    arena, watch = pinned(slow), Watch()
    watch.start(arena)
    assert watch.error is not None
    assert watch.error.__cause__ is error
    assert arena.health()[0].state == "failed"
    assert arena.close(5.0, keep=False) == []


def test_S4_2_a_device_that_cannot_be_set_registers_nothing(fake: FakeDevice) -> None:
    fake.lie(3)
    arena, watch = pinned(fake), Watch()
    watch.start(arena)
    assert isinstance(watch.error, kvtide.TierFailed)
    assert fake.counts["register"] == 0
    fake.lie(None)
    assert arena.close(5.0, keep=False) == []


async def test_S0_2_who_waits_for_room_is_told_within_a_second(slow: SlowDevice) -> None:
    slow.turns.release(2)
    memory = Memory(8, seed=1)
    async with opened(slow, ready=False) as cache:
        stream = slow.stream()
        pages = cache.attach(memory.paged(("cuda", 0)), namespace="m")
        await pages.store(prompt(4), range(4), after=stream)  # takes the two extents that there are
        waiting = pages.store(prompt(8, 3), range(8), after=stream)
        assert cache.statistics().tiers[0].waiting_for_room == 1
        slow.error = DeviceError("cudaHostRegister", 2, "out of memory")
        slow.turns.release()
        began = time.monotonic()
        with pytest.raises(kvtide.TierFailed, match="out of memory"):
            await waiting
        assert time.monotonic() - began < 1.0
        (host,) = [part for part in cache.health() if part.name == "host"]
        assert host.state == "degraded"
        assert "out of memory" in (host.cause or "")
        # What there is goes on.
        target = Memory(8)
        others = cache.attach(target.paged(("cuda", 0)), namespace="m")
        with cache.match(prompt(4)) as hit:
            await others.load(hit, range(4), after=stream)
        assert target.blocks(range(4)) == memory.blocks(range(4))
        assert (await pages.store(prompt(2, 9), [0, 1], after=stream)).stored == 2
        assert cache.statistics().tiers[0].capacity_bytes == 2 * EXTENT
    assert not slow.ranges


async def test_S0_2_without_any_memory_a_store_says_why_at_once(slow: SlowDevice) -> None:
    slow.error = DeviceError("cudaHostRegister", 2, "out of memory")
    async with opened(slow, ready=False) as cache:
        pages = cache.attach(Memory(8).paged(("cuda", 0)), namespace="m")
        early = pages.store(prompt(2), [0, 1], after=slow.stream())
        slow.turns.release()
        with pytest.raises(kvtide.TierFailed, match="out of memory"):
            await early
        with pytest.raises(kvtide.TierFailed, match="out of memory"):
            await pages.store(prompt(2), [0, 1], after=slow.stream())
        assert [part.state for part in cache.health() if part.name == "host"] == ["failed"]


async def test_S0_1_S0_4_memory_is_used_as_it_comes_and_never_before(slow: SlowDevice) -> None:
    memory = Memory(8, seed=1)
    async with opened(slow, ready=False) as cache:
        assert slow.entered.wait(5.0)  # it has begun before anybody waits for it
        stream = slow.stream()
        pages = cache.attach(memory.paged(("cuda", 0)), namespace="m")
        store = pages.store(prompt(4), range(4), after=stream)
        assert cache.statistics().tiers[0].capacity_bytes == 0
        assert not store.done
        slow.turns.release(1)
        small = pages.store(prompt(2, 5), [4, 5], after=stream)
        slow.turns.release(2)
        assert (await store).stored == 4
        assert (await small).stored == 2
        assert cache.statistics().tiers[0].capacity_bytes == 3 * EXTENT
        slow.turns.release(100)


# -- devices ----------------------------------------------------------------------------------


def test_pinning_without_a_device_is_refused_at_start() -> None:
    arena = Arena(settings(pin=True), devices())
    with pytest.raises(kvtide.DeviceUnavailable, match="needs a GPU"):
        arena.start(lambda number: None, lambda error: None)
    assert arena.close(5.0, keep=False) == []


def test_pages_on_a_device_need_pinned_memory() -> None:
    arena = plain()
    with pytest.raises(kvtide.DeviceUnavailable, match="pin=True"):
        arena.endpoint(Memory().paged(("cuda", 0)))
    assert arena.close(5.0, keep=False) == []


def test_S4_1_pages_on_a_device_that_is_not_there_or_lies(fake: FakeDevice) -> None:
    arena = pinned(fake)
    Watch().start(arena)
    with pytest.raises(kvtide.DeviceUnavailable, match="cuda:3"):
        arena.endpoint(Memory().paged(("cuda", 3)))
    with pytest.raises(kvtide.DeviceUnavailable, match="abacus"):
        arena.endpoint(Memory().paged(("abacus", 0)))
    fake.lie(5)
    with pytest.raises(kvtide.DeviceUnavailable, match="cuda:0"):
        arena.endpoint(Memory().paged(("cuda", 0)))
    fake.lie(None)
    arena.endpoint(Memory().paged(("cuda", 0)))
    assert arena.close(5.0, keep=False) == []


# -- the end ----------------------------------------------------------------------------------


def maps(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines]
    return any(int(first, 16) <= address < int(last, 16) for first, last in spans)


def test_close_leaves_no_thread_no_descriptor_and_no_mapping(fake: FakeDevice) -> None:
    before = set(os.listdir("/proc/self/fd"))
    others = threads()
    arena = pinned(fake, extents=64)
    assert maps(arena.base)
    Watch().start(arena)
    arena.endpoint(Memory().paged())
    arena.endpoint(Memory().paged(("cuda", 0)))
    assert threads() > others
    assert arena.close(5.0, keep=False) == []
    assert threads() == others
    assert set(os.listdir("/proc/self/fd")) == before
    assert not fake.ranges
    address = arena.base
    del arena
    assert not maps(address)


def test_close_ends_a_registration_that_is_under_way(slow: SlowDevice) -> None:
    slow.turns.release(3)
    arena, watch = pinned(slow), Watch()
    watch.start(arena, wanted=3)
    slow.turns.release()
    assert arena.close(5.0, keep=False) == []
    assert len(watch.ready) < 8
    assert watch.error is None
    assert not slow.ranges


def test_a_registration_that_is_stuck_keeps_its_memory_and_is_named(slow: SlowDevice) -> None:
    arena, watch = pinned(slow), Watch()
    arena.start(watch._ready, watch._failed)
    assert slow.entered.wait(5.0)
    began = time.monotonic()
    assert arena.close(0.1, keep=False) == ["kvtide-arena"]
    assert time.monotonic() - began < 1.0
    assert maps(arena.base)
    slow.turns.release()
    assert arena.close(5.0, keep=False) == []
    assert not slow.ranges


def test_memory_is_kept_for_copies_that_are_stuck() -> None:
    arena = plain()
    Watch().start(arena)
    assert arena.close(5.0, keep=True) == []
    arena.view(0, 4096)[-1] = 1
    assert arena.close(5.0, keep=False) == []


def test_memory_that_somebody_looks_at_is_named_and_kept() -> None:
    arena = plain()
    Watch().start(arena)
    view = arena.view(0, 4096)
    (stuck,) = arena.close(5.0, keep=False)
    assert "host memory" in stuck
    view[0] = 1
    view.release()


def test_a_range_that_the_driver_will_not_let_go_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    arena = pinned(device)
    Watch().start(arena)
    unregister = device.unregister

    def fails_once(address: int) -> None:
        if address == arena.base + 2 * EXTENT:
            raise DeviceError("cudaHostUnregister", 1)
        unregister(address)

    monkeypatch.setattr(device, "unregister", fails_once)
    (stuck,) = arena.close(5.0, keep=False)
    assert "cudaHostUnregister" in stuck
    assert list(device.ranges) == [arena.base + 2 * EXTENT]
    assert maps(arena.base)
    device.close()


def test_memory_that_a_lost_device_had_pinned_is_named_and_kept(fake: FakeDevice) -> None:
    arena = pinned(fake)
    Watch().start(arena)
    fake.lose()
    (stuck,) = arena.close(5.0, keep=False)
    assert "host memory" in stuck
    assert maps(arena.base)
