"""Attached pages as the source and target of copies: from page numbers to addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kvtide.core.errors import InvalidRequest, QueueFull
from kvtide.core.outcome import Outcome
from kvtide.core.protocols import Mark, Stream, Ticket
from kvtide.kernels.device import DeviceError, Direction, Job, Submitted
from kvtide.kernels.pool import PoolExhausted
from kvtide.kernels.worker import QueueFull as ThreadQueueFull
from kvtide.kernels.worker import WorkerClosed

if TYPE_CHECKING:
    from kvtide.storage.arena import Arena
    from kvtide.storage.lanes import DeviceLanes
    from kvtide.storage.paged import PagedKV


GROUP_BYTES = 512 << 10
"""Bytes of an image from which on layers form a group with an event of its own: smaller groups
let a layer start sooner, and cost submission time and bandwidth."""


@lru_cache(maxsize=64)
def layer_groups(planes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Ends of the groups, as indices of planes, and the group that each layer's last plane is in."""
    ends: list[int] = []
    group_of: dict[int, int] = {}
    nbytes = 0
    for at, (size, layer) in enumerate(planes):
        group_of[layer] = len(ends)
        nbytes += size
        last = at + 1 == len(planes)
        if last or (nbytes >= GROUP_BYTES and planes[at + 1][1] != layer):
            ends.append(at + 1)
            nbytes = 0
    return tuple(ends), group_of


class PagesEndpoint:
    """One attached `PagedKV` on its device."""

    def __init__(self, arena: Arena, paged: PagedKV, lanes: DeviceLanes) -> None:
        self._arena = arena
        self._paged: PagedKV | None = paged
        self._lanes = lanes
        self._spans = paged.spans
        self._groups, self._group_of = layer_groups(paged.planes)
        lanes.prepare(self._spans, self._groups)

    def record(self, after: Stream) -> Mark:
        """Record an event on the engine's stream. Raises `DeviceUnavailable`, `InvalidRequest`."""
        self._lanes.check()
        try:
            with self._lanes.device.guard():
                return self._lanes.device.record(after)
        except DeviceError as error:
            raise self._lanes.explain(error, began=False) from error
        except (TypeError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        except PoolExhausted as error:
            raise QueueFull(f"{self._lanes.name} takes no more copies now: {error}") from error

    def close(self) -> None:
        """Let go of the pages' memory; copies that run keep it."""
        self._paged = None

    def forget(self, mark: Mark) -> None:
        """A mark that no copy will use."""
        self._lanes.device.recycle(mark)

    def store(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        mark: Mark,
        submitted: Callable[[Ticket], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Pages to host slots; see `core.protocols.Endpoint`."""
        self._copy(Direction.STORE, blocks, slots, mark, submitted, done)

    def load(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        mark: Mark,
        submitted: Callable[[Ticket], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Host slots to pages; see `core.protocols.Endpoint`."""
        self._copy(Direction.LOAD, blocks, slots, mark, submitted, done)

    def _copy(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        mark: Mark,
        submitted: Callable[[Ticket], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        lanes, arena, paged = self._lanes, self._arena, self._paged
        lanes.check()
        job = Job(
            direction=direction,
            spans=self._spans,
            blocks=blocks,
            hosts=[arena.address(slot) for slot in slots],
            device_hosts=[arena.device_address(slot) for slot in slots],
            groups=self._groups,
            after=mark,
        )
        began = False

        def submit() -> None:
            nonlocal began
            began = True
            accepted = lanes.device.submit(job)
            lanes.device.recycle(mark)
            submitted(_Ticket(lanes, accepted, direction, self._group_of))
            key = getattr(accepted, "key", None)
            try:
                lanes.bridge.call_when(accepted.done, lambda error: ended(accepted, error), key)
            except RuntimeError:  # it is closed, or there is no thread to be had: wait here instead
                wait(accepted)

        def wait(accepted: Submitted) -> None:
            try:
                lanes.device.synchronize(accepted.done)
            except DeviceError as error:
                ended(accepted, error)
            else:
                ended(accepted, None)

        def ended(accepted: Submitted, error: BaseException | None) -> None:
            nonlocal paged
            accepted.release(failed=error is not None)
            paged = None  # it kept the memory alive until here
            done(None if error is None else lanes.explain(error, began=True))

        def refused(error: BaseException) -> None:
            lanes.device.recycle(mark)
            done(lanes.explain(error, began=began))

        try:
            lanes.threads[direction].submit(submit, refused)
        except (ThreadQueueFull, WorkerClosed) as error:
            raise QueueFull(f"{lanes.name} takes no more copies now: {error}") from error


class _Ticket:
    """A submitted copy, as something that streams can wait for."""

    def __init__(
        self, lanes: DeviceLanes, accepted: Submitted, direction: Direction, group_of: Mapping[int, int]
    ) -> None:
        self._lanes = lanes
        self._accepted = accepted
        self._direction = direction
        self._group_of = group_of

    def wait_on(self, stream: Stream, layer: int) -> Outcome[None]:
        """Enqueue the wait on the device's thread, since a full stream blocks who enqueues."""
        enqueued: Outcome[None] = Outcome()

        def wait() -> None:
            self._accepted.wait_on(stream, self._group_of[layer])
            enqueued.set(None)

        def failed(error: BaseException) -> None:
            enqueued.fail(self._lanes.explain(error, began=True))

        try:
            self._lanes.threads[self._direction].submit(wait, failed)
        except (ThreadQueueFull, WorkerClosed) as error:
            enqueued.fail(QueueFull(f"{self._lanes.name} takes no more work now: {error}"))
        return enqueued
