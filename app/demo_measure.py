"""One request of the demo, run without the cache and with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvtide.app.demo_identity import StoredCopies, distance, spread
from kvtide.app.transformers_layers import empty_cache

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

    from kvtide.app.transformers import Prefix, PrefixCache

Result = TypeVar("Result")

_REHEARSAL = "rehearsal"

_NOISE_MARGIN = 1.25
"""The distance that is judged and those it is held against are draws of the same noise, so now
and then the one is the largest of all (seen: by 6 %). Wrong KV is found by its bytes."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one request took and gave. Times in milliseconds, `_bytes` in bytes.

    prefill_ms: the forward pass over the whole prompt, without the cache. load_ms: matching,
    allocating and loading. tail_ms: the forward pass over what was not loaded.
    logits_bound: what is allowed, from runs without a cache; None on the CPU.
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


@dataclass(frozen=True, slots=True)
class _Cold:
    """A run without the cache; `ttft` in seconds."""

    first: _First
    ttft: float
    answer: list[int]


@dataclass(frozen=True, slots=True)
class _Warm:
    """A run with the cache; `loaded` are the tensors that came out of it, as they came."""

    first: _First
    ttft: float
    answer: list[int]
    prefix: Prefix
    loaded: list[tuple[torch.Tensor, torch.Tensor]]
    load_seconds: float


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
        self._gpu = prefixes.shape.device.type == "cuda"
        self._apart = 0.0
        self._thread = ThreadPoolExecutor(1, "kvtide-demo-model")

    def close(self) -> None:
        """Let the model's thread end."""
        self._thread.shutdown()

    async def rehearse(self, prompt: list[int]) -> list[int]:
        """Answer a prompt untimed, under a salt that no request has; returns the answer.

        What is slow the first time is done then: threads, allocators, and on a GPU kernels that
        are loaded or built for each shape, of both sides.
        """
        if self._gpu:
            await self._cold(prompt)
        warm = await self._warm(prompt, _REHEARSAL)
        await self._store(prompt, warm, _REHEARSAL)
        return warm.answer

    async def request(self, title: str, prompt: list[int]) -> tuple[Row, list[int]]:
        """Answer a prompt without the cache and with it; returns what that took, and the answer."""
        cold = await self._cold(prompt)
        warm = await self._warm(prompt)
        reused = warm.prefix.tokens
        bytes_identical = await self._compute(self._copies.equal, prompt, warm.loaded, reused)
        stored_blocks = await self._store(prompt, warm)
        bound = await self._compute(self._bound, prompt, reused, cold.first.logits) if self._gpu else None
        held = prompt + warm.answer[:-1]
        await self._compute(self._copies.keep, held, reused, warm.prefix.past_key_values)

        apart = distance(cold.first.logits, warm.first.logits)
        same_tokens = warm.answer == cold.answer
        token_bytes = self._prefixes.shape.token_bytes
        row = Row(
            title=title,
            prompt_tokens=len(prompt),
            reused_tokens=reused,
            ttft_cold_ms=1e3 * cold.ttft,
            ttft_warm_ms=1e3 * warm.ttft,
            prefill_ms=1e3 * cold.first.seconds,
            load_ms=1e3 * warm.load_seconds,
            tail_ms=1e3 * warm.first.seconds,
            loaded_bytes=reused * token_bytes,
            stored_bytes=stored_blocks * self._block_tokens * token_bytes,
            by_tier=dict(warm.prefix.by_tier),
            shortfall=dict(warm.prefix.shortfall),
            identical=same_tokens if bound is None else bytes_identical and apart <= bound,
            tokens_identical=same_tokens,
            bytes_identical=bytes_identical,
            logits_distance=apart,
            logits_bound=bound,
        )
        return row, warm.answer

    async def _cold(self, prompt: list[int]) -> _Cold:
        began = time.perf_counter()
        past = empty_cache(self._model.config)
        first = await self._compute(_first_token, self._model, prompt, past)
        ttft = time.perf_counter() - began
        return _Cold(first, ttft, await self._answer(first, past))

    async def _warm(self, prompt: list[int], salt: str | None = None) -> _Warm:
        began = time.perf_counter()
        prefix = await self._prefixes.load(prompt, salt=salt)
        load_seconds = time.perf_counter() - began
        past = prefix.past_key_values
        # The forward pass puts longer tensors in their place; these stay what was loaded.
        loaded = [(layer.keys, layer.values) for layer in past.layers]
        first = await self._compute(_first_token, self._model, prompt[prefix.tokens :], past)
        ttft = time.perf_counter() - began
        return _Warm(first, ttft, await self._answer(first, past), prefix, loaded, load_seconds)

    async def _store(self, prompt: list[int], warm: _Warm, salt: str | None = None) -> int:
        """Store what this run computed; returns how many blocks were new."""
        # The last token was chosen and never computed on: there is no KV of it.
        held = prompt + warm.answer[:-1]
        prefix = warm.prefix
        stored = await self._prefixes.store(held, prefix.past_key_values, start=prefix.tokens, salt=salt)
        return stored.stored

    async def _compute(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _answer(self, first: _First, past: DynamicCache) -> list[int]:
        rest = await self._compute(_decode, self._model, first.token, past, self._new_tokens - 1)
        return [first.token, *rest]

    def _bound(self, prompt: list[int], reused: int, one_shot: torch.Tensor) -> float:
        """How far apart noise alone may put two runs' logits, from runs without any cache."""
        end = reused or len(prompt) // 2
        cuts = (end, end - self._block_tokens, end // 2)
        runs = [one_shot, *(_split_run(self._model, prompt, cut) for cut in cuts)]
        # A handful of runs shows less than they may differ: those of earlier requests count too.
        self._apart = max(self._apart, spread(runs))
        return _NOISE_MARGIN * self._apart


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
