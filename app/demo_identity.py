"""Whether an answer from the cache is the answer without it.

In fp32 on the CPU the tokens are compared. In bf16 on a GPU even two runs without any cache give
other tokens, so there the bytes that came back are compared with the bytes that were stored, and
the first token's logits may be no further from the one-shot run than runs without a cache, which
merely split the prompt, are from it and from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

    Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Copy:
    tokens: list[int]
    start: int
    end: int
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
            self._copies.append(_Copy(tokens[:end], start, end, layers))

    def equal(self, tokens: list[int], loaded: Layers, end: int) -> bool:
        """Whether the first `end` tokens' KV are, in every plane, the bytes that were stored first.

        loaded: keys and values of each layer, `[1, heads, end, dim]`.
        """
        at = 0
        while at < end:
            copy, to = next(
                ((copy, to) for copy in self._copies if (to := self._reach(copy, tokens, at)) > at),
                (None, at),
            )
            if copy is None:
                return False
            to = min(to, end)
            for (keys, values), (stored_keys, stored_values) in zip(loaded, copy.layers, strict=True):
                for ours, theirs in ((keys, stored_keys), (values, stored_values)):
                    kept = theirs[:, :, at - copy.start : to - copy.start]
                    if not _same_bytes(ours[:, :, at:to], kept):
                        return False
            at = to
        return True

    def _reach(self, copy: _Copy, tokens: list[int], at: int) -> int:
        """Up to where this copy has the blocks of `tokens` from `at` on; 0 if it has not even one."""
        if not copy.start <= at < copy.end:
            return 0
        return _common(copy.tokens, tokens) // self._block_tokens * self._block_tokens


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
