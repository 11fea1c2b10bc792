"""The device thread: guarded, bounded, and every callable ends exactly once."""

import threading

import pytest

from kvtide.kernels.device import DeviceError
from kvtide.kernels.fake import FakeDevice, current_device
from kvtide.kernels.worker import DeviceThread, QueueFull, WorkerClosed


@pytest.fixture
def device():
    device = FakeDevice(index=1)
    yield device
    device.close()


def fails(error: BaseException) -> None:
    raise AssertionError("unexpected") from error


def test_S4_1_work_runs_on_its_device_and_the_thread_is_restored(device) -> None:
    seen: list[int] = []
    worker = DeviceThread(device, "w")
    worker.submit(lambda: seen.append(current_device()), fails)
    worker.submit(lambda: seen.append(current_device()), fails)
    assert worker.close(10)
    assert seen == [1, 1]
    assert device.counts["set_device"] == device.counts["get_device"] == 2  # verified each time
    assert current_device() == 0


def test_S4_2_a_device_that_cannot_be_set_fails_the_work_before_any_copy(device) -> None:
    errors: list[BaseException] = []
    ran: list[str] = []
    device.fail_next("set_device", code=46)
    worker = DeviceThread(device, "w")
    worker.submit(lambda: ran.append("first"), errors.append)
    worker.submit(lambda: ran.append("second"), errors.append)
    assert worker.close(10)
    assert ran == ["second"]
    assert isinstance(errors[0], DeviceError)
    assert errors[0].code == 46


def test_S4_11_a_device_that_lies_fails_the_work(device) -> None:
    errors: list[BaseException] = []
    ran: list[str] = []
    worker = DeviceThread(device, "w")
    device.lie(0)
    worker.submit(lambda: ran.append("wrong device"), errors.append)
    assert worker.close(10)
    assert ran == []
    assert isinstance(errors[0], DeviceError)


def test_S4_4_what_a_callable_raises_reaches_its_own_waiter(device) -> None:
    errors: list[BaseException] = []
    worker = DeviceThread(device, "w")
    worker.submit(lambda: 1 // 0, errors.append)
    worker.submit(lambda: errors.append(KeyError("next")), fails)
    assert worker.close(10)
    assert [type(error) for error in errors] == [ZeroDivisionError, KeyError]


def test_S4_5_a_full_queue_says_so_at_once(device) -> None:
    worker = DeviceThread(device, "w", bound=1)
    running, go = threading.Event(), threading.Event()
    worker.submit(lambda: (running.set(), go.wait(30)), fails)
    assert running.wait(10)
    worker.submit(lambda: None, fails)
    with pytest.raises(QueueFull):
        worker.submit(lambda: None, fails)
    assert worker.depth == 1
    go.set()
    assert worker.close(10)


def test_close_with_something_stuck_returns_in_time_and_ends_the_rest(device) -> None:
    worker = DeviceThread(device, "w")
    running, go = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    worker.submit(lambda: (running.set(), go.wait(30)), fails)
    assert running.wait(10)
    worker.submit(lambda: fails(KeyError()), errors.append)
    assert not worker.close(0.05)
    assert isinstance(errors[0], WorkerClosed)
    with pytest.raises(WorkerClosed):
        worker.submit(lambda: None, fails)
    go.set()
    assert worker.close(10)


def test_an_on_error_that_raises_is_told_and_the_thread_goes_on(device, monkeypatch) -> None:
    told: list[type | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    worker = DeviceThread(device, "w")
    done = threading.Event()
    worker.submit(lambda: 1 // 0, lambda error: {}["missing"])
    worker.submit(done.set, fails)
    assert done.wait(10)
    assert worker.close(10)
    assert told == [KeyError]
