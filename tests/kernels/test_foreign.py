"""`completed` on CUDA: events, streams and handles that are not kvtide's own."""

import asyncio
import statistics
import threading
import time

import pytest

from kvtide.kernels.bridge import close_completions, completed

pytestmark = [pytest.mark.gpu, pytest.mark.blocks_loop("waits for a GPU")]


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
            torch.cuda._sleep(400_000_000)
            event.record()
        begun = time.perf_counter()
        many = [completed((stalled, free, event)[i % 3]) for i in range(1500)]
        assert time.perf_counter() - begun < 0.15, "watching a stalled stream blocked the caller"
        await asyncio.gather(*many)
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
