"""Host memory: one mapping cut into extents, prepared in the background.

An extent is handed out only when it is mapped, and registered with CUDA where the arena is pinned
(R24). Pages are touched before they are registered, so that the driver's lock is never held
while the kernel clears memory.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence

from kvtide.core.errors import DeviceUnavailable, GeometryMismatch, TierFailed
from kvtide.core.extents import extent_of, offset_of
from kvtide.core.protocols import Component
from kvtide.core.settings import Settings
from kvtide.kernels import device_for
from kvtide.kernels.device import Device, DeviceError
from kvtide.storage.endpoint import PagesEndpoint
from kvtide.storage.lanes import DeviceLanes
from kvtide.storage.paged import PagedKV

_MADV_POPULATE_WRITE = 23
_PAUSE = 0.0002
"""Between two registrations, so that other threads' kernel launches get the driver's lock."""

DeviceFor = Callable[[str, int], Device]


class Arena:
    """The memory of the host tier, and the devices that copy to and from it.

    device_for: where devices come from; tests pass their own.
    """

    def __init__(self, settings: Settings, device_for: DeviceFor = device_for) -> None:  # type: ignore[assignment]
        self.extent_bytes = settings.extent_bytes
        self.extents = settings.host_bytes // settings.extent_bytes
        self._settings = settings
        self._device_for = device_for
        self._lanes: dict[tuple[str, int], DeviceLanes] = {}
        self._lock = threading.Lock()
        nbytes = self.extents * self.extent_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._map = mmap.mmap(-1, nbytes, flags=flags)
        except OSError as error:
            raise TierFailed(f"cannot map {nbytes} bytes of host memory: {error}") from error
        self._bytes = memoryview(self._map)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._device_bases: dict[int, int] = {}
        self._registered: list[int] = []
        self._ready = 0
        self._since = time.time()
        self._failure: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.pin_device: Device | None = None

    # -- addresses ----------------------------------------------------------------------------

    def address(self, slot: int) -> int:
        """A slot's address in this process."""
        return self.base + extent_of(slot) * self.extent_bytes + offset_of(slot)

    def device_address(self, slot: int) -> int:
        """The address by which a device reaches the slot (R23)."""
        extent = extent_of(slot)
        base = self._device_bases.get(extent)
        if base is None:
            return self.address(slot)
        return base + offset_of(slot)

    def view(self, slot: int, nbytes: int) -> memoryview:
        """A slot's memory, writable."""
        at = extent_of(slot) * self.extent_bytes + offset_of(slot)
        return self._bytes[at : at + nbytes]

    # -- devices ------------------------------------------------------------------------------

    def endpoint(self, paged: PagedKV) -> PagesEndpoint:
        """Open described pages. Raises `GeometryMismatch`, `DeviceUnavailable`."""
        tokens = self._settings.block_tokens
        if paged.block_tokens is not None and paged.block_tokens != tokens:
            raise GeometryMismatch(
                f"these pages hold {paged.block_tokens} tokens a block, the cache {tokens}: "
                "set block_tokens to match"
            )
        for plane in paged.planes_at:
            if plane.nbytes % tokens:
                raise GeometryMismatch(
                    f"a plane of {plane.nbytes} bytes a block cannot hold {tokens} equal tokens: "
                    "block_tokens does not match these pages"
                )
        image = sum(plane.nbytes for plane in paged.planes_at)
        kind, index = paged.device
        if kind == "cuda" and image > self.extent_bytes:
            raise GeometryMismatch(
                f"one image has {image} bytes and an extent {self.extent_bytes}: no GPU copy may "
                "span two registered ranges, so set extent_bytes to at least the image"
            )
        return PagesEndpoint(self, paged, self._open(kind, index))

    def _open(self, kind: str, index: int) -> DeviceLanes:
        with self._lock:
            lanes = self._lanes.get((kind, index))
            if lanes is None:
                if kind != "cpu" and self.pin_device is None:
                    raise DeviceUnavailable(
                        "host memory is not pinned: open the cache with Settings(pin=True), or "
                        "load torch with a working GPU before it is opened"
                    )
                try:
                    lanes = DeviceLanes(self._device_for(kind, index))
                except (DeviceError, ValueError) as error:
                    raise DeviceUnavailable(f"{kind}:{index} cannot be used: {error}") from error
                self._lanes[kind, index] = lanes
            return lanes

    # -- life ---------------------------------------------------------------------------------

    def start(self, ready: Callable[[int], None], failed: Callable[[BaseException], None]) -> None:
        """Prepare all extents on a thread of our own. Raises `DeviceUnavailable` if memory is to
        be pinned and there is no GPU."""
        pin = self._settings.pin
        if pin is None:
            torch = sys.modules.get("torch")
            pin = torch is not None and torch.cuda.is_available()
        if pin:
            try:
                self.pin_device = self._device_for("cuda", 0)
            except (DeviceError, ImportError) as error:
                raise DeviceUnavailable(f"pinned memory needs a GPU: {error}") from error
        self._thread = threading.Thread(
            target=self._prepare, args=(ready, failed), name="kvtide-arena", daemon=True
        )
        self._thread.start()

    def _prepare(self, ready: Callable[[int], None], failed: Callable[[BaseException], None]) -> None:
        try:
            for number in range(self.extents):
                if self._stop.is_set():
                    return
                if self.pin_device is not None:
                    self._pin(number)
                    self._stop.wait(_PAUSE)
                self._ready += 1
                ready(number)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it goes to whoever waits
            self._failure = f"extent {self._ready}: {error}"
            self._since = time.time()
            cause = TierFailed(
                f"host memory could not be registered beyond {self._ready} of {self.extents} "
                f"extents: {error}; if locked memory is limited (ulimit -l), raise the limit or "
                "lower host_bytes"
            )
            cause.__cause__ = error
            failed(cause)

    def _pin(self, number: int) -> None:
        """Touch an extent, then register it; undone by itself if it fails."""
        device = self.pin_device
        assert device is not None
        address = self.base + number * self.extent_bytes
        _populate(address, self.extent_bytes)
        with device.guard():
            self._device_bases[number] = device.register(address, self.extent_bytes)
            self._registered.append(number)

    def health(self) -> Sequence[Component]:
        """The arena's progress and every device."""
        if self._failure is None:
            state, cause = "ok", None
        else:
            state = "degraded" if self._ready else "failed"
            cause = self._failure
        parts = [Component("host", state, self._since, cause)]
        with self._lock:
            parts.extend(lanes.health() for lanes in self._lanes.values())
        return parts

    def close(self, deadline: float, *, keep: bool) -> Sequence[str]:
        """End the threads, unregister and unmap; what is stuck keeps its memory. Blocks."""
        end = time.monotonic() + deadline
        self._stop.set()
        stuck: list[str] = []
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
            if self._thread.is_alive():
                stuck.append(self._thread.name)
        for lanes in self._lanes.values():
            stuck.extend(lanes.close(max(0.05, end - time.monotonic())))
        if stuck or keep:
            return stuck
        try:
            self._unpin()
            self._unmap()
        except (DeviceError, BufferError) as error:
            stuck.append(f"host memory: {error}")
        return stuck

    def _unmap(self) -> None:
        """Raises `BufferError` while somebody holds a view."""
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            # An error that was caught keeps its frames, and those the views that they worked on,
            # until the collector comes by.
            gc.collect()
            self._map.close()

    def _unpin(self) -> None:
        """Unregister everything; what the driver refuses stays mapped, and is an error at the end."""
        device = self.pin_device
        if device is None:
            return
        refused: DeviceError | None = None
        with device.guard():
            for number in self._registered:
                try:
                    device.unregister(self.base + number * self.extent_bytes)
                except DeviceError as error:
                    refused = error
        self._registered.clear()
        if refused is not None:
            raise refused


def _populate(address: int, nbytes: int) -> None:
    """Have the kernel back a range, outside the interpreter's lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
        # Older kernels don't know the advice: touching does the same.
        ctypes.memset(address, 0, nbytes)
