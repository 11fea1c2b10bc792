"""The house is built here: settings, host memory, the lower tier, the cache; and taken down."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

from kvtide.core.cache import Cache
from kvtide.core.protocols import Tier
from kvtide.core.settings import Settings
from kvtide.storage.arena import Arena


@contextlib.asynccontextmanager
async def open_cache(
    settings: Settings | None = None, *, lower: Tier | None = None, close_deadline: float = 5.0
) -> AsyncIterator[Cache]:
    """A cache on the running loop; closed, in `close_deadline` seconds at most, at the end.

    lower: a tier below host memory, for example `kvtide.MemoryTier`.
    Raises `InvalidRequest`, `TierFailed`, `DeviceUnavailable`.
    """
    settings = settings or Settings()
    cache = Cache(settings, Arena(settings), lower)
    try:
        await cache.open()
        yield cache
    finally:
        await cache.close(close_deadline)


@contextlib.contextmanager
def open_blocking(
    settings: Settings | None = None, *, lower: Tier | None = None, close_deadline: float = 5.0
) -> Iterator[Cache]:
    """The same for callers without a loop: one runs on a thread of its own, and transfers are
    waited for with `transfer.wait(timeout)`. Raises `WouldBlockLoop` on a running loop's thread."""
    _refuse_running_loop()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kvtide-loop", daemon=True)
    thread.start()
    house = open_cache(settings, lower=lower, close_deadline=close_deadline)
    try:
        cache = asyncio.run_coroutine_threadsafe(house.__aenter__(), loop).result()
        try:
            yield cache
        finally:
            asyncio.run_coroutine_threadsafe(house.__aexit__(None, None, None), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _refuse_running_loop() -> None:
    from kvtide.core.errors import WouldBlockLoop

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WouldBlockLoop("this thread runs an event loop: use `async with open_cache(...)`")
