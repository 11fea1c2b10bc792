"""The fake device keeps CUDA's rules of order, and fails when it is told to."""

import ctypes
import threading
import time

import pytest

from kvtide.kernels.device import DeviceError, DeviceLost, Direction, Job, Span
from kvtide.kernels.fake import FakeDevice, current_device
from kvtide.kernels.pool import PoolExhausted


@pytest.fixture
def device():
    device = FakeDevice()
    yield device
    device.close()


class Memory:
    """Pages of two planes and host images, filled with what tells them apart."""

    def __init__(self, blocks: int = 8, nbytes: int = 64) -> None:
        self.nbytes = nbytes
        self.pages = (ctypes.c_uint8 * (blocks * nbytes * 2))(*([7] * (blocks * nbytes * 2)))
        self.images = (ctypes.c_uint8 * (blocks * nbytes * 2))()
        base = ctypes.addressof(self.pages)
        self.spans = (Span(base, 2 * nbytes, nbytes), Span(base + nbytes, 2 * nbytes, nbytes))
        self.hosts = [ctypes.addressof(self.images) + i * 2 * nbytes for i in range(blocks)]

    def job(self, direction: Direction, blocks: list[int], after: object = None, delta: int = 0) -> Job:
        hosts = self.hosts[: len(blocks)]
        devices = [host + delta for host in hosts]
        return Job(direction, self.spans, blocks, hosts, devices, (1, 2), after)

    def image(self, index: int) -> bytes:
        return ctypes.string_at(self.hosts[index], 2 * self.nbytes)


def finish(device: FakeDevice, submitted) -> None:
    device.synchronize(submitted.done)
    submitted.release()


def test_S1_4_a_store_sees_what_was_written_before_it(device) -> None:
    memory, stream = Memory(), device.stream()
    stream.hold()
    stream.run(lambda: ctypes.memset(memory.pages, 42, len(memory.pages)))
    after = device.record(stream)
    submitted = device.submit(memory.job(Direction.STORE, [3, 1], after))
    time.sleep(0.02)
    assert memory.image(0) == bytes(128)  # copies are lazy: nothing moves before its turn
    stream.release()
    finish(device, submitted)
    device.recycle(after)
    assert memory.image(0) == memory.image(1) == bytes([42]) * 128


def test_S1_4_without_after_the_fake_shows_the_race(device) -> None:
    memory, stream = Memory(), device.stream()
    stream.hold()
    stream.run(lambda: ctypes.memset(memory.pages, 42, len(memory.pages)))
    finish(device, device.submit(memory.job(Direction.STORE, [3])))
    assert memory.image(0) == bytes([7]) * 128  # stale
    stream.release()


def test_wait_on_holds_a_consumer_until_its_group(device) -> None:
    memory, stream = Memory(), device.stream()
    device.hold()
    submitted = device.submit(memory.job(Direction.LOAD, [0]))
    submitted.wait_on(stream, 0)
    seen = threading.Event()
    stream.run(seen.set)
    assert not seen.wait(0.05)
    device.release()
    assert seen.wait(10)
    finish(device, submitted)
    submitted.wait_on(stream, 1)  # released: nothing to do
    assert device.counts["wait_on"] == 1


def test_an_unrecorded_event_is_no_wait(device) -> None:
    from kvtide.kernels.fakestream import FakeEvent

    stream, seen = device.stream(), threading.Event()
    stream.wait(FakeEvent())
    stream.run(seen.set)
    assert seen.wait(10)


def test_S1_1_pool_after_failures(device) -> None:
    memory = Memory()
    finish(device, device.submit(memory.job(Direction.STORE, [0])))
    before = device.statistics()
    for number in range(10_000):
        call = ("submit", "copy", "synchronize")[number % 3]
        device.fail_next(call, number % 2 if call == "copy" else 0)
        submitted = None
        try:
            submitted = device.submit(memory.job(Direction.STORE, [1]))
            device.synchronize(submitted.done)
        except DeviceError:
            if submitted is not None:
                submitted.release(failed=True)
        else:
            raise AssertionError(f"{call} should have failed")
    finish(device, device.submit(memory.job(Direction.STORE, [0])))
    after = device.statistics()
    assert after["streams_live"] == after["streams_free"] == before["streams_live"]
    assert after["events_live"] == after["events_free"] == before["events_live"]
    assert threading.active_count() < 20


