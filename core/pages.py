"""Attached pages: one rank's paged memory, as an engine uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvtide.core.blocks import Extra, Namespace
from kvtide.core.errors import Detached, InvalidRequest, KVTideError
from kvtide.core.hits import Hit
from kvtide.core.index import Space
from kvtide.core.loads import Load
from kvtide.core.protocols import Endpoint, PagedMemory, Stream
from kvtide.core.stores import Store

if TYPE_CHECKING:
    from kvtide.core.cache import Cache


class Pages:
    """The engine's pages, lent to the cache. Made by `Cache.attach`."""

    def __init__(
        self,
        cache: Cache,
        paged: PagedMemory,
        endpoint: Endpoint,
        namespace: Namespace,
        space: Space,
        rank: int,
    ) -> None:
        self.namespace = namespace
        self.rank = rank
        self.space = space
        self.endpoint = endpoint
        self.block_tokens = namespace.block_tokens
        self.image_bytes = namespace.image_bytes
        self._cache = cache
        self._paged: PagedMemory | None = paged
        self._page_count = paged.blocks
        self._layers = {layer for _, layer in namespace.planes}
        self._live: set[Load | Store] = set()

    def load(
        self,
        hit: Hit,
        block_ids: Sequence[int],
        *,
        after: Stream,
        deadline: float | None = None,
    ) -> Load:
        """Load a hit's blocks into pages; block `i` of the hit goes to page `block_ids[i]`.

        after: the engine's stream (None on the CPU): the load overwrites only what was read
        before this call. deadline: seconds, the setting's by default.
        Returns a transfer of `Loaded`; less than asked is no error. Raises `InvalidRequest`,
        `Detached`, `CacheClosed`, `DeviceUnavailable`.
        """
        links, found = hit.pinned()
        if hit.namespace != self.namespace.digest:
            raise InvalidRequest("this hit is of another namespace than these pages")
        ids = self._check_ids(block_ids)
        if len(ids) != len(links):
            raise InvalidRequest(
                f"the hit has {len(links)} blocks and block_ids {len(ids)}: they must agree "
                "(slice the hit to load less)"
            )
        seconds = self._check_deadline(deadline)
        mark = self._ready().record(after)
        cache = self._cache
        with cache.lock:
            self._check_open(mark)
            links, found = hit.pinned()
            load = Load(cache, self, links, found, ids, mark, seconds)
            self._enter(load)
        return load

    def store(
        self,
        tokens: Sequence[int] | None,
        block_ids: Sequence[int],
        *,
        after: Stream,
        start: int = 0,
        salt: bytes | str | None = None,
        extra: Extra = b"",
        hashes: Sequence[bytes] | None = None,
        deadline: float | None = None,
    ) -> Store:
        """Store the full blocks of a prompt from token `start` on.

        tokens: the whole prompt from its first token, or None with the engine's own `hashes`.
        block_ids: the pages of the blocks from `start` on; one more for a partial tail is
        allowed and ignored. start: a multiple of `block_tokens`.
        after: the engine's stream (None on the CPU): the store reads only what was written
        before this call; the pages must not be overwritten before it is done.
        Returns a transfer of `Stored`, which may raise `NoRoom`. Raises `InvalidRequest`,
        `Detached`, `CacheClosed`, `DeviceUnavailable`.
        """
        chain = self._cache.chain(self.namespace, tokens, hashes, salt, extra)
        if type(start) is not int or start < 0 or start % self.block_tokens:
            raise InvalidRequest(f"start must be a multiple of {self.block_tokens}, not {start}")
        first = start // self.block_tokens
        if first > len(chain):
            raise InvalidRequest(f"start ({start}) lies behind the last full block")
        links = [(chain[at], chain[at - 1] if at else None) for at in range(first, len(chain))]
        ids = self._check_ids(block_ids)
        if len(ids) not in (len(links), len(links) + 1):
            raise InvalidRequest(
                f"there are {len(links)} full blocks from token {start} on and "
                f"{len(ids)} block_ids: pass one for each (and at most one more for the tail)"
            )
        seconds = self._check_deadline(deadline)
        mark = self._ready().record(after)
        cache = self._cache
        with cache.lock:
            self._check_open(mark)
            store = Store(cache, self, links, ids[: len(links)], mark, seconds)
            self._enter(store)
        return store

    async def detach(self) -> None:
        """Return once no copy can touch the pages any more; they raise `Detached` from the call
        on. The blocks stay cached."""
        with self._cache.lock:
            live = list(self._live)
            self._cache.forget_pages(self)
            self._paged = None
        for transfer in live:
            await transfer.settled
        self.endpoint.close()

    def check_layer(self, layer: int) -> None:
        """Raises `InvalidRequest` for a layer that no plane belongs to."""
        if layer not in self._layers:
            raise InvalidRequest(f"these pages have no layer {layer}")

    def _enter(self, transfer: Load | Store) -> None:
        self._live.add(transfer)
        transfer.settled.when_over(lambda: self._live.discard(transfer))
        transfer.begin()

    def _ready(self) -> Endpoint:
        self._cache.check_open()
        if self._paged is None:
            raise Detached("these pages were detached")
        return self.endpoint

    def _check_open(self, mark: object) -> None:
        try:
            self._ready()
        except KVTideError:
            self.endpoint.forget(mark)
            raise

    def _check_deadline(self, deadline: float | None) -> float:
        if deadline is None:
            return self._cache.settings.deadline
        if not isinstance(deadline, int | float) or not 0 < deadline < float("inf"):
            raise InvalidRequest(f"deadline must be a positive number of seconds, not {deadline}")
        return deadline

    def _check_ids(self, block_ids: Sequence[int]) -> list[int]:
        plain = block_ids.tolist() if hasattr(block_ids, "tolist") else block_ids
        if not isinstance(plain, Iterable):
            raise InvalidRequest(f"block_ids must be a sequence, not {type(block_ids).__name__}")
        ids = list(plain)
        if not all(type(page) is int for page in ids):
            raise InvalidRequest("block_ids must be integers")
        if ids and not (min(ids) >= 0 and max(ids) < self._page_count):
            raise InvalidRequest(
                f"block_ids must lie in [0, {self._page_count}): got {min(ids)} to {max(ids)}"
            )
        if len(set(ids)) != len(ids):
            raise InvalidRequest("block_ids holds a page twice")
        return ids
