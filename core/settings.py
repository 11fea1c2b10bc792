"""What a cache can be told, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from kvtide.core.errors import InvalidRequest

PAGE = 4096
"""Slots, extents and direct I/O are aligned to this many bytes."""

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in bytes, times in seconds.

    host_bytes: capacity of the host tier; a multiple of `extent_bytes` is used.
    extent_bytes: the unit in which host memory is registered and shared between namespaces.
    block_tokens: tokens a block; a power of two is customary, any positive number works.
    policy: order of eviction, `"lru"` or `"arc"` (scan-resistant).
    on_full: a store without room waits until its deadline (`"wait"`) or is counted and
        dropped (`"drop"`).
    max_inflight_bytes: copies to and from pages that may be under way at once; more wait in a
        FIFO queue. One transfer larger than that runs alone.
    max_queued: transfers that may wait for room or for their turn; beyond it stores are dropped
        (counted) and loads raise `QueueFull`.
    deadline: how long a transfer may take unless the call says otherwise.
    pin: register host memory with CUDA. None: do so if torch is loaded and sees a GPU.
    quotas: bytes of host memory that a namespace may use at most, by its id; each geometry that is
        attached under an id is a namespace of its own.

    Raises `InvalidRequest`.
    """

    host_bytes: int = 4 * GIB
    extent_bytes: int = 16 * MIB
    block_tokens: int = 16
    policy: Literal["lru", "arc"] = "lru"
    on_full: Literal["wait", "drop"] = "wait"
    max_inflight_bytes: int = 1 * GIB
    max_queued: int = 10_000
    deadline: float = 30.0
    pin: bool | None = None
    quotas: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name in ("host_bytes", "extent_bytes", "block_tokens", "max_inflight_bytes", "max_queued"):
            if type(getattr(self, name)) is not int:
                raise InvalidRequest(f"{name} must be a whole number, not {getattr(self, name)!r}")
        # The caller's mapping may change; what was validated does not.
        object.__setattr__(self, "quotas", MappingProxyType(dict(self.quotas)))
        if self.extent_bytes < PAGE or self.extent_bytes % PAGE:
            raise InvalidRequest(f"extent_bytes must be a positive multiple of {PAGE}")
        if self.host_bytes < self.extent_bytes:
            raise InvalidRequest(
                f"host_bytes ({self.host_bytes}) is less than one extent ({self.extent_bytes}): "
                "raise host_bytes or lower extent_bytes"
            )
        for name in ("block_tokens", "max_inflight_bytes", "max_queued"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1")
        if not 0 < self.deadline < float("inf"):
            raise InvalidRequest("deadline must be a positive, finite number of seconds")
        if self.policy not in ("lru", "arc"):
            raise InvalidRequest(f'policy must be "lru" or "arc", not {self.policy!r}')
        if self.on_full not in ("wait", "drop"):
            raise InvalidRequest(f'on_full must be "wait" or "drop", not {self.on_full!r}')
        if any(quota < 1 for quota in self.quotas.values()):
            raise InvalidRequest("a quota must be at least 1 byte")
