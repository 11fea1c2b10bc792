import time, threading, torch, sys

sys.path.insert(0, ".")
from kvtide.kernels.cuda import CudaDevice
from kvtide.kernels.runtime import cudart
from kvtide.kernels.lane import Lane
from array import array

rt = cudart()


def T(name, fn):
    b = time.perf_counter()
    r = fn()
    d = (time.perf_counter() - b) * 1e3
    print(f"   {name:40} {d:8.3f} ms")
    return r


torch.zeros(1, device="cuda")
for trial in range(2):
    d = CudaDevice(0)
    s = torch.cuda.Stream()
    T("record idle", lambda: d.record(s))
    with torch.cuda.stream(s):
        torch.cuda._sleep(800_000_000)
    print("stalled: records")
    ts = []
    ev = []
    for i in range(1200):
        b = time.perf_counter()
        ev.append(d.record(s))
        ts.append((time.perf_counter() - b) * 1e3)
    print("   worst", max(ts), "at", ts.index(max(ts)), "late", sum(type(e).__name__ == "Late" for e in ev))
    torch.cuda.synchronize()
    with torch.cuda.stream(s):
        torch.cuda._sleep(800_000_000)
    print("stalled: lane parts")
    lane = T("Lane()", lambda: Lane(0, 32 << 20, True))
    T("staging cudaMalloc", lane.staging)
    T("put_table (HostAlloc, Malloc)", lambda: lane.put_table(array("q", [1] * 10)))
    T("put_table again", lambda: lane.put_table(array("q", [1] * 10)))
    T("event create", d._make_event)
    T("torch_stream", lambda: lane.torch_stream)
    m = torch.zeros(4096, dtype=torch.uint8)
    T("guard", lambda: d.guard().__enter__())
    import ctypes, mmap

    mm = mmap.mmap(-1, 1 << 20)
    a = ctypes.addressof(ctypes.c_char.from_buffer(mm))
    ctypes.memset(a, 1, 1 << 20)
    T("register 1 MiB", lambda: d.register(a, 1 << 20))
    T("query busy", s.query)
    print("   still busy:", not s.query())
    T("unregister", lambda: d.unregister(a))
    print("   still busy:", not s.query())
    torch.cuda.synchronize()
    # how many ops in a stream before a blocked call, by op, with other thread's guard latency
    for what in ("record", "wait"):
        s2 = torch.cuda.Stream()
        e0 = d._make_event()
        e1 = d._make_event()
        with torch.cuda.stream(s):
            torch.cuda._sleep(800_000_000)
        rt.cudaEventRecord(e0, s.cuda_stream)
        if what == "wait":
            rt.cudaStreamWaitEvent(s2.cuda_stream, e0, 0)
        else:
            with torch.cuda.stream(s2):
                torch.cuda._sleep(800_000_000)
        evs = [d._make_event() for _ in range(1500)]
        other = [0.0]
        stop = [False]

        def o():
            while not stop[0]:
                b = time.perf_counter()
                with d.guard():
                    pass
                other[0] = max(other[0], time.perf_counter() - b)
                time.sleep(0.001)

        t = threading.Thread(target=o)
        t.start()
        for i, e in enumerate(evs):
            b = time.perf_counter()
            rt.cudaEventRecord(e, s2.cuda_stream)
            x = time.perf_counter() - b
            if x > 0.005:
                print("   ", what, "blocked at", i, f"{x * 1e3:.1f} ms")
                break
        stop[0] = True
        t.join()
        print("    other thread's guard worst", f"{other[0] * 1e3:.2f} ms")
        torch.cuda.synchronize()
