"""One request of the demo, run without the cache and with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvtide.app.demo_identity import StoredCopies, distance, spread
from kvtide.app.transformers_layers import empty_cache

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

    from kvtide.app.transformers import PrefixCache

Result = TypeVar("Result")

_WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True)
class Row:
    """What one request took and gave. Times in milliseconds, `_bytes` in bytes.

    prefill_ms: the forward pass over the whole prompt, without the cache. load_ms: matching,
    allocating and loading. tail_ms: the forward pass over what was not loaded.
    logits_bound: how far runs without a cache were from each other so far; None on the CPU.
    """

    title: str
    prompt_tokens: int
    reused_tokens: int
    ttft_cold_ms: float
    ttft_warm_ms: float
    prefill_ms: float
    load_ms: float
    tail_ms: float
    loaded_bytes: int
    stored_bytes: int
    by_tier: dict[str, int]
    shortfall: dict[str, int]
    identical: bool
    tokens_identical: bool
    bytes_identical: bool
    logits_distance: float
    logits_bound: float | None

    @property
    def speedup(self) -> float | None:
        """How many times sooner the first token came; None if nothing was reused."""
        return self.ttft_cold_ms / self.ttft_warm_ms if self.reused_tokens else None


@dataclass(frozen=True, slots=True)
class _First:
    """A first token: on the host, with the logits it was chosen from, after `seconds` of computing."""

    token: int
    logits: torch.Tensor
    seconds: float


class Bench:
    """Runs requests one after the other, and keeps what it needs to judge them.

    The model computes on one thread of its own, so that the loop stays free to see copies end.
    """

    def __init__(
        self, model: PreTrainedModel, prefixes: PrefixCache, *, block_tokens: int, new_tokens: int
    ) -> None:
        self._model = model
        self._prefixes = prefixes
        self._block_tokens = block_tokens
        self._new_tokens = new_tokens
        self._copies = StoredCopies(block_tokens)
        self._apart = 0.0
        self._thread = ThreadPoolExecutor(1, "kvtide-demo-model")

    def close(self) -> None:
        """Let the model's thread end."""
        self._thread.shutdown()

    async def warm_up(self, document: list[int], tails: Sequence[list[int]]) -> None:
        """Everything that is slow the first time a shape is seen: kernels, allocators, copies.

        What is stored for it stands under a salt of its own, so that no request hits it.
        """
        past = empty_cache(self._model.config)
        await self._compute(_first_token, self._model, document + tails[0], past)
        await self._compute(_decode, self._model, 0, past, 2)
        await self._prefixes.store(document, past, salt=_WARM_UP)
        del past
        for tail in tails:
            prefix = await self._prefixes.load(document + tail, salt=_WARM_UP)
            rest = (document + tail)[prefix.tokens :]
            await self._compute(_first_token, self._model, rest, prefix.past_key_values)

    async def request(self, title: str, prompt: list[int]) -> tuple[Row, list[int]]:
        """Answer a prompt twice; returns what that took, and the answer's token ids."""
        began = time.perf_counter()
        cold_past = empty_cache(self._model.config)
        cold = await self._compute(_first_token, self._model, prompt, cold_past)
        cold_ttft = time.perf_counter() - began
        cold_answer = await self._answer(cold, cold_past)
        del cold_past  # its memory may be needed for the other side

        began = time.perf_counter()
        prefix = await self._prefixes.load(prompt)
        loaded_after = time.perf_counter() - began
        past = prefix.past_key_values
        # The forward pass puts longer tensors in their place; these stay what was loaded.
        loaded = [(layer.keys, layer.values) for layer in past.layers]
        warm = await self._compute(_first_token, self._model, prompt[prefix.tokens :], past)
        warm_ttft = time.perf_counter() - began
        answer = await self._answer(warm, past)

        bytes_identical = await self._compute(self._copies.equal, prompt, loaded, prefix.tokens)
        del loaded
        # The last token was chosen but never computed on, so the cache has no KV of it.
        held = prompt + answer[:-1]
        stored = await self._prefixes.store(held, past, start=prefix.tokens)
        end = len(held) // self._block_tokens * self._block_tokens
        await self._compute(self._copies.keep, held, prefix.tokens, end, past)

        bound = await self._compute(self._bound, prompt, prefix.tokens, cold.logits)
        apart = distance(cold.logits, warm.logits)
        token_bytes = self._prefixes.shape.token_bytes
        row = Row(
            title=title,
            prompt_tokens=len(prompt),
            reused_tokens=prefix.tokens,
            ttft_cold_ms=1e3 * cold_ttft,
            ttft_warm_ms=1e3 * warm_ttft,
            prefill_ms=1e3 * cold.seconds,
            load_ms=1e3 * loaded_after,
            tail_ms=1e3 * warm.seconds,
            loaded_bytes=prefix.tokens * token_bytes,
            stored_bytes=stored.stored * self._block_tokens * token_bytes,
            by_tier=dict(prefix.by_tier),
            shortfall=dict(prefix.shortfall),
            identical=answer == cold_answer if bound is None else bytes_identical and apart <= bound,
            tokens_identical=answer == cold_answer,
            bytes_identical=bytes_identical,
            logits_distance=apart,
            logits_bound=bound,
        )
        return row, answer

    async def _compute(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _answer(self, first: _First, past: DynamicCache) -> list[int]:
        rest = await self._compute(_decode, self._model, first.token, past, self._new_tokens - 1)
        return [first.token, *rest]

    def _bound(self, prompt: list[int], reused: int, one_shot: torch.Tensor) -> float | None:
        """How far runs without any cache are from each other, if tokens can't be the measure.

        A handful of runs shows less than they may differ, so those of earlier requests count too.
        """
        if self._prefixes.shape.device.type == "cpu":
            return None
        end = reused or len(prompt) // 2
        cuts = (end, end - self._block_tokens, end // 2)
        runs = [one_shot, *(_split_run(self._model, prompt, cut) for cut in cuts)]
        self._apart = max(self._apart, spread(runs))
        return self._apart


def _first_token(model: PreTrainedModel, tokens: list[int], past: DynamicCache) -> _First:
    """Compute `tokens` behind `past`, and choose the next one."""
    import torch

    began = time.perf_counter()
    with torch.no_grad():
        ids = torch.tensor([tokens], device=model.device)
        logits = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
        token = int(logits.argmax())  # brings it to the host: the GPU is done when this returns
    return _First(token, logits, time.perf_counter() - began)


def _decode(model: PreTrainedModel, token: int, past: DynamicCache, count: int) -> list[int]:
    """Greedily choose `count` tokens behind `token`."""
    answer = []
    for _ in range(count):
        token = _first_token(model, [token], past).token
        answer.append(token)
    return answer


def _split_run(model: PreTrainedModel, prompt: list[int], cut: int) -> torch.Tensor:
    """The first token's logits if the prompt is computed in two parts, without any cache."""
    past = empty_cache(model.config)
    _first_token(model, prompt[:cut], past)
    return _first_token(model, prompt[cut:], past).logits
