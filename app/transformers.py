"""The adapter for transformers: prefix KV into and out of a model's `DynamicCache`.

    prefixes = PrefixCache(cache, model, weights="meta-llama/Llama-3.1-8B@0e9e39f")
    prefix = await prefixes.load(input_ids)
    output = model(input_ids[:, prefix.tokens :], past_key_values=prefix.past_key_values)
    await prefixes.store(input_ids, output.past_key_values, start=prefix.tokens)

A layer's `[1, heads, tokens, dim]` is described to kvtide as one plane a head, where it lies:
nothing is repacked. Prompts must be unpadded, since a padded prompt's KV starts elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtide.app.transformers_layers import (
    CacheShape,
    cache_shape,
    check_layers,
    empty_cache,
    model_namespace,
    read_shape,
)
from kvtide.core.errors import InvalidRequest, UnknownNamespace

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

    from kvtide import Cache, Pages, Stored

    Tensors = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What `load` found.

    past_key_values: holds the first `tokens` tokens of the prompt; empty after a miss. The model
        continues on it, and owns it.
    tokens: a multiple of the block size, less than the prompt's length. Compute from there.
    by_tier: tokens of the hit, by the tier in which they lay.
    shortfall: tokens that were a hit and did not arrive, by reason.
    """

    past_key_values: DynamicCache
    tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    shortfall: Mapping[str, int] = field(default_factory=dict)


