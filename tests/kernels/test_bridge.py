"""The completion bridge: delivery, order, isolation, loss, close."""

import asyncio
import contextlib
import threading
import time

import pytest

from kvtide.kernels.bridge import Bridge, BridgeClosed, close_completions, completed
from kvtide.kernels.device import DeviceError, DeviceLost
from kvtide.kernels.fake import FakeDevice


@pytest.fixture
def device():
    device = FakeDevice(max_events=20_000)
    yield device
    device.close()


@pytest.fixture
def bridge(device):
    bridge = Bridge(device, "test")
    yield bridge
    device.release()
    assert bridge.close(10) == []


class Heard:
    """Collects outcomes and waits for a number of them."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[object, BaseException | None]] = []
        self._changed = threading.Condition()

    def __call__(self, name: object):
        def hear(error: BaseException | None) -> None:
            with self._changed:
                self.outcomes.append((name, error))
                self._changed.notify_all()

        return hear

    def wait(self, number: int) -> list[object]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= number, 30)
            return [name for name, _ in self.outcomes]


def test_one_key_is_delivered_in_order(device, bridge) -> None:
    stream, heard = device.stream(), Heard()
    stream.hold()
    for number in range(500):
        bridge.call_when(device.record(stream), heard(number), "key")
    assert heard.outcomes == []
    stream.release()
    assert heard.wait(500) == list(range(500))
    assert bridge.statistics() == {"waiters": 1, "pending": 0}


def test_order_within_a_key_survives_a_slow_function(device, bridge) -> None:
    stream, heard = device.stream(), Heard()
    go = threading.Event()

    def slow(error: BaseException | None) -> None:
        go.wait(30)
        heard("slow")(error)

    bridge.call_when(device.record(stream), slow, "key")
    time.sleep(0.05)  # the waiter is inside `slow`, and its queue would look idle
    bridge.call_when(device.record(stream), heard("quick"), "key")
    time.sleep(0.05)
    go.set()
    assert heard.wait(2) == ["slow", "quick"]


def test_a_stalled_stream_delays_no_other(device, bridge) -> None:
    stalled, free, heard = device.stream(), device.stream(), Heard()
    stalled.hold()
    bridge.call_when(device.record(stalled), heard("stalled"), "a")
    bridge.call_when(device.record(free), heard("free"), "b")
    bridge.call_when(device.record(free), heard("no key"))
    assert sorted(heard.wait(2)) == ["free", "no key"]
    stalled.release()
    heard.wait(3)


def test_threads_are_capped_and_keys_share_beyond(device) -> None:
    bridge, heard = Bridge(device, "small", max_waiters=2), Heard()
    streams = [device.stream() for _ in range(6)]
    for number, stream in enumerate(streams):
        stream.hold()
        bridge.call_when(device.record(stream), heard(number), number)
    assert bridge.statistics() == {"waiters": 2, "pending": 6}
    for stream in streams:
        stream.release()
    assert sorted(map(str, heard.wait(6))) == list("012345")
    assert bridge.close(10) == []


def test_S0_2_an_error_reaches_its_waiter_and_only_that_one(device, bridge) -> None:
    heard = Heard()
    device.fail_next("synchronize", code=7)
    stream = device.stream()
    bridge.call_when(device.record(stream), heard("first"), "key")
    heard.wait(1)
    bridge.call_when(device.record(stream), heard("second"), "key")
    heard.wait(2)
    errors = dict(heard.outcomes)
    assert isinstance(errors["first"], DeviceError)
    assert errors["second"] is None


def test_a_guard_that_fails_is_an_outcome_too(device, bridge) -> None:
    heard = Heard()
    event = device.record(device.stream())
    device.fail_next("set_device", code=46)
    bridge.call_when(event, heard("x"))
    heard.wait(1)
    assert isinstance(heard.outcomes[0][1], DeviceError)


def test_a_lost_device_ends_all_waiting_exactly_once(device, bridge) -> None:
    heard = Heard()
    for key in range(4):
        stream = device.stream()
        stream.hold()
        for _ in range(3):
            bridge.call_when(device.record(stream), heard(key), key)
    device.lose()
    heard.wait(12)
    time.sleep(0.05)
    assert len(heard.outcomes) == 12
    assert all(isinstance(error, DeviceLost) for _, error in heard.outcomes)
    bridge.call_when(object(), heard("later"))
    heard.wait(13)
    assert isinstance(heard.outcomes[-1][1], DeviceLost)


def test_a_function_that_raises_is_told_and_others_are_served(device, bridge, monkeypatch) -> None:
    told: list[type | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    stream, heard = device.stream(), Heard()
    bridge.call_when(device.record(stream), lambda error: {}["missing"], "key")
    bridge.call_when(device.record(stream), heard("next"), "key")
    heard.wait(1)
    assert told == [KeyError]


def test_S3_13_close_leaves_no_thread(device) -> None:
    before = threading.active_count()
    bridge, heard = Bridge(device, "test"), Heard()
    stream = device.stream()
    for number in range(3):
        bridge.call_when(device.record(stream), heard(number), number)
    heard.wait(3)
    assert bridge.close(10) == []
    assert threading.active_count() == before + 1  # the engine's own stream
    with pytest.raises(BridgeClosed):
        bridge.call_when(device.record(stream), heard("late"))


def test_close_names_what_is_stuck_and_returns_in_time(device) -> None:
    bridge, heard = Bridge(device, "test"), Heard()
    stalled, free = device.stream(), device.stream()
    stalled.hold()
    bridge.call_when(device.record(stalled), heard("stalled"), "a")
    bridge.call_when(device.record(free), heard("free"), "b")
    heard.wait(1)
    begun = time.monotonic()
    (stuck,) = bridge.close(0.2)
    assert 0.15 < time.monotonic() - begun < 5
    assert stuck.startswith("kvtide-test-waiter-")
    stalled.release()
    assert heard.wait(2) == ["free", "stalled"]  # delivered after all
    assert bridge.close(10) == []


def test_S3_12_waiting_costs_no_cpu(device, bridge) -> None:
    stream, heard = device.stream(), Heard()
    stream.hold()
    for key in range(8):
        bridge.call_when(device.record(stream), heard(key), key)
    time.sleep(0.05)
    begun = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun < 0.02
    stream.release()
    heard.wait(8)


@pytest.fixture
def watched():
    device = FakeDevice(max_events=20_000)
    yield device
    device.release()
    assert close_completions(10) == []
    device.close()


async def test_completed_waits_for_what_was_enqueued(watched) -> None:
    stream = watched.stream()
    stream.hold()
    first = completed(stream, device=watched)
    assert not first.done()
    stream.release()
    await asyncio.wait_for(first, 10)
    with pytest.raises(TypeError):
        completed("no stream", device=watched)


async def test_completed_captures_an_event_at_the_call(watched) -> None:
    early, late = watched.stream(), watched.stream()
    event = watched.record(early)
    waiting = completed(event, device=watched)
    late.hold()
    late.record(event)  # recorded again, behind something that does not move
    await asyncio.wait_for(waiting, 10)
    late.release()


async def test_completed_raises_what_became_of_the_work(watched) -> None:
    stream = watched.stream()

    def fail() -> None:
        raise DeviceError("kernel", 9)

    stream.run(fail)
    with pytest.raises(DeviceError, match="kernel"):
        await completed(stream, device=watched)


async def test_cancelling_ends_the_waiting_and_gives_the_event_back(watched) -> None:
    stream = watched.stream()
    stream.hold()

    async def wait() -> None:
        await completed(stream, device=watched)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    statistics = watched.statistics()
    assert statistics["events_live"] - statistics["events_free"] == 1  # the copy goes on
    stream.release()
    await asyncio.wait_for(completed(stream, device=watched), 10)
    statistics = watched.statistics()
    assert statistics["events_live"] == statistics["events_free"]


async def test_a_thousand_in_flight(watched) -> None:
    streams = [watched.stream() for _ in range(4)]
    for stream in streams:
        stream.hold()
    waiting = [completed(streams[number % 4], device=watched) for number in range(1000)]
    for stream in streams:
        stream.release()
    await asyncio.wait_for(asyncio.gather(*waiting), 30)


def test_a_loop_that_is_gone_is_nobody_to_tell(watched) -> None:
    stream = watched.stream()
    stream.hold()

    async def abandon() -> None:
        completed(stream, device=watched).cancel()

    asyncio.run(abandon())
    stream.release()
    stream.drain()
    assert close_completions(10) == []
    statistics = watched.statistics()
    assert statistics["events_live"] == statistics["events_free"]
