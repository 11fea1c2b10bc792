"""The cache: attach, match, held, statistics, health, close.

One lock guards all decisions and is never held across an await, I/O or a device call (R16).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from kvtide.core.below import Below
from kvtide.core.blocks import Extra, Namespace, bind_hashes, hash_chain
from kvtide.core.errors import (
    CacheClosed,
    InvalidRequest,
    KVTideError,
    TierFailed,
    UnknownNamespace,
)
from kvtide.core.extents import Extents, slot_bytes
from kvtide.core.gate import Gate
from kvtide.core.hits import Held, Hit
from kvtide.core.index import Block, Space
from kvtide.core.outcome import Outcome
from kvtide.core.pages import Pages
from kvtide.core.protocols import Component, HostMemory, PagedMemory, Tier
from kvtide.core.settings import Settings
from kvtide.core.shelf import Link, Shelf
from kvtide.core.states import HELD
from kvtide.core.statistics import CacheStatistics, TierStatistics, tier_statistics
from kvtide.core.supervision import Tasks
from kvtide.core.transfers import Transfer

COPIES_AT_ONCE = 512
"""Transfers that the devices' queues hold; their bound is above it."""


@dataclass(frozen=True, slots=True)
class Closed:
    """How a cache was closed. stuck: what did not end in time, and keeps its memory."""

    stuck: tuple[str, ...]