def test_S1_3_streams_are_bounded_and_submission_waits_its_turn() -> None:
    device, memory = FakeDevice(max_streams=2, patience=0.05), Memory()
    device.hold()
    held = [device.submit(memory.job(Direction.LOAD, [i])) for i in range(2)]
    with pytest.raises(PoolExhausted):
        device.submit(memory.job(Direction.LOAD, [2]))
    device.release()
    for submitted in held:
        finish(device, submitted)
    finish(device, device.submit(memory.job(Direction.LOAD, [2])))
    assert device.statistics()["streams_live"] == 2
    device.close()


def test_S0_3_only_the_address_that_register_returned_is_taken() -> None:
    device, memory = FakeDevice(strict=True, delta=4096), Memory()
    address = ctypes.addressof(memory.images)
    with pytest.raises(DeviceError, match="registered"):
        device.submit(memory.job(Direction.STORE, [1], delta=4096))
    assert device.register(address, len(memory.images)) == address + 4096
    with pytest.raises(DeviceError, match="registered"):
        device.submit(memory.job(Direction.STORE, [1]))
    finish(device, device.submit(memory.job(Direction.STORE, [1], delta=4096)))
    assert memory.image(0) == bytes([7]) * 128
    device.unregister(address)
    device.close()


def test_a_failing_copy_stops_its_stream_and_fails_its_events(device) -> None:
    memory = Memory()
    device.fail_next("copy", 1, code=5)
    submitted = device.submit(memory.job(Direction.STORE, [1]))
    with pytest.raises(DeviceError) as caught:
        device.synchronize(submitted.done)
    assert caught.value.code == 5
    submitted.release(failed=True)
    assert memory.image(0) == bytes([7]) * 64 + bytes(64)


def test_a_lost_device_wakes_who_waits(device) -> None:
    memory = Memory()
    device.hold()
    submitted = device.submit(memory.job(Direction.LOAD, [1]))
    errors: list[DeviceLost] = []

    def wait() -> None:
        try:
            device.synchronize(submitted.done)
        except DeviceLost as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    device.fail_next("record", code=700, lost=True)
    with pytest.raises(DeviceLost):
        device.record(device.stream())
    thread.join(10)
    assert errors[0].code == 700
    with pytest.raises(DeviceLost):
        device.submit(memory.job(Direction.LOAD, [1]))
    submitted.release(failed=True)


def test_S4_6_current_device_is_per_thread_and_restored() -> None:
    first, second = FakeDevice(0), FakeDevice(1)
    with second.guard():
        assert current_device() == 1
        with first.guard():
            assert current_device() == 0
        assert current_device() == 1
        other: list[int] = []
        thread = threading.Thread(target=lambda: other.append(current_device()))
        thread.start()
        thread.join()
        assert other == [0]
    assert current_device() == 0
    second.fail_next("get_device")
    with pytest.raises(DeviceError), second.guard():
        raise AssertionError("the body must not run")
    assert current_device() == 0


def test_streams_of_another_device_are_refused(device) -> None:
    other = FakeDevice(1)
    with pytest.raises(ValueError, match="device 1"):
        device.record(other.stream())
    with pytest.raises(TypeError):
        device.record(None)
    with pytest.raises(ValueError, match="no call"):
        device.fail_next("sing")
    other.close()


def test_registration_can_fail_at_any_step(device) -> None:
    device.fail_next("register", 2, code=2)
    assert [device.register(4096 * i, 4096) for i in (1, 2)]
    with pytest.raises(DeviceError):
        device.register(4096 * 3, 4096)
    assert sorted(device.ranges) == [4096, 8192]
