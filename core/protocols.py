"""What core needs of the parts that move bytes. Nothing here assumes one address space (R17)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvtide.core.outcome import Outcome

Stream = Any
"""The engine's stream handle; None for pages on the CPU."""

Mark = Any
"""An event that an endpoint recorded on the engine's stream."""


@dataclass(frozen=True, slots=True)
class Label:
    """What identifies an image in every tier (R27)."""

    namespace: bytes
    key: bytes
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Component:
    """One part's health. state: `"ok"`, `"degraded"` or `"failed"`; since: Unix seconds."""

    name: str
    state: str
    since: float
    cause: str | None = None


class Ticket(Protocol):
    """A copy that the device has accepted."""

    def wait_on(self, stream: Stream, layer: int) -> Outcome[None]:
        """Make a stream wait for one layer; over when that wait is enqueued."""


class Endpoint(Protocol):
    """Attached pages, as the source and target of copies."""

    def record(self, after: Stream) -> Mark:
        """Record an event on the engine's stream now. Raises what makes no sense."""

    def forget(self, mark: Mark) -> None:
        """A mark that no copy will use."""

    def close(self) -> None:
        """Let go of the pages' memory; nothing is copied any more."""

    def store(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        mark: Mark,
        submitted: Callable[[Ticket], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Copy pages into host slots behind `mark`. Returns at once; `done` is called exactly
        once, on a thread of the endpoint's, when no byte is touched any more. Raises
        `QueueFull`, and then calls nothing."""

    def load(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        mark: Mark,
        submitted: Callable[[Ticket], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Copy host slots into pages behind `mark`; otherwise like `store`."""


@runtime_checkable
class PagedMemory(Protocol):
    """The engine's paged memory as its owner describes it."""

    @property
    def blocks(self) -> int:
        """How many pages every plane has."""

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """(bytes a block, layer) of each plane, in the image's order."""

    @property
    def dtype(self) -> str:
        """Name of the element type, part of the namespace."""


class HostMemory(Protocol):
    """The arena behind the host tier."""

    def endpoint(self, paged: Any) -> Endpoint:
        """Open the described pages for copies to and from this arena."""

    def view(self, slot: int, nbytes: int) -> memoryview:
        """A slot's memory, writable."""

    def start(self, ready: Callable[[int], None], failed: Callable[[BaseException], None]) -> None:
        """Prepare extents in the background: `ready(number)` as each may be used, `failed` if
        one cannot be had; both on a thread of the arena's."""

    def health(self) -> Sequence[Component]:
        """The arena and the devices it knows."""

    def close(self, deadline: float, *, keep: bool) -> Sequence[str]:
        """End the threads and, unless `keep`, unmap. Blocks; returns what is stuck."""


class Tier(Protocol):
    """A place for images below host memory. It moves bytes; what it holds is the index's to say.

    name: as in statistics. durable: whether what it holds outlives the process.
    capacity_bytes, extent_bytes: its room. Every method may be cancelled; a copy that a
    cancelled call had begun goes on into memory that the caller keeps until `settled`.
    """

    name: str
    durable: bool
    capacity_bytes: int
    extent_bytes: int

    async def open(self) -> None:
        """Get ready. Raises `TierFailed`."""

    async def write(self, slot: int, label: Label, image: memoryview) -> None:
        """Put an image into a slot. Raises `TierFailed`."""

    async def read(self, slot: int, label: Label, into: memoryview) -> None:
        """Get and verify an image. Raises `CorruptImage`, `TierFailed`."""

    async def close(self) -> None:
        """Let go of everything."""
