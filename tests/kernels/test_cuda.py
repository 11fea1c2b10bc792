"""The CUDA device on a GPU: bytes, order, pools, failure. Times are printed; run with `-s`."""

import random
from collections.abc import Iterator

import pytest
from tests.kernels import geometry
from tests.kernels.gpu import POISON, Host, Pages, finish, idle, job, recorded

from kvtide.kernels.device import Direction, Span

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
