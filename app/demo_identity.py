"""Whether an answer from the cache is the answer without it.

In fp32 on the CPU the tokens are compared. In bf16 on a GPU even two runs without any cache give
other tokens, so there the bytes that came back are compared with the bytes that were stored, and
the first token's logits may be no further from the one-shot run than runs without a cache, which
merely split the prompt, are from it and from each other (and a margin, since both are noise).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

    Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Copy:
    """KV of tokens `[start, len(tokens))`."""

    tokens: list[int]
    start: int
    layers: list[tuple[torch.Tensor, torch.Tensor]]


class StoredCopies:
    """What was handed to the cache, kept aside bit by bit, to be compared with what comes back.

    A block that is held is not stored again, so its bytes are those of the first copy that has it:
    the same tokens computed once more, by another run, differ in their last bits.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._copies: list[_Copy] = []

    def keep(self, tokens: list[int], start: int, past: DynamicCache) -> None:
        """Keep the KV of the full blocks of `tokens` from `start` on."""
        end = len(tokens) // self._block_tokens * self._block_tokens
        if start < end:
            layers = [
                (layer.keys[:, :, start:end].clone(), layer.values[:, :, start:end].clone())
                for layer in past.layers
            ]
            self._copies.append(_Copy(tokens[:end], start, layers))

    def equal(self, tokens: list[int], loaded: Layers, end: int) -> bool:
        """Whether the first `end` tokens' KV are, in every plane, the bytes that were stored first.

        loaded: keys and values of each layer, `[1, heads, end, dim]`.
        """
        reached = 0
        for copy, at, to in self._sources(tokens, end):
            for (keys, values), (stored_keys, stored_values) in zip(loaded, copy.layers, strict=True):
                for ours, theirs in ((keys, stored_keys), (values, stored_values)):
                    kept = theirs[:, :, at - copy.start : to - copy.start]
                    if not _same_bytes(ours[:, :, at:to], kept):
                        return False
            reached = to
        return reached == end

    def _sources(self, tokens: list[int], end: int) -> Iterator[tuple[_Copy, int, int]]:
        """For the blocks of `tokens` up to `end`: the first copy that has them, from where, to where."""
        at = 0
        while at < end:
            for copy in self._copies:
                to = min(_common(copy.tokens, tokens) // self._block_tokens * self._block_tokens, end)
                if copy.start <= at < to:
                    yield copy, at, to
                    at = to
                    break
            else:
                return


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two logits vectors `[vocabulary]`, in fp32."""
    return float((one.float() - other.float()).abs().max())


def spread(runs: Sequence[torch.Tensor]) -> float:
    """The largest distance between any two runs' logits."""
    return max(distance(one, other) for one, other in combinations(runs, 2))


def _common(one: list[int], other: list[int]) -> int:
    """Tokens that two prompts have in common from their first on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality of bits: floats would take -0.0 for 0.0, and NaN for nothing."""
    import torch

    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(as_bits), other.view(as_bits))
