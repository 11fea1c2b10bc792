"""Errors, named by what happened to the caller. A miss is an answer, not an error."""

from __future__ import annotations


class KVTideError(Exception):
    """Everything that kvtide raises on purpose derives from this."""


class InvalidRequest(KVTideError, ValueError):
    """The arguments make no sense; nothing was changed. The message says what to pass instead."""


class GeometryMismatch(InvalidRequest):
    """The described pages cannot be what they are said to be."""


class UnsupportedLayer(InvalidRequest):
    """A model's cache layer does not hold a full prefix, so its blocks cannot be reused."""


class UnknownNamespace(KVTideError, LookupError):
    """No pages were ever attached under this namespace."""


class NoRoom(KVTideError):
    """The room asked for did not become free in time.

    `leased` and `dirty` are the bytes that eviction was not allowed to take.
    """

    def __init__(self, message: str, *, leased: int = 0, dirty: int = 0) -> None:
        super().__init__(f"{message} (leased: {leased} bytes, dirty: {dirty} bytes)")
        self.leased = leased
        self.dirty = dirty


class DeadlineExceeded(KVTideError, TimeoutError):
    """The waiting ended, the copy did not: block ids are not reusable before `settled`."""


class QueueFull(KVTideError):
    """A bounded queue was full; nothing was started. Wait for earlier transfers and try again."""


class TransferFailed(KVTideError):
    """A copy failed; nothing of it was published. The cause is chained."""


class DeviceUnavailable(TransferFailed):
    """The device could not be used, or is lost; its pages are closed."""


class TierFailed(KVTideError):
    """A tier could not read or write an image."""


class CorruptImage(TierFailed):
    """An image's bytes are not what was written; it is dropped and becomes a miss."""


class CacheClosed(KVTideError):
    """The cache is closed or closing."""


class Detached(KVTideError):
    """These pages were detached."""


class WouldBlockLoop(KVTideError, RuntimeError):
    """A blocking wait was asked for on the thread of a running event loop; await instead."""


class IllegalTransition(KVTideError, RuntimeError):
    """A block was asked to do what its state does not allow; nothing was changed."""