class PrefixCache:
    """The prefixes of one model in a kvtide cache.

    model: a decoder whose layers keep the keys and values of the full prefix, on one device.
        One token is run through it here, to learn what its cache looks like.
    weights: names the weights and their revision. Nothing else tells two checkpoints of one
        architecture apart, and the KV of one is wrong for the other.
    namespace: by default made from the model's configuration. The attribute of that name, which
        `match` and the REST calls take, says weights and dtype too.

    Raises `UnsupportedLayer`, `InvalidRequest`. Lives on one event loop; the model may run on
    any thread.
    """

    def __init__(
        self, cache: Cache, model: PreTrainedModel, *, weights: str, namespace: str | None = None
    ) -> None:
        if not weights:
            raise InvalidRequest(
                "weights must name the model's weights: without it another checkpoint's KV would hit"
            )
        self.shape: CacheShape = cache_shape(model)
        # With all that tells two models' blocks apart in the name, it means one geometry.
        self.namespace = f"{namespace or model_namespace(model.config)}@{weights}/{self.shape.dtype}"
        self.weights = weights
        self._cache = cache
        self._model = model
        self._block_tokens = cache.settings.block_tokens
        self._resting: set[asyncio.Task[None]] = set()

    async def load(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        salt: bytes | str | None = None,
        extra: bytes = b"",
        deadline: float | None = None,
    ) -> Prefix:
        """The longest cached prefix of one prompt, in a `DynamicCache` of its own.

        input_ids: `[1, tokens]` or `[tokens]`, unpadded. deadline: seconds.
        Less than what was matched may arrive; `tokens` says how much did. Raises
        `InvalidRequest`, and what a transfer raises: never before its memory is at rest.
        """
        tokens = prompt_tokens(input_ids)
        try:
            hit = self._cache.match(tokens, namespace=self.namespace, salt=salt, extra=extra)
        except UnknownNamespace:  # nothing was stored yet
            return Prefix(empty_cache(self._model.config), 0)
        async with hit:
            if hit.tokens == 0:
                return Prefix(empty_cache(self._model.config), 0)
            tensors = self._allocate(hit.tokens)
            blocks = range(hit.tokens // self._block_tokens)
            async with self._lent(tensors, 0, hit.tokens) as pages:
                transfer = pages.load(hit, blocks, after=self._stream(), deadline=deadline)
                past = empty_cache(self._model.config)  # takes its time, while the copy runs
                loaded = await transfer
            _fill(past, tensors, loaded.tokens)
            return Prefix(past, loaded.tokens, dict(hit.by_tier), dict(loaded.shortfall))

    async def store(
        self,
        input_ids: torch.Tensor | Sequence[int],
        past_key_values: DynamicCache,
        *,
        start: int = 0,
        salt: bytes | str | None = None,
        extra: bytes = b"",
        deadline: float | None = None,
    ) -> Stored:
        """Store the full blocks of a prompt whose keys and values lie in `past_key_values`.

        input_ids: the tokens that the cache holds, from the first on: the prompt, and what was
            generated if that is to be found again. Tokens that it does not hold are not stored.
        start: tokens known to be held already (`Prefix.tokens`), a multiple of the block size.

        The cache may be extended meanwhile, since transformers replaces its tensors rather than
        write to them. Raises `UnsupportedLayer`, `InvalidRequest`, and what a transfer raises.
        """
        tokens = prompt_tokens(input_ids)
        self._check_past(past_key_values)
        size = self._block_tokens
        end = min(len(tokens), past_key_values.get_seq_length()) // size * size
        if start % size or not 0 <= start <= len(tokens):
            raise InvalidRequest(f"start must be a multiple of {size} within the prompt, not {start}")
        if start >= end:
            from kvtide import Stored

            return Stored(stored=0, already=0, dropped=0)
        tensors = [(layer.keys, layer.values) for layer in past_key_values.layers]
        async with self._lent(tensors, start, end) as pages:
            return await pages.store(
                tokens[:end],
                range((end - start) // size),
                start=start,
                after=self._stream(),
                salt=salt,
                extra=extra,
                deadline=deadline,
            )

    async def generate(
        self,
        input_ids: torch.Tensor,
        *,
        salt: bytes | str | None = None,
        extra: bytes = b"",
        **options: Any,
    ) -> torch.Tensor:
        """`model.generate` on the cached prefix, in a worker thread; then store what it added.

        input_ids: `[1, tokens]`. options: those of `generate`; it must decode one sequence.
        Returns the sequences of `generate`, prompt included: `[1, tokens + new]`.
        """
        prefix = await self.load(input_ids, salt=salt, extra=extra)
        past = prefix.past_key_values
        stream = self._stream()

        def decode() -> torch.Tensor:
            import torch

            # A thread has a current stream of its own; the store below orders itself after ours.
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                sequences: torch.Tensor = self._model.generate(
                    input_ids, past_key_values=past, **{**options, "return_dict_in_generate": False}
                )
                return sequences

        sequences = await asyncio.to_thread(decode)
        await self.store(sequences, past, start=prefix.tokens, salt=salt, extra=extra)
        return sequences

    def _check_past(self, past: DynamicCache) -> None:
        check_layers(past)
        shape = read_shape(past)
        if shape != self.shape:
            raise InvalidRequest(
                f"this cache is not of the model that it is stored for: it has {_describe(shape)}, "
                f"the model {_describe(self.shape)}"
            )
        if len({layer.get_seq_length() for layer in past.layers}) != 1:
            raise InvalidRequest("the layers of this cache hold different numbers of tokens")

    def _allocate(self, tokens: int) -> Tensors:
        import torch

        dtype, device = self.shape.dtype, self.shape.device
        return [
            (
                torch.empty((1, layer.key_heads, tokens, layer.key_dim), dtype=dtype, device=device),
                torch.empty((1, layer.value_heads, tokens, layer.value_dim), dtype=dtype, device=device),
            )
            for layer in self.shape.layers
        ]

    @contextlib.asynccontextmanager
    async def _lent(self, tensors: Tensors, start: int, end: int) -> AsyncIterator[Pages]:
        """Lend tokens `[start, end)`: block `i` is the `i`-th of them, each head a plane.

        The block is left, with its result or error, once nothing touches the memory (R10).
        """
        pages = self._attach(tensors, start, end)

        async def rest(memory: Tensors) -> None:
            await pages.detach()

        try:
            yield pages
        finally:
            # A second cancellation ends this waiting too. The task then keeps the memory until
            # no copy needs it: freed before, another tensor's bytes would be overwritten.
            resting = asyncio.create_task(rest(tensors))
            self._resting.add(resting)
            resting.add_done_callback(self._resting.discard)
            await asyncio.shield(resting)

    def _attach(self, tensors: Tensors, start: int, end: int) -> Pages:
        from kvtide import PagedKV

        def blocks(tensor: torch.Tensor) -> torch.Tensor:
            _, heads, _, dim = tensor.shape
            return tensor[:, :, start:end].view(1, heads, -1, self._block_tokens, dim)

        paged = PagedKV.from_tensors(
            [(blocks(keys), blocks(values)) for keys, values in tensors],
            block_dim=2,
            block_tokens=self._block_tokens,
        )
        return self._cache.attach(paged, namespace=self.namespace, weights=self.weights)

    def _stream(self) -> torch.cuda.Stream | None:
        import torch

        if self.shape.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.shape.device)


def _fill(past: DynamicCache, tensors: Tensors, tokens: int) -> None:
    """Put the first `tokens` tokens into an empty cache."""
    if tokens == 0:
        return
    for layer, (keys, values) in zip(past.layers, tensors, strict=True):
        # `update` would copy the whole prefix; the layer takes the tensors as they are.
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[:, :, :tokens], values[:, :, :tokens]


def prompt_tokens(input_ids: torch.Tensor | Sequence[int]) -> list[int]:
    """The ids of one prompt as a list. Raises `InvalidRequest`."""
    if isinstance(input_ids, Sequence):
        ids = list(input_ids)
    elif input_ids.dtype.is_floating_point or input_ids.dtype.is_complex:
        raise InvalidRequest(f"token ids must be integers, not {input_ids.dtype}")
    elif input_ids.dim() == 2 and input_ids.shape[0] != 1:
        raise InvalidRequest(f"kvtide takes one sequence at a time, not a batch of {input_ids.shape[0]}")
    elif input_ids.dim() not in (1, 2):
        raise InvalidRequest(f"token ids must be [tokens] or [1, tokens], not {tuple(input_ids.shape)}")
    else:
        ids = input_ids.flatten().tolist()
    if not ids:
        raise InvalidRequest("an empty prompt has nothing to match or store")
    return ids


def _describe(shape: CacheShape) -> str:
    first = shape.layers[0]
    heads = f"{first.key_heads} heads of {first.key_dim}"
    return f"{len(shape.layers)} layers, {heads}, {shape.dtype} on {shape.device}"
