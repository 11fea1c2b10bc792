"""What the cache layers of a transformers model look like, and which of them hold a full prefix.

Nothing is inferred from a configuration that the model itself can say: one token is run through
it, and the tensors that it leaves in its `DynamicCache` are the geometry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtide.core.errors import InvalidRequest, UnsupportedLayer

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies change with the length of the whole prompt."""

_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"})
"""Configuration that says where a model came from or how it is called, not what it computes."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: keys `[1, heads, tokens, key_dim]` and values `[1, heads, tokens, value_dim]`."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def token_elements(self) -> int:
        """Numbers that one token takes in this layer."""
        return self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class CacheShape:
    """All layers of a model's cache, on one device and in one dtype."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers."""
        return sum(layer.token_elements for layer in self.layers) * self.dtype.itemsize


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Run one token through the model and read its cache's geometry from what that leaves.

    Raises `UnsupportedLayer` if the KV of a prefix cannot be had from this model's cache, or
    would not be the same under a longer prompt.
    """
    import torch

    config = model.config
    _check_config(config)
    past = empty_cache(config)
    check_layers(past)
    with torch.no_grad():
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device),
            past_key_values=past,
            use_cache=True,
        )
    check_layers(past)
    return read_shape(past)


def empty_cache(config: PreTrainedConfig) -> DynamicCache:
    """The cache that transformers itself would begin with for this model."""
    from transformers import DynamicCache

    return DynamicCache(config=config)


def read_shape(past: DynamicCache) -> CacheShape:
    """The geometry of a filled cache. Raises `UnsupportedLayer`, `InvalidRequest`."""
    layers = []
    places = set()
    for number, layer in enumerate(past.layers):
        if layer.get_seq_length() == 0:
            raise UnsupportedLayer(f"layer {number} keeps no keys and values, so there is no prefix to take")
        for tensor in (layer.keys, layer.values):
            if tensor.dim() != 4:
                raise UnsupportedLayer(
                    f"layer {number} holds {tensor.dim()} dimensions, not [batch, heads, tokens, dim]"
                )
            if tensor.shape[0] != 1:
                raise InvalidRequest(
                    f"the cache holds a batch of {tensor.shape[0]}: kvtide takes one sequence at a time"
                )
            places.add((tensor.dtype, tensor.device))
        layers.append(
            LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[1], layer.values.shape[3])
        )
    if len(places) != 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in places))
        raise UnsupportedLayer(f"the layers' keys and values differ in dtype or device ({listed})")
    dtype, device = places.pop()
    return CacheShape(tuple(layers), dtype, device)


def check_layers(past: object) -> None:
    """Refuse every cache that is not a `DynamicCache` of plain, full-prefix layers on its device.

    The exact class is asked for: subclasses keep a window, a state, an index or quantized values
    beside or instead of the prefix. Raises `UnsupportedLayer`.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if not isinstance(past, DynamicCache):
        raise UnsupportedLayer(f"a DynamicCache is needed, this is a {type(past).__name__}")
    if getattr(past, "offloading", False):
        raise UnsupportedLayer("an offloaded cache moves its own layers: use a plain DynamicCache")
    for number, layer in enumerate(past.layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedLayer(
                f"layer {number} is a {type(layer).__name__}, which does not hold the keys and values "
                "of a full prefix (sliding window, chunked, linear attention, static, quantized and "
                "shared layers don't): its blocks cannot be reused"
            )


def model_namespace(config: PreTrainedConfig) -> str:
    """A name for what this configuration computes: model type and a hash of its settings."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _NOT_THE_MODEL}
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)
    return f"{config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _check_config(config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedLayer(
            "an encoder-decoder model's cache depends on the encoder's input, not on a prefix alone"
        )
    for kind in _rope_types(config.get_text_config(decoder=True)):
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedLayer(
                f'rotary embeddings of type "{kind}" change with the length of the whole prompt, '
                "so the keys of a prefix are not those of the same prefix under another prompt"
            )


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """The types of rotary embedding: one for all layers, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    nested: list[Mapping[str, Any]] = [value for value in parameters.values() if isinstance(value, Mapping)]
    for group in [parameters, *nested]:
        kind = group.get("rope_type")
        if isinstance(kind, str):
            yield kind