class Cache:
    """A tiered cache of KV blocks, in the engine's process. Made by `kvtide.open_cache`.

    `match`, `held`, `attach` and the pages' `load` and `store` are plain functions that any
    thread may call; only waiting needs a loop (or `Transfer.wait`).
    """

    def __init__(self, settings: Settings, memory: HostMemory, lower: Tier | None) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self.host = Shelf("host", Extents(settings.extent_bytes), settings.policy, spills=lower is not None)
        self.host.planned_extents = settings.host_bytes // settings.extent_bytes
        self.host_failure: KVTideError | None = None
        self.gate = Gate(settings.max_inflight_bytes, COPIES_AT_ONCE)
        self.ledger: set[Transfer[Any]] = set()
        self.namespaces: dict[str, Namespace] = {}
        self.tasks: Tasks
        self.dropped_blocks = 0
        self.promoted_blocks = 0
        self.stored_bytes = 0
        self.loaded_bytes = 0
        self.lookups = 0
        self.lookup_tokens = 0
        self.hit_tokens = 0
        self.errors: dict[str, int] = {}
        self._memory = memory
        self._below = Below(self, lower, settings.policy) if lower is not None else None
        self._spaces: dict[tuple[str, str], Space] = {}
        self._by_id: dict[str, set[str]] = {}
        self._pages: set[Pages] = set()
        self._loop: asyncio.AbstractEventLoop
        self._state = "new"
        self._since = time.time()
        self._closing: asyncio.Future[Closed] | None = None

    # -- birth and end ------------------------------------------------------------------------

    async def open(self) -> None:
        """Start on the running loop. Raises `TierFailed` if the lower tier does not open."""
        self._loop = asyncio.get_running_loop()
        self.tasks = Tasks(self._loop)
        if self._below is not None:
            await self._below.tier.open()
        self._state = "open"
        self._memory.start(self._extent_ready, self._extent_failed)

    async def close(self, deadline: float = 5.0) -> Closed:
        """End in `deadline` seconds, always (R15).

        What waits gets `CacheClosed`; what copies is awaited; what is stuck keeps its memory and
        is named in the result. A second call gets the first one's result.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(deadline))
        return await asyncio.shield(self._closing)

    async def _close(self, deadline: float) -> Closed:
        end = time.monotonic() + deadline

        def left() -> float:
            return max(0.1, end - time.monotonic())

        with self.lock:
            self._state, self._since = "closing", time.time()
            for transfer in list(self.ledger):
                transfer.shut()
            copying = list(self.ledger)
        try:
            async with asyncio.timeout(left()):
                for transfer in copying:
                    await transfer.settled
        except TimeoutError:
            pass  # named below
        stuck = [f"{type(t).__name__.lower()} of {t.nbytes} bytes" for t in self.ledger]
        with self.lock:
            error = CacheClosed("the cache was closed")
            self.host.fail_claims(error)
            if self._below is not None:
                self._below.shelf.fail_claims(error)
        stuck += await self.tasks.close(left())
        if self._below is not None:
            try:
                async with asyncio.timeout(left()):
                    await self._below.tier.close()
            except (TimeoutError, TierFailed):
                stuck.append(f"tier {self._below.tier.name}")
        try:
            # Unregistering waits for the GPU to be idle, which may be later than our deadline.
            async with asyncio.timeout(left() + 0.5):
                stuck += await _on_thread(partial(self._memory.close, left(), keep=bool(stuck)))
        except TimeoutError:
            stuck.append("host memory")
        self._state, self._since = "closed", time.time()
        return Closed(tuple(stuck))

    def check_open(self) -> None:
        """Raises `CacheClosed` unless open."""
        if self._state != "open":
            raise CacheClosed("the cache is closed")

    def _extent_ready(self, number: int) -> None:
        with self.lock:
            self.host.extents.add(number)
            self.host.serve()

    def _extent_failed(self, error: BaseException) -> None:
        with self.lock:
            failure = error if isinstance(error, KVTideError) else TierFailed(str(error))
            self.host_failure = failure
            self.host.planned_extents = 0
            self.host.fail_claims(failure)

    # -- for engines --------------------------------------------------------------------------

    def attach(self, paged: Any, *, namespace: str, weights: str = "", shard: int = 0, of: int = 1) -> Pages:
        """Lend the engine's pages to the cache, as rank `shard` of `of`.

        paged: a `kvtide.PagedKV`. namespace: the caller's name for the model; weights: its
        revision. Raises `GeometryMismatch`, `InvalidRequest`, `DeviceUnavailable`,
        `CacheClosed`. A plain, quick function.
        """
        self.check_open()
        if not isinstance(paged, PagedMemory):
            raise InvalidRequest(
                f"attach takes described pages, not {type(paged).__name__}: use PagedKV.from_tensors"
            )
        if not isinstance(namespace, str) or not namespace:
            raise InvalidRequest("namespace must name the model")
        if type(of) is not int or type(shard) is not int or not 0 <= shard < of:
            raise InvalidRequest(f"shard must lie in [0, {of}), not {shard}")
        made = _namespace(namespace, weights, paged.dtype, self.settings.block_tokens, paged.planes, of)
        endpoint = self._memory.endpoint(paged)
        name = made.digest.hex()
        with self.lock:
            self.check_open()
            self.namespaces[name] = made
            self._by_id.setdefault(namespace, set()).add(name)
            pages = Pages(self, paged, endpoint, made, self._space(name, "host"), shard)
            self._pages.add(pages)
        return pages

    def match(
        self,
        tokens: Sequence[int] | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        namespace: str | None = None,
        salt: bytes | str | None = None,
        extra: Extra = b"",
    ) -> Hit:
        """The longest held prefix of a prompt, pinned: use it in `with` or `async with`.

        tokens: the whole prompt; or `hashes`: the engine's own, of its full blocks, the last of
        which is taken for the prompt's end. namespace: the id given to `attach`, or the hex
        digest where one id has several geometries; None if there is but one.
        Raises `InvalidRequest`, `UnknownNamespace`, `CacheClosed`.
        """
        self.check_open()
        made = self._named(namespace)
        chain = self._matchable(made, tokens, hashes, salt, extra)
        with self.lock:
            self.check_open()
            blocks = self._prefix(chain)
            self._count_lookup(made, len(chain), blocks)
            return Hit(self, made.digest, _links(chain[: len(blocks)]), blocks)

    def held(
        self,
        tokens: Sequence[int] | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        namespace: str | None = None,
        salt: bytes | str | None = None,
        extra: Extra = b"",
    ) -> Held:
        """How much `match` would find. Takes no pin, counts as no use, and raises the same."""
        self.check_open()
        made = self._named(namespace)
        chain = self._matchable(made, tokens, hashes, salt, extra)
        by_tier: dict[str, int] = {}
        with self.lock:
            blocks = self._prefix(chain)
        for block in blocks:
            tier = block.space.tier
            by_tier[tier] = by_tier.get(tier, 0) + made.block_tokens
        return Held(len(blocks) * made.block_tokens, by_tier)

    def statistics(self) -> CacheStatistics:
        """Everything that is counted, at one moment."""
        with self.lock:
            tiers: list[TierStatistics] = [tier_statistics(self.host)]
            if self._below is not None:
                tiers.append(tier_statistics(self._below.shelf))
            return CacheStatistics(
                tiers=tuple(tiers),
                lookups=self.lookups,
                lookup_tokens=self.lookup_tokens,
                hit_tokens=self.hit_tokens,
                inflight_transfers=len(self.ledger),
                inflight_bytes=self.gate.bytes,
                waiting_for_turn=len(self.gate),
                stored_bytes=self.stored_bytes,
                loaded_bytes=self.loaded_bytes,
                promoted_blocks=self.promoted_blocks,
                dropped_blocks=self.dropped_blocks,
                errors=dict(self.errors),
            )

    def health(self) -> tuple[Component, ...]:
        """Each part with its state, since when and why."""
        cache = Component(
            "cache",
            "ok" if self._state == "open" else "failed",
            self._since,
            None if self._state == "open" else f"the cache is {self._state}",
        )
        parts = [cache, *self._memory.health()]
        if self._below is not None:
            parts.append(self._below.health())
        return (*parts, *self.tasks.health())

    # -- for hits, pages and transfers, under the lock where they decide ----------------------

    def chain(
        self,
        namespace: Namespace,
        tokens: Sequence[int] | None,
        hashes: Sequence[bytes] | None,
        salt: bytes | str | None,
        extra: Extra,
    ) -> list[bytes]:
        """Names of a prompt's full blocks. Raises `InvalidRequest`."""
        if (tokens is None) == (hashes is None):
            raise InvalidRequest("pass either tokens or hashes")
        root = namespace.root(salt)
        if hashes is not None:
            return bind_hashes(root, hashes)
        if not isinstance(tokens, Sized):
            raise InvalidRequest(f"tokens must be a sequence of integers, not {type(tokens).__name__}")
        if not len(tokens):
            raise InvalidRequest("the prompt is empty")
        return hash_chain(root, tokens, namespace.block_tokens, extra)

    def held_below(self, key: bytes) -> Block | None:
        """The block if the lower tier holds it."""
        below = self._below
        return below.shelf.index.held(key) if below is not None and below.usable else None

    def in_host(self, block: Block) -> bool:
        """Whether a block that was found is the host tier's, with its bytes."""
        return block.space.tier == "host" and block.slots is not None

    def pin(self, blocks: Sequence[Block]) -> None:
        """Pin blocks of whichever tier."""
        for shelf, part in self._by_shelf(blocks):
            shelf.pin(part)

    def unpin(self, blocks: Sequence[Block]) -> None:
        """Unpin blocks of whichever tier."""
        for shelf, part in self._by_shelf(blocks):
            shelf.unpin(part)

    def lost(self, blocks: Sequence[Block]) -> None:
        """A lease was forgotten; called from a finalizer, which may run inside any call here."""
        if self._state == "open":
            self._loop.call_soon_threadsafe(self._unpin_locked, blocks)

    def _unpin_locked(self, blocks: Sequence[Block]) -> None:
        with self.lock:
            self.unpin(blocks)

    def promote(self, blocks: Sequence[Block], below: Sequence[Block]) -> None:
        """Fill reserved host blocks from the lower tier."""
        assert self._below is not None
        self._below.promote(blocks, below)

    def spill(self, blocks: Sequence[Block]) -> None:
        """Blocks were published in host memory: a lower tier shall have them too."""
        if self._below is not None:
            self._below.spill(blocks)

    def image(self, block: Block, rank: int) -> memoryview:
        """The bytes of a host block's image."""
        namespace = self.namespaces[block.space.name]
        return self._memory.view(block.slot(rank), namespace.image_bytes)

    def space_below(self, space: Space) -> Space:
        """The same namespace as the lower tier sees it."""
        assert self._below is not None
        return self._space(space.name, self._below.tier.name)

    def forget_pages(self, pages: Pages) -> None:
        """Pages were detached."""
        self._pages.discard(pages)

    def later(self, seconds: float, transfer: Transfer[Any]) -> None:
        """Call `transfer.expire` at its deadline, on the home loop."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            timer = self._loop.call_later(seconds, transfer.expire)
            transfer.settled.when_over(lambda: self._cancel(timer))
        else:
            self._loop.call_soon_threadsafe(self.later, seconds, transfer)

    def _cancel(self, timer: asyncio.TimerHandle) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(timer.cancel)

    def count_failure(self, error: BaseException) -> None:
        """For statistics."""
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1

    # -- inside -------------------------------------------------------------------------------

    def _space(self, name: str, tier: str) -> Space:
        space = self._spaces.get((name, tier))
        if space is None:
            made = self.namespaces[name]
            quota = self.settings.quotas.get(made.id) if tier == "host" else None
            space = Space(name, tier, slot_bytes(made.image_bytes), made.shards, quota)
            self._spaces[name, tier] = space
        return space

    def _named(self, namespace: str | None) -> Namespace:
        if namespace is None:
            if len(self.namespaces) == 1:
                return next(iter(self.namespaces.values()))
            if not self.namespaces:
                raise UnknownNamespace("no pages were attached yet")
            raise InvalidRequest("several namespaces are attached: pass namespace=")
        if namespace in self.namespaces:
            return self.namespaces[namespace]
        names = self._by_id.get(namespace, set())
        if not names:
            raise UnknownNamespace(f"no pages were attached under {namespace!r}")
        if len(names) > 1:
            raise InvalidRequest(
                f"{namespace!r} was attached with several geometries: pass a digest, one of "
                + ", ".join(sorted(names))
            )
        return self.namespaces[next(iter(names))]

    def _matchable(
        self,
        namespace: Namespace,
        tokens: Sequence[int] | None,
        hashes: Sequence[bytes] | None,
        salt: bytes | str | None,
        extra: Extra,
    ) -> list[bytes]:
        """Names of the blocks that may be a hit: at least one token is left to compute (R6)."""
        chain = self.chain(namespace, tokens, hashes, salt, extra)
        prompt = len(tokens) if tokens is not None else len(chain) * namespace.block_tokens
        return chain[: max(0, prompt - 1) // namespace.block_tokens]

    def _prefix(self, chain: Sequence[bytes]) -> list[Block]:
        """The held blocks of a chain, from its head to the first that nobody has."""
        nodes = self.host.index.nodes
        below = self._below
        lower = below.shelf.index.nodes if below is not None and below.usable else {}
        found = []
        for key, block in zip(chain, map(nodes.get, chain), strict=True):
            if block is None or block.state not in HELD:
                block = lower.get(key)
                if block is None or block.state not in HELD:
                    break
            found.append(block)
        return found

    def _count_lookup(self, namespace: Namespace, asked: int, found: Sequence[Block]) -> None:
        self.lookups += 1
        self.lookup_tokens += asked * namespace.block_tokens
        self.hit_tokens += len(found) * namespace.block_tokens
        for shelf, part in self._by_shelf(found):
            shelf.touch(part)
            shelf.counts.hits += len(part)

    def _by_shelf(self, blocks: Sequence[Block]) -> Iterable[tuple[Shelf, Sequence[Block]]]:
        if self._below is None:
            return ((self.host, blocks),) if blocks else ()
        upper = [block for block in blocks if block.space.tier == "host"]
        lower = [block for block in blocks if block.space.tier != "host"]
        return ((self.host, upper), (self._below.shelf, lower))


# Pages may be attached for every request, always with the same few namespaces.
_namespace = lru_cache(maxsize=64)(Namespace)


async def _on_thread(work: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Run what blocks on a daemon thread of our own: an executor's would hold up the exit."""
    outcome: Outcome[Sequence[str]] = Outcome()

    def run() -> None:
        try:
            outcome.set(work())
        except BaseException as error:  # noqa: BLE001 - it goes to the one who waits
            outcome.fail(error)

    threading.Thread(target=run, name="kvtide-close", daemon=True).start()
    return await outcome


def _links(chain: Sequence[bytes]) -> list[Link]:
    return list(zip(chain, [None, *chain[:-1]], strict=True)) if chain else []
