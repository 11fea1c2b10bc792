"""The CPU twin of the device interface: pages are CPU tensors, copies are memmove.

A CPU engine's writes are done when its call returns, so there is nothing to order: events are
born happened. `ctypes.memmove` releases the GIL while it copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from ctypes import memmove

from kvtide.kernels.device import Direction, Event, Job, Span, Stream

_HAPPENED: Event = object()


class _Done:
    """A job that ended inside `submit`."""

    done: Event = _HAPPENED

    def wait_on(self, stream: Stream, group: int) -> None:
        del stream, group

    def release(self, *, failed: bool = False) -> None:
        del failed


class CpuDevice:
    """Host memory as a device: no streams, no pinning, no waiting."""

    kind = "cpu"
    index = 0

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        yield

    def prepare(self, spans: tuple[Span, ...], groups: tuple[int, ...]) -> None:
        del spans, groups

    def record(self, stream: Stream) -> Event:
        if stream is not None:
            raise TypeError(f"pages on the CPU have no stream: pass after=None, not {stream!r}")
        return _HAPPENED

    def submit(self, job: Job) -> _Done:
        """Copy at once, plane by plane in the image's order."""
        store = job.direction is Direction.STORE
        offset = 0
        for span in job.spans:
            base, stride, nbytes = span.base, span.stride, span.nbytes
            if store:
                for block, host in zip(job.blocks, job.hosts, strict=True):
                    memmove(host + offset, base + block * stride, nbytes)
            else:
                for block, host in zip(job.blocks, job.hosts, strict=True):
                    memmove(base + block * stride, host + offset, nbytes)
            offset += nbytes
        return _Done()

    def synchronize(self, event: Event) -> None:
        del event

    def recycle(self, event: Event) -> None:
        del event

    def register(self, address: int, nbytes: int) -> int:
        del nbytes
        return address

    def unregister(self, address: int) -> None:
        del address

    def statistics(self) -> dict[str, int]:
        return {"streams_live": 0, "events_live": 0, "staging_bytes": 0}

    def close(self) -> None:
        pass
