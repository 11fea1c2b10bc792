"""Copies between pages and host slots: every end of one gives everything back, and says why."""

import threading
from collections.abc import Iterator

import pytest
from tests.api.houses import Memory, devices, settings

import kvtide
from kvtide.core.protocols import Ticket
from kvtide.kernels.device import Direction
from kvtide.kernels.fake import FakeDevice
from kvtide.storage.arena import Arena
from kvtide.storage.endpoint import PagesEndpoint

SLOTS = [0, 4096, 1 << 32]


class Copy:
    """One copy, and what is told of it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.begun = threading.Event()
        self.ticket: Ticket | None = None
        self.error: BaseException | None = None
        self.ends = 0

    def submitted(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.begun.set()

    def done(self, error: BaseException | None) -> None:
        self.error = error
        self.ends += 1
        self.over.set()

    def ended(self) -> BaseException | None:
        assert self.over.wait(5.0)
        assert self.ends == 1
        return self.error


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    device = FakeDevice(strict=True)
    yield device
    device.close()


@pytest.fixture
def arena(fake: FakeDevice) -> Iterator[Arena]:
    made = Arena(settings(pin=True), devices(fake))
    ready = threading.Semaphore(0)
    made.start(lambda number: ready.release(), lambda error: None)
    for _ in range(made.extents):
        assert ready.acquire(timeout=5.0)
    yield made
    fake.release()
    made.close(5.0, keep=False)


@pytest.fixture
def memory() -> Memory:
    return Memory(8, seed=1)


@pytest.fixture
def endpoint(arena: Arena, memory: Memory) -> PagesEndpoint:
    return arena.endpoint(memory.paged(("cuda", 0)))


def store(endpoint: PagesEndpoint, fake: FakeDevice) -> Copy:
    copy = Copy()
    mark = endpoint.record(fake.stream())
    endpoint.store([2, 0, 1], SLOTS, mark, copy.submitted, copy.done)
    return copy


def at_rest(fake: FakeDevice) -> None:
    """Nothing that a copy took is still out."""
    stats = fake.statistics()
    assert stats["streams_live"] - stats["streams_free"] == 0
    assert stats["events_live"] - stats["events_free"] == 0


def test_S2_4_a_store_and_a_load_go_their_own_way(
    endpoint: PagesEndpoint, arena: Arena, memory: Memory, fake: FakeDevice
) -> None:
    before = memory.blocks(range(8))
    assert store(endpoint, fake).ended() is None
    assert [arena.view(slot, 2048).tobytes() for slot in SLOTS] == [before[2], before[0], before[1]]
    assert memory.blocks(range(8)) == before
    memory.wipe()
    copy = Copy()
    endpoint.load([5, 7, 6], SLOTS, endpoint.record(fake.stream()), copy.submitted, copy.done)
    assert copy.ended() is None
    assert memory.blocks([5, 7, 6]) == [before[2], before[0], before[1]]
    at_rest(fake)


@pytest.mark.parametrize("call", ["submit", "copy", "synchronize"])
def test_S1_1_a_failing_call_gives_everything_back(
    endpoint: PagesEndpoint, fake: FakeDevice, call: str
) -> None:
    for _ in range(20):
        fake.fail_next(call, 1 if call == "copy" else 0)
        error = store(endpoint, fake).ended()
        assert isinstance(error, kvtide.TransferFailed)
        assert not isinstance(error, kvtide.DeviceUnavailable)
        assert call in str(error)
        assert error.__cause__ is not None
    assert store(endpoint, fake).ended() is None
    at_rest(fake)


def test_S4_2_S4_4_a_device_that_cannot_be_set_fails_the_copy_before_it_begins(
    endpoint: PagesEndpoint, fake: FakeDevice
) -> None:
    copy = Copy()
    mark = endpoint.record(fake.stream())
    copies = fake.counts["copy"]
    fake.lie(4)
    endpoint.store([0], [0], mark, copy.submitted, copy.done)
    assert isinstance(copy.ended(), kvtide.DeviceUnavailable)
    assert fake.counts["copy"] == copies
    fake.lie(None)
    assert store(endpoint, fake).ended() is None
    at_rest(fake)


def test_a_device_that_is_lost_refuses_all_that_follows(endpoint: PagesEndpoint, fake: FakeDevice) -> None:
    stream = fake.stream()
    mark = endpoint.record(stream)
    fake.lose()
    copy = Copy()
    endpoint.store([0], [0], mark, copy.submitted, copy.done)
    assert isinstance(copy.ended(), kvtide.DeviceUnavailable)
    with pytest.raises(kvtide.DeviceUnavailable, match="lost"):
        endpoint.record(stream)


@pytest.mark.parametrize("lost", [False, True])
def test_a_mark_that_cannot_be_recorded(endpoint: PagesEndpoint, fake: FakeDevice, lost: bool) -> None:
    fake.fail_next("record", 0, lost=lost)
    with pytest.raises(kvtide.DeviceUnavailable):
        endpoint.record(fake.stream())
    if not lost:
        endpoint.forget(endpoint.record(fake.stream()))
        at_rest(fake)


def test_a_mark_that_no_copy_uses_goes_back(endpoint: PagesEndpoint, fake: FakeDevice) -> None:
    for _ in range(2000):  # the pool has 1,024
        endpoint.forget(endpoint.record(fake._owned[0] if fake._owned else fake.stream()))
    at_rest(fake)


def test_S1_4_a_store_reads_what_the_stream_had_written_before_it(
    endpoint: PagesEndpoint, arena: Arena, memory: Memory, fake: FakeDevice
) -> None:
    stream = fake.stream()
    stream.hold()
    stream.run(lambda: memory.fill(7))
    copy = Copy()
    endpoint.store([0], [0], endpoint.record(stream), copy.submitted, copy.done)
    assert copy.begun.wait(5.0)
    assert not copy.over.is_set()
    stream.release()
    assert copy.ended() is None
    assert arena.view(0, 2048).tobytes() == memory.block(0) == Memory(8, seed=7).block(0)


def test_a_stream_waits_for_a_copy(endpoint: PagesEndpoint, memory: Memory, fake: FakeDevice) -> None:
    before = memory.blocks(range(8))
    assert store(endpoint, fake).ended() is None
    memory.wipe()
    fake.hold()
    copy = Copy()
    endpoint.load([4], SLOTS[:1], endpoint.record(fake.stream()), copy.submitted, copy.done)
    assert copy.begun.wait(5.0)
    assert copy.ticket is not None
    consumer = fake.stream("consumer")
    copy.ticket.wait_on(consumer, 0).wait(5.0)
    seen: list[bytes] = []
    consumer.run(lambda: seen.append(memory.block(4)))
    assert not seen
    fake.release()
    consumer.drain()
    assert seen == [before[2]]
    assert copy.ended() is None
    # Behind the end there is nothing to wait for.
    copy.ticket.wait_on(consumer, 0).wait(5.0)
    at_rest(fake)


def test_waiting_on_a_stream_can_fail(endpoint: PagesEndpoint, fake: FakeDevice) -> None:
    fake.hold()
    copy = store(endpoint, fake)
    assert copy.begun.wait(5.0)
    assert copy.ticket is not None
    fake.fail_next("wait_on", 0)
    with pytest.raises(kvtide.TransferFailed, match="wait_on"):
        copy.ticket.wait_on(fake.stream(), 0).wait(5.0)
    fake.release()
    assert copy.ended() is None


def test_S4_5_a_full_queue_refuses_and_calls_nothing(
    endpoint: PagesEndpoint, fake: FakeDevice, arena: Arena
) -> None:
    lanes = arena._open("cuda", 0)
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert go.wait(5.0)

    thread = lanes.threads[Direction.STORE]
    thread.submit(hold, lambda error: None)
    assert entered.wait(5.0)
    for _ in range(thread.bound):
        thread.submit(lambda: None, lambda error: None)
    copy = Copy()
    mark = endpoint.record(fake.stream())
    with pytest.raises(kvtide.QueueFull, match="takes no more copies"):
        endpoint.store([0], [0], mark, copy.submitted, copy.done)
    endpoint.forget(mark)
    go.set()
    assert not copy.over.is_set()
    assert thread.close(5.0)
    assert copy.ends == 0
    at_rest(fake)


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_without_a_waiter_thread_is_waited_for_all_the_same(
    endpoint: PagesEndpoint, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, arena: Arena, fails: bool
) -> None:
    """Its end may only be told when it touches nothing any more."""
    lanes = arena._open("cuda", 0)

    def no_thread(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(lanes.bridge, "call_when", no_thread)
    fake.hold()
    if fails:
        fake.fail_next("copy", 1)
    copy = store(endpoint, fake)
    assert copy.begun.wait(5.0)
    assert not copy.over.is_set()
    fake.release()
    error = copy.ended()
    assert isinstance(error, kvtide.TransferFailed) if fails else error is None
    assert store(endpoint, fake).ended() is None  # what was discarded is gone by now
    at_rest(fake)
