"""The device interface: the only way in which kvtide does work on a device.

Three implementations stand behind it: `cpu.CpuDevice`, `cuda.CudaDevice` and, for tests of
ordering and failure, `fake.FakeDevice`. Nothing here knows of blocks or hashes: a job is
addresses, strides and sizes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Stream = Any
"""An engine's stream: `None` on the CPU; on CUDA a `torch.cuda.Stream` or a raw handle."""

Event = Any
"""An opaque, pooled event of the device that recorded it."""


class DeviceError(RuntimeError):
    """A call on a device failed; `code` is the driver's, `call` the name of what failed."""

    def __init__(self, call: str, code: int, detail: str = "") -> None:
        super().__init__(f"{call} failed with code {code}{': ' if detail else ''}{detail}")
        self.call = call
        self.code = code


class DeviceLost(DeviceError):
    """The device's context is gone: nothing on it can succeed any more."""


class Direction(enum.Enum):
    """Which way a job moves bytes. A type, so that no call can get it wrong by a flag."""

    STORE = "pages to host"
    LOAD = "host to pages"


class Span(NamedTuple):
    """One plane of the engine's pages: block `i` is at `base + i * stride`, `nbytes` long.

    A tuple, since there are hundreds to make and to hash at every attach.
    """

    base: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """Copies of whole blocks between pages and host images.

    `blocks[i]` (page numbers) goes with `hosts[i]` (host address of that image) and
    `device_hosts[i]` (the address by which the device reaches the same image; R23).
    An image is the spans' bytes one after the other, in the order of `spans`.
    `groups` are the indices in `spans` at which a group of layers ends; the last is
    `len(spans)`. A load finishes groups in order, each with an event of its own.
    `after` is an event (of this device) that the copy has to wait for, or None.
    """

    direction: Direction
    spans: tuple[Span, ...]
    blocks: Sequence[int]
    hosts: Sequence[int]
    device_hosts: Sequence[int]
    groups: tuple[int, ...]
    after: Event | None = None


class Submitted(Protocol):
    """A job that the device has accepted. It owns its stream, events and staging until released."""

    @property
    def done(self) -> Event:
        """The event behind the job's last copy."""

    def wait_on(self, stream: Stream, group: int) -> None:
        """Make `stream` wait for a group; nothing to do once released. Call on a device thread."""

    def release(self, *, failed: bool = False) -> None:
        """Give everything back to the pools, or discard it after a failure. Idempotent."""


class Device(Protocol):
    """A device and its bounded pools of streams and events."""

    @property
    def kind(self) -> str:
        """`"cpu"`, `"cuda"` or `"fake"`."""

    @property
    def index(self) -> int:
        """The device's ordinal; 0 for the CPU."""

    def guard(self) -> AbstractContextManager[None]:
        """Set this device on the calling thread, verify it, and restore the former one.

        Raises `DeviceError` before the body runs if the device cannot be set (R18).
        """

    def prepare(self, spans: tuple[Span, ...], groups: tuple[int, ...]) -> None:
        """Make ready for jobs over these spans: what is compiled or loaded at first use, is now.

        Compiling takes a second and the GIL: without this, the first job stalls the loop. Blocks.
        """

    def record(self, stream: Stream) -> Event:
        """Record a pooled event on the engine's stream, at once, on any thread."""

    def submit(self, job: Job) -> Submitted:
        """Enqueue a job on a pooled stream. May block: call on a device thread, never a loop."""

    def synchronize(self, event: Event) -> None:
        """Block the thread (no spinning) until the event has happened. Raises `DeviceError`."""

    def recycle(self, event: Event) -> None:
        """Give an event of `record` back to its pool."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin a populated host range; returns the address by which the device reaches it."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def statistics(self) -> dict[str, int]:
        """Streams, events and staging bytes: live, free and the bounds."""

    def close(self) -> None:
        """Destroy the pools. Everything submitted must have ended."""
