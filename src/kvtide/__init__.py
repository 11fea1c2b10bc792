"""kvtide: a tiered KV cache for LLM inference. See README.md.

Names load at first use, so that importing this takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.app.house import open_blocking, open_cache
    from kvtide.core.blocks import Namespace
    from kvtide.core.cache import Cache, Closed
    from kvtide.core.errors import (
        CacheClosed,
        CorruptImage,
        DeadlineExceeded,
        Detached,
        DeviceUnavailable,
        GeometryMismatch,
        IllegalTransition,
        InvalidRequest,
        KVTideError,
        NoRoom,
        QueueFull,
        TierFailed,
        TransferFailed,
        UnknownNamespace,
        UnsupportedLayer,
        WouldBlockLoop,
    )
    from kvtide.core.hits import Held, Hit
    from kvtide.core.loads import Loaded
    from kvtide.core.pages import Pages
    from kvtide.core.protocols import Component
    from kvtide.core.settings import Settings
    from kvtide.core.statistics import CacheStatistics, TierStatistics
    from kvtide.core.stores import Stored
    from kvtide.core.transfers import Transfer
    from kvtide.kernels.bridge import completed
    from kvtide.storage.memory import Faults, MemoryTier
    from kvtide.storage.paged import PagedKV, Plane

__version__ = "0.1.0"

_HOMES = {
    "app.house": ("open_blocking", "open_cache"),
    "core.blocks": ("Namespace",),
    "core.cache": ("Cache", "Closed"),
    "core.errors": (
        "CacheClosed",
        "CorruptImage",
        "DeadlineExceeded",
        "Detached",
        "DeviceUnavailable",
        "GeometryMismatch",
        "IllegalTransition",
        "InvalidRequest",
        "KVTideError",
        "NoRoom",
        "QueueFull",
        "TierFailed",
        "TransferFailed",
        "UnknownNamespace",
        "UnsupportedLayer",
        "WouldBlockLoop",
    ),
    "core.hits": ("Held", "Hit"),
    "core.loads": ("Loaded",),
    "core.pages": ("Pages",),
    "core.protocols": ("Component",),
    "core.settings": ("Settings",),
    "core.statistics": ("CacheStatistics", "TierStatistics"),
    "core.stores": ("Stored",),
    "core.transfers": ("Transfer",),
    "kernels.bridge": ("completed",),
    "storage.memory": ("Faults", "MemoryTier"),
    "storage.paged": ("PagedKV", "Plane"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cache",
    "CacheClosed",
    "CacheStatistics",
    "Closed",
    "Component",
    "CorruptImage",
    "DeadlineExceeded",
    "Detached",
    "DeviceUnavailable",
    "Faults",
    "GeometryMismatch",
    "Held",
    "Hit",
    "IllegalTransition",
    "InvalidRequest",
    "KVTideError",
    "Loaded",
    "MemoryTier",
    "Namespace",
    "NoRoom",
    "PagedKV",
    "Pages",
    "Plane",
    "QueueFull",
    "Settings",
    "Stored",
    "TierFailed",
    "TierStatistics",
    "Transfer",
    "TransferFailed",
    "UnknownNamespace",
    "UnsupportedLayer",
    "WouldBlockLoop",
    "completed",
    "open_blocking",
    "open_cache",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvtide' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"kvtide.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
