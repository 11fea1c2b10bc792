"""How fast copies are on this GPU, against one large copy; printed, nothing but bytes is asserted."""

import ctypes
import random
import statistics
import time

import pytest
from tests.kernels.gpu import Host, job

from kvtide.kernels.device import Direction, Span

pytestmark = [pytest.mark.gpu, pytest.mark.blocks_loop("waits for a GPU")]

STORE, LOAD = Direction.STORE, Direction.LOAD


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
            device.prepare(tuple(spans), tuple(range(2, planes + 1, 2)))
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
                    for _ in range(7):
                        torch.cuda.synchronize()
                        begun = time.perf_counter()
                        submitted = device.submit(work)
                        submits.append(time.perf_counter() - begun)
                        device.synchronize(submitted.done)
                        walls.append(time.perf_counter() - begun)
                        submitted.release()
                        links.append(link(direction, pinned, flat))
                    rate = total / statistics.median(walls[2:]) / 1e9
                    best = total / statistics.median(links[2:]) / 1e9
                    submit, first = statistics.median(submits[2:]) * 1e3, submits[0] * 1e3
                    print(
                        f"{planes:4} x {nbytes >> 10:2} KiB {path:6} {direction.name:5} "
                        f"groups {len(groups):3}: {rate:5.1f} GB/s of {best:5.1f} ({rate / best:.3f}), "
                        f"submit {submit:6.2f} ms, first {first:7.1f} ms"
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
