"""The CUDA device on a GPU: bytes, order, pools, failure. Times are printed; run with `-s`."""

import asyncio
import ctypes
import random
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from kvtide.kernels.bridge import Bridge, close_completions, completed
from kvtide.kernels.device import DeviceError, Direction, Span
from kvtide.kernels.worker import DeviceThread
from tests.kernels import geometry
from tests.kernels.gpu import POISON, Host, Pages, finish, idle, job, recorded

pytestmark = [pytest.mark.gpu, pytest.mark.blocks_loop("waits for a GPU")]

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture(params=["packed", "plain"])
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    from kvtide.kernels.cuda import CudaDevice

    device = CudaDevice(0, path=request.param)
    yield device
    assert idle(device)
    device.close()


@pytest.mark.parametrize("staging", [1 << 20, 1536], ids=["whole", "cut"])
@pytest.mark.parametrize("layout", geometry.LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("path", ["packed", "plain"])
def test_bytes_survive_the_round(path, layout, staging) -> None:
    from kvtide.kernels.cuda import CudaDevice

    device = CudaDevice(0, path=path, staging_bytes=staging * 16)
    pages = Pages(layout, geometry.extent(layout(0), 0))
    spans = pages.spans
    nbytes = sum(span.nbytes for span in spans)
    host = Host(device, 16, nbytes, a_piece=4)
    before = pages.read()
    stored, loaded = geometry.some_blocks(2), geometry.some_blocks(3)
    slots = random.Random(5).sample(range(16), len(stored))
    finish(device, job(STORE, spans, stored, host, slots))
    images = [geometry.image_of(before, spans, pages.base, block) for block in stored]
    assert [host.get(slot) for slot in slots] == images
    for slot in range(16):
        poison = bytes([POISON])
        assert host.padding(slot) == poison * len(host.padding(slot))
        assert slot in slots or host.get(slot) == poison * nbytes
    assert pages.read() == before
    for groups in {(len(spans),), (1, len(spans)), tuple(range(1, len(spans) + 1))}:
        pages.tensor.random_(0, 256)
        around = pages.read()
        finish(device, job(LOAD, spans, loaded, host, slots, groups))
        assert pages.read() == geometry.with_images(around, spans, pages.base, loaded, images)
    assert idle(device)
    host.close()
    device.close()


def test_pages_beyond_4_gib_of_their_base(device) -> None:
    import torch

    stride, count = 1 << 20, 6000
    tensor = torch.empty(stride * count, dtype=torch.uint8, device="cuda:0")
    span = Span(tensor.data_ptr(), stride, 4096)
    host = Host(device, 3, 4096)
    blocks = [5999, 0, 4500]
    for i, block in enumerate(blocks):
        tensor[block * stride : block * stride + 4096] = i + 1
    torch.cuda.synchronize()
    finish(device, job(STORE, [span], blocks, host, [0, 1, 2]))
    assert [host.get(i) for i in range(3)] == [bytes([i + 1]) * 4096 for i in range(3)]
    finish(device, job(LOAD, [span], blocks[::-1], host, [0, 1, 2]))
    assert [int(tensor[block * stride + 4095]) for block in blocks] == [3, 2, 1]
    host.close()


def test_S1_4_a_store_sees_the_final_bytes_1000_times(device) -> None:
    import torch

    pages, producer = Pages(geometry.packed, 3 * geometry.PAGES * 2048), torch.cuda.Stream()
    host = Host(device, 4, 6 * 1024)
    for turn in range(1000):
        with torch.cuda.stream(producer):
            pages.tensor.fill_(POISON)
            torch.cuda._sleep(150_000)
            pages.tensor.fill_(turn % 128)
        with recorded(device, producer) as after:
            finish(device, job(STORE, pages.spans, [7, 2, 11, 3], host, [0, 1, 2, 3], after=after))
        for i in range(4):
            assert host.get(i) == bytes([turn % 128]) * 6144, turn
    host.close()


def test_S1_4_a_load_is_not_overtaken_1000_times(device) -> None:
    import torch

    pages, engine = Pages(geometry.packed, 3 * geometry.PAGES * 2048), torch.cuda.Stream()
    host = Host(device, 4, 6 * 1024)
    expected = geometry.with_images(
        bytes([200]) * pages.tensor.numel(), pages.spans, pages.base, [7, 2, 11, 3], [bytes([9]) * 6144] * 4
    )
    expected_tensor = torch.frombuffer(bytearray(expected), dtype=torch.uint8).cuda()
    for i in range(4):
        host.put(i, bytes([9]) * 6144)
    for turn in range(1000):
        with torch.cuda.stream(engine):
            torch.cuda._sleep(150_000)
            pages.tensor.fill_(200)  # a pending write
            read = pages.tensor.clone()  # and a pending read
        with recorded(device, engine) as after:
            finish(device, job(LOAD, pages.spans, [7, 2, 11, 3], host, [0, 1, 2, 3], after=after))
        assert torch.equal(pages.tensor, expected_tensor), turn
        engine.synchronize()
        assert bool((read == 200).all()), turn
    host.close()


def test_wait_on_before_during_and_after(device) -> None:
    import torch

    pages = Pages(geometry.packed, 3 * geometry.PAGES * 2048)
    engine, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    host = Host(device, 4, 6 * 1024)
    for i in range(4):
        host.put(i, bytes([9]) * 6144)
    blocks = [7, 2, 11, 3]
    for turn in range(100):
        pages.tensor.fill_(200)
        torch.cuda.synchronize()
        with torch.cuda.stream(engine):
            torch.cuda._sleep(500_000)
        after = device.record(engine)
        submitted = device.submit(job(LOAD, pages.spans, blocks, host, [0, 1, 2, 3], (2, 4, 6), after))
        seen = []
        for group in range(3):  # during: behind a kernel that still runs
            submitted.wait_on(consumer, group)
            with torch.cuda.stream(consumer):
                layer = pages.tensor[group * 24576 : (group + 1) * 24576].view(-1, 2048)
                seen.append(layer[blocks].clone())
        consumer.synchronize()
        for layer in seen:
            assert bool((layer == 9).all()), turn
        device.synchronize(submitted.done)
        submitted.wait_on(consumer, 2)  # ended, not released
        submitted.wait_on(consumer.cuda_stream, 0)
        submitted.release()
        submitted.release()
        submitted.wait_on(consumer, 0)  # released
        device.recycle(after)
    consumer.synchronize()
    host.close()


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
    assert counts["streams_live"] == counts["streams_free"] == 1
    assert counts["events_live"] == counts["events_free"] <= 4
    assert host.get(0) == geometry.image_of(pages.read(), pages.spans, pages.base, 1)
    host.close()
    device.close()


def test_S1_3_S1_5_two_thousand_jobs_behind_a_stalled_stream(device) -> None:
    import torch

    pages, engine = Pages(geometry.packed, 3 * geometry.PAGES * 2048), torch.cuda.Stream()
    host = Host(device, 8, 6 * 1024)
    worker, bridge = DeviceThread(device, "submit", bound=4096), Bridge(device, "done")
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

    for turn in range(2000):
        begun = time.perf_counter()
        after = device.record(engine)
        worker.submit(lambda turn=turn, after=after: submit(turn, after), errors.append)
        slowest = max(slowest, time.perf_counter() - begun)
    for _ in range(2000):
        assert finished.acquire(timeout=60), errors
    assert errors == []
    print(f"\n2,000 jobs behind a stalled stream: slowest call {slowest * 1e3:.2f} ms", device.statistics())
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
            worker.submit(
                lambda d=device, p=pages, h=host, a=after: finish(
                    d, job(STORE, p.spans, blocks, h, slots, after=a)
                ),
                errors.append,
            )
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


def test_completed_on_events_streams_and_handles() -> None:
    import torch

    async def run() -> None:
        stalled, free = torch.cuda.Stream(), torch.cuda.Stream()
        await completed(free)
        await completed(free.cuda_stream)
        await completed(torch.cuda.Event())  # never recorded: nothing to wait for
        with torch.cuda.stream(stalled):
            torch.cuda._sleep(800_000_000)
            event = torch.cuda.Event()
            event.record()
        late = [completed(event), completed(stalled)]
        begun = time.perf_counter()
        for _ in range(20):
            await completed(free)
            done = torch.cuda.Event()
            done.record(free)
            await completed(done)
        assert time.perf_counter() - begun < 0.3
        assert not late[0].done()
        assert not late[1].done()
        late.append(completed(event))
        late[2].cancel()
        await asyncio.gather(*late[:2])
        assert event.query()
        with torch.cuda.stream(stalled):
            torch.cuda._sleep(100_000_000)
        await asyncio.gather(*[completed(stalled if i % 2 else free) for i in range(2000)])
        latencies = []
        for _ in range(500):
            with torch.cuda.stream(free):
                torch.cuda._sleep(300_000)
                end = torch.cuda.Event(enable_timing=True)
                end.record()
            waiting = completed(free)
            spinner = threading.Thread(target=_spin, args=(end, latencies))
            spinner.start()
            await waiting
            latencies.append((time.perf_counter(), "woken"))
            spinner.join()
        gaps = []
        for i in range(0, len(latencies), 2):
            pair = {what: at for at, what in latencies[i : i + 2]}
            gaps.append((pair["woken"] - pair["happened"]) * 1e3)
        begun = time.perf_counter()
        for _ in range(500):
            await completed(free)
        each = (time.perf_counter() - begun) / 500 * 1e3
        calls = []
        for _ in range(500):
            begun = time.perf_counter()
            waiting = completed(free)
            calls.append((time.perf_counter() - begun) * 1e6)
            await waiting
        print(
            f"\ncompleted: event to coroutine p50 {statistics.median(gaps):.3f} ms, "
            f"idle stream round trip {each:.3f} ms, call {statistics.median(calls):.1f} us"
        )

    asyncio.run(run(), debug=False)  # the times are printed
    assert close_completions(10) == []


def _spin(event, into: list) -> None:
    from kvtide.kernels.runtime import cudart

    # The driver's own spinning wait, without the GIL: the moment the event happened.
    cudart().cudaEventSynchronize(event.cuda_event)
    into.append((time.perf_counter(), "happened"))


def test_rates_are_printed() -> None:
    import torch

    from kvtide.kernels.cuda import CudaDevice

    print()
    for planes, nbytes in ((64, 32 << 10), (64, 8 << 10), (160, 4 << 10)):
        pool, count = 1024, 512
        tensors = [
            torch.randint(0, 256, (pool, nbytes), dtype=torch.uint8, device="cuda:0") for _ in range(planes)
        ]
        spans = [Span(tensor.data_ptr(), nbytes, nbytes) for tensor in tensors]
        image, total = planes * nbytes, planes * nbytes * count
        for path in ("packed", "plain"):
            device = CudaDevice(0, path=path)
            host = Host(device, count, image, a_piece=max(1, (16 << 20) // image))
            blocks = random.Random(1).sample(range(pool), count)
            slots = random.Random(2).sample(range(count), count)
            pinned, flat = host_copy(total), torch.empty(total, dtype=torch.uint8, device="cuda:0")
            for direction in (STORE, LOAD):
                for groups in (
                    {(planes,), tuple(range(2, planes + 1, 2))} if direction is LOAD else {(planes,)}
                ):
                    work = job(direction, spans, blocks, host, slots, groups)
                    submits, walls, links = [], [], []
                    for turn in range(7):
                        torch.cuda.synchronize()
                        begun = time.perf_counter()
                        submitted = device.submit(work)
                        submits.append(time.perf_counter() - begun)
                        device.synchronize(submitted.done)
                        walls.append(time.perf_counter() - begun)
                        submitted.release()
                        links.append(link(direction, pinned, flat))
                        del turn
                    rate = total / statistics.median(walls[2:]) / 1e9
                    best = total / statistics.median(links[2:]) / 1e9
                    print(
                        f"{planes:4} x {nbytes >> 10:2} KiB {path:6} {direction.name:5} groups {len(groups):3}: "
                        f"{rate:5.1f} GB/s of {best:5.1f} ({rate / best:.3f}), "
                        f"submit {statistics.median(submits[2:]) * 1e3:6.2f} ms, first {submits[0] * 1e3:7.1f} ms"
                    )
            for i in (0, 100, 511):
                expected = b"".join(bytes(tensor[blocks[i]].cpu().numpy()) for tensor in tensors)
                assert ctypes.string_at(host.hosts[slots[i]], image) == expected
            host.close()
            print("    ", device.statistics())
            device.close()


def host_copy(total: int):
    import torch

    return torch.ones(total, dtype=torch.uint8).pin_memory()


def link(direction: Direction, pinned, flat) -> float:
    import torch

    torch.cuda.synchronize()
    begun = time.perf_counter()
    if direction is STORE:
        pinned.copy_(flat, non_blocking=True)
    else:
        flat.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begun
