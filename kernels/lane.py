"""A lane: a stream, the staging that its copies go through, and the tables that its kernels read.

All of a lane's work is on one stream, so staging is reused in order without an event. A lane
belongs to one job at a time; tables and staging stay as they are until the job is released (R20).
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Sequence
from ctypes import memmove
from typing import Any

from kvtide.kernels.chunks import PITCH
from kvtide.kernels.foreign import end_event, make_event
from kvtide.kernels.runtime import check, cudart

BATCH = 4096
"""Copies handed to the driver in one call."""


class Lane:
    """Made and used under the device's guard. `high`: a priority above the engine's streams."""

    def __init__(self, device: int, staging_bytes: int, high: bool) -> None:
        runtime = cudart()
        self._device = device
        self._staging_bytes = staging_bytes
        self._staging = 0
        self._table_bytes = 0
        self._table_host = 0
        self._table_device = 0
        self._retired: list[tuple[int, int]] = []
        self._torch: Any = None
        code, least, greatest = runtime.cudaDeviceGetStreamPriorityRange()
        check("cudaDeviceGetStreamPriorityRange", (code,))
        made = runtime.cudaStreamCreateWithPriority(
            runtime.cudaStreamNonBlocking, greatest if high else least
        )
        self.stream = int(check("cudaStreamCreateWithPriority", made))
        # The one event that a thread waits for; see foreign.Sleeper for why there is only one.
        self.done = make_event(blocking=True)

    @property
    def staging_live(self) -> int:
        """Bytes of device memory that the lane holds for staging; none before its first use."""
        return self._staging_bytes if self._staging else 0

    @property
    def torch_stream(self) -> Any:
        """The stream as torch, and so triton, knows it."""
        if self._torch is None:
            torch: Any = importlib.import_module("torch")
            self._torch = torch.cuda.ExternalStream(self.stream, device=self._device)
        return self._torch

    def staging(self) -> int:
        """Address of the staging buffer."""
        if not self._staging:
            self._staging = int(check("cudaMalloc", cudart().cudaMalloc(self._staging_bytes)))
        return self._staging

    def put_table(self, table: array[int]) -> int:
        """Enqueue the upload of a job's tables; returns their address on the device.

        Once a job: the pinned side is rewritten by the lane's next job only.
        """
        runtime = cudart()
        nbytes = len(table) * table.itemsize
        if nbytes > self._table_bytes:
            room = max(1 << 16, 1 << (nbytes - 1).bit_length())
            # The former ones are kept until the lane ends: freeing would stop the whole device.
            self._retired.append((self._table_host, self._table_device))
            self._table_bytes = self._table_host = self._table_device = 0
            made = runtime.cudaHostAlloc(room, runtime.cudaHostAllocPortable)
            self._table_host = int(check("cudaHostAlloc", made))
            self._table_device = int(check("cudaMalloc", runtime.cudaMalloc(room)))
            self._table_bytes = room
        memmove(self._table_host, table.buffer_info()[0], nbytes)
        down = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        to = self._table_device
        sent = runtime.cudaMemcpyAsync(to, self._table_host, nbytes, down, self.stream)
        check("cudaMemcpyAsync", sent)
        return to

    def close(self) -> None:
        """Free everything. Errors are of no use here: a lost device has freed it already."""
        runtime = cudart()
        end_event(self.done)
        runtime.cudaStreamDestroy(self.stream)
        for host, device in [*self._retired, (self._table_host, self._table_device)]:
            if host:
                runtime.cudaFreeHost(host)
            if device:
                runtime.cudaFree(device)
        if self._staging:
            runtime.cudaFree(self._staging)
        self._staging = self._table_host = self._table_device = 0
        self._retired.clear()
        runtime.cudaGetLastError()


class Copier:
    """Enqueues many copies at once, or one by one where the driver cannot do better."""

    def __init__(self) -> None:
        self._attributes: Any = None
        self.batched = hasattr(cudart(), "cudaMemcpyBatchAsync")

    def copy(self, to: Sequence[int], source: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        """Copy `nbytes[i]` from `source[i]` to `to[i]`; no order among them is promised."""
        at = 0
        while at < len(to):
            end = min(len(to), at + BATCH)
            if self.batched and not self._batch(to[at:end], source[at:end], nbytes[at:end], stream):
                self.batched = False
            if not self.batched:
                self._one_by_one(to[at:end], source[at:end], nbytes[at:end], stream)
            at = end

    def _batch(self, to: Sequence[int], source: Sequence[int], nbytes: Sequence[int], stream: int) -> bool:
        """False if this driver has no batches: nothing was enqueued then."""
        runtime = cudart()
        if self._attributes is None:
            self._attributes = runtime.cudaMemcpyAttributes()
            order = runtime.cudaMemcpySrcAccessOrder
            self._attributes.srcAccessOrder = order.cudaMemcpySrcAccessOrderStream
        # The result has one element with CUDA 13, two (the failing index) before; nobody reads it.
        result = runtime.cudaMemcpyBatchAsync(
            list(to), list(source), list(nbytes), len(to), [self._attributes], [0], 1, stream
        )
        code = int(result[0])
        if code in (36, 801):  # the driver is older than the call; or does not support it
            runtime.cudaGetLastError()
            return False
        check("cudaMemcpyBatchAsync", result[:1])
        return True

    def _one_by_one(
        self, to: Sequence[int], source: Sequence[int], nbytes: Sequence[int], stream: int
    ) -> None:
        runtime = cudart()
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        for target, origin, size in zip(to, source, nbytes, strict=True):
            check("cudaMemcpyAsync", runtime.cudaMemcpyAsync(target, origin, size, kind, stream))


def table_of(rows: Sequence[array[int]], blocks: Sequence[int]) -> array[int]:
    """One table for a job: the tile rows of all pieces, then the page numbers."""
    table: array[int] = array("q")
    for part in rows:
        table.extend(part)
    table.extend(blocks)
    return table


assert PITCH % 16 == 0, "staging must suit the widest element"
