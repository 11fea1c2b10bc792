"""The CUDA device on a GPU: pools, failures, devices, graph capture."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest
from tests.kernels import geometry
from tests.kernels.gpu import Host, Pages, finish, idle, job

from kvtide.kernels.bridge import Bridge, close_completions, completed
from kvtide.kernels.device import DeviceError, Direction, Span
from kvtide.kernels.worker import DeviceThread

pytestmark = [pytest.mark.gpu, pytest.mark.blocks_loop("waits for a GPU")]

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture(params=["packed", "plain"])
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    from kvtide.kernels.cuda import CudaDevice

    device = CudaDevice(0, path=request.param)
    yield device
    assert idle(device)
    device.close()


def test_S1_1_pool_after_failures(monkeypatch) -> None:
    from kvtide.kernels.cuda import CudaDevice

    device = CudaDevice(0, staging_bytes=1 << 20)
    pages = Pages(geometry.packed, 3 * geometry.PAGES * 2048)
    host = Host(device, 4, 6 * 1024)
    work = job(STORE, pages.spans, [1], host, [0])
    finish(device, work)
    copy = device._copier.copy

    def fail(*args: object) -> None:
        copy(*args)  # enqueued, and then it fails: the worst case
        raise DeviceError("copy", 1)

    monkeypatch.setattr(device._copier, "copy", fail)
    for _ in range(2000):
        with pytest.raises(DeviceError):
            device.submit(work)
    monkeypatch.undo()
    finish(device, work)
    counts = device.statistics()
    assert counts["streams_live"] == counts["streams_free"] == 1, counts
    assert counts["events_live"] == counts["events_free"] <= 4
    assert host.get(0) == geometry.image_of(pages.read(), pages.spans, pages.base, 1)
    host.close()
    device.close()


def test_S1_3_S1_5_two_thousand_jobs_behind_a_stalled_stream(device) -> None:
    import torch

    pages, engine = Pages(geometry.packed, 3 * geometry.PAGES * 2048), torch.cuda.Stream()
    host = Host(device, 8, 6 * 1024)
    worker, bridge = DeviceThread(device, "submit", bound=4096), Bridge(device, "done")
    device.prepare(tuple(pages.spans), (6,))
    with torch.cuda.stream(engine):
        torch.cuda._sleep(400_000_000)
    finished, errors = threading.Semaphore(0), []
    slowest = 0.0

    def submit(turn: int, after: object) -> None:
        submitted = device.submit(job(STORE, pages.spans, [turn % 12], host, [turn % 8], after=after))

        def done(error: BaseException | None) -> None:
            submitted.release(failed=error is not None)
            device.recycle(after)
            errors.extend([error] if error else [])
            finished.release()

        bridge.call_when(submitted.done, done)

    gc.collect()
    gc.disable()  # a full collection beside torch takes 60 ms, and would be taken for ours
    for turn in range(2000):
        begun = time.perf_counter()
        after = device.record(engine)
        worker.submit(lambda turn=turn, after=after: submit(turn, after), errors.append)
        slowest = max(slowest, time.perf_counter() - begun)
    gc.enable()
    for _ in range(2000):
        assert finished.acquire(timeout=60), errors
    assert errors == []
    print(f"\n2,000 jobs behind a stalled stream: slowest call {slowest * 1e3:.2f} ms", device.statistics())
    assert (
        slowest < 0.02
    )  # the engine's stream takes about 1,000 operations, and would have blocked for 0.2 s
    assert device.statistics()["streams_live"] <= device.statistics()["streams_bound"]
    assert worker.close(10)
    assert bridge.close(10) == []
    host.close()


def test_S4_1_device_one_and_the_callers_device_is_kept() -> None:
    import torch

    from kvtide.kernels.cuda import CudaDevice
    from kvtide.kernels.runtime import cudart

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    devices = [CudaDevice(0), CudaDevice(1)]
    for path in ("packed", "plain"):
        for index, device in enumerate(devices):
            device.path = path
            pages = Pages(geometry.packed, 3 * geometry.PAGES * 2048, index)
            host = Host(device, 4, 6 * 1024)
            before = pages.read()
            errors: list[BaseException] = []
            worker = DeviceThread(device, "w")
            blocks, slots = [3, 9], [1, 0]
            stream = torch.cuda.Stream(device=index)
            after = device.record(stream)
            work = job(STORE, pages.spans, blocks, host, slots, after=after)
            worker.submit(lambda d=device, w=work: finish(d, w), errors.append)
            assert worker.close(30)
            assert errors == []
            images = [geometry.image_of(before, pages.spans, pages.base, block) for block in blocks]
            assert [host.get(slot) for slot in slots] == images
            finish(device, job(LOAD, pages.spans, blocks[::-1], host, slots))
            assert pages.read() == geometry.with_images(before, pages.spans, pages.base, blocks[::-1], images)
            device.recycle(after)
            with pytest.raises(ValueError, match="passed to work on"):
                devices[1 - index].record(stream)
            host.close()
            assert torch.cuda.current_device() == 0
    other: list[object] = []

    def elsewhere() -> None:
        with devices[1].guard():
            other.append(int(cudart().cudaGetDevice()[1]))
        other.append(int(cudart().cudaGetDevice()[1]))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert other == [1, 0]
    shared = Host(devices[0], 1, 4096)  # one arena, two devices
    assert devices[1].register(shared.hosts[0], 4096)
    devices[1].unregister(shared.hosts[0])
    shared.close()

    async def watch() -> None:
        await completed(torch.cuda.Stream(device=1))

    asyncio.run(watch())
    assert close_completions(10) == []
    for device in devices:
        device.close()


def test_S0_2_registration_that_fails_says_so(device) -> None:
    with pytest.raises(DeviceError, match="cudaHostRegister"):
        device.register(0x10000, 4096)
    host = Host(device, 1, 4096)
    finish(device, job(STORE, [Span(*_one_page())], [0], host, [0]))
    host.close()
    with pytest.raises(KeyError):
        device.unregister(host.hosts[0])


def _one_page() -> tuple[int, int, int]:
    import torch

    global _kept
    _kept = torch.zeros(4096, dtype=torch.uint8, device="cuda:0")
    return _kept.data_ptr(), 4096, 4096


def test_streams_that_are_none_are_refused(device) -> None:
    import torch

    for wrong in (None, True, "stream", 1.5):
        with pytest.raises(TypeError):
            device.record(wrong)
    stream = torch.cuda.Stream()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda:0")
    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        with pytest.raises(DeviceError, match="capture"):
            device.record(stream)
    graph.replay()
    torch.cuda.synchronize()
    assert float(x.sum()) == 8


def test_copies_beside_a_graph_capture_on_another_thread(device) -> None:
    import torch

    pages = Pages(geometry.packed, 3 * geometry.PAGES * 2048)
    before = pages.read()
    errors: list[BaseException] = []
    graph, x, stream = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda:0"), torch.cuda.Stream()
    worker = DeviceThread(device, "beside")
    images: list[bytes] = []

    def copy() -> None:  # makes lanes, staging, events and a registration: all of it for the first time
        host = Host(device, 2, 6 * 1024)
        finish(device, job(STORE, pages.spans, [4, 5], host, [0, 1]))
        images.extend(host.get(i) for i in range(2))
        host.close()

    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        worker.submit(copy, errors.append)
        assert worker.close(60)
        x.add_(1)
    assert errors == []
    graph.replay()
    torch.cuda.synchronize()
    assert float(x.sum()) == 16
    assert images == [geometry.image_of(before, pages.spans, pages.base, block) for block in (4, 5)]


def test_many_threads_both_ways_at_once(device) -> None:
    """Each thread owns some pages and slots; what one stores and loads is nobody else's business."""
    pages = Pages(geometry.packed, 3 * geometry.PAGES * 2048)
    host = Host(device, 8, 6 * 1024)
    before = pages.read()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        blocks, slots = [number, number + 6], [2 * (number % 4), 2 * (number % 4) + 1]
        images = [geometry.image_of(before, pages.spans, pages.base, block) for block in blocks]
        try:
            for turn in range(300):
                turned = blocks if turn % 2 else blocks[::-1]
                finish(device, job(STORE, pages.spans, turned, host, slots))
                assert [host.get(slot) for slot in slots] == (images if turn % 2 else images[::-1])
                finish(device, job(LOAD, pages.spans, turned, host, slots, (2, 4, 6)))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert pages.read() == before
    host.close()
