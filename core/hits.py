"""What a match found: a lease on cached blocks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvtide.core.errors import InvalidRequest
from kvtide.core.index import Block
from kvtide.core.shelf import Link

if TYPE_CHECKING:
    from kvtide.core.cache import Cache


@dataclass(frozen=True, slots=True)
class Held:
    """How much of a prompt is held, in tokens, and by which tiers."""

    tokens: int
    by_tier: dict[str, int]


class Hit:
    """The longest held prefix of a prompt, pinned until `close` (or the end of `with`).

    tokens: a multiple of `block_tokens`, less than the prompt's length (R6).
    by_tier: of these, how many each tier holds. hashes: the blocks' names, in order.
    Slices `hit[a:b]` take token positions, multiples of `block_tokens`; a slice is a lease of
    its own.
    """

    def __init__(
        self, cache: Cache, namespace: bytes, links: Sequence[Link], blocks: Sequence[Block]
    ) -> None:
        self._cache = cache
        self._links = links
        self._blocks = blocks
        self._open = bool(blocks)
        self.namespace = namespace
        self.block_tokens = cache.settings.block_tokens
        self.tokens = len(blocks) * self.block_tokens
        cache.pin(blocks)

    @property
    def by_tier(self) -> dict[str, int]:
        """Tokens by the tier that held them when they were matched."""
        counts = Counter(block.space.tier for block in self._blocks)
        return {tier: count * self.block_tokens for tier, count in counts.items()}

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """The blocks' names, in order."""
        return tuple(key for key, _ in self._links)

    @property
    def closed(self) -> bool:
        """Whether it pins nothing any more."""
        return not self._open and bool(self._blocks)

    def pinned(self) -> tuple[Sequence[Link], Sequence[Block]]:
        """Names and blocks, for a load. Raises `InvalidRequest` once closed."""
        if self.closed:
            raise InvalidRequest("this hit is closed: load inside its `with` block")
        return self._links, self._blocks

    def __getitem__(self, part: slice) -> Hit:
        try:
            start, stop, step = part.indices(self.tokens)
        except (AttributeError, TypeError) as error:
            raise InvalidRequest(f"slice a hit by token positions, hit[a:b]: {error}") from error
        if step != 1 or start % self.block_tokens or stop % self.block_tokens:
            raise InvalidRequest(f"slice a hit at multiples of {self.block_tokens} tokens, with step 1")
        a, b = start // self.block_tokens, max(start, stop) // self.block_tokens
        with self._cache.lock:
            links, blocks = self.pinned()
            return Hit(self._cache, self.namespace, links[a:b], blocks[a:b])

    def close(self) -> None:
        """Let go of the blocks. Idempotent; loads that have begun keep theirs."""
        with self._cache.lock:
            if self._open:
                self._open = False
                self._cache.unpin(self._blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._cache.lost(self._blocks)
            warnings.warn(
                f"a hit on {self.tokens} tokens was never closed: use `with`",
                ResourceWarning,
                stacklevel=2,
            )
