"""The demo's model: a Llama shape with seeded random weights, or any transformers model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtide.app.demo_text import ModelTokenizer, PieceTokenizer, Tokenizer
from kvtide.core.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Preset:
    """A Llama shape.

    std: of the random weights. Much less, and attention is so flat that a model says the same
        token for ever and would not notice wrong KV.
    document_tokens: how much of the text is read by default.
    gpu_bytes: free memory from which on a GPU takes this shape by itself.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    std: float
    document_tokens: int
    gpu_bytes: int


PRESETS = {
    "llama-3-8b": Preset(4096, 14336, 32, 32, 8, 128256, 0.02, 8192, 40 * GIB),
    "llama-3.2-1b": Preset(2048, 8192, 16, 32, 8, 128256, 0.02, 8192, 12 * GIB),
    "small": Preset(512, 1408, 6, 8, 2, 768, 0.08, 4352, 0),
    "tiny": Preset(64, 128, 2, 4, 2, 768, 0.3, 512, 0),
}
"""Largest first."""

_PIECES = 512
"""Pieces beside the bytes in the demo's own tokenizer; every preset's vocabulary holds them."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. `weights` names them in the cache; `preset` is None for a real model."""

    name: str
    weights: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    preset: Preset | None

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        device: torch.device = self.model.device
        return device


def pick_device(asked: str) -> torch.device:
    """`"auto"`, `"cpu"` or `"cuda"`. Raises `InvalidRequest` if there is no such device."""
    import torch

    if asked != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if asked == "cuda":
        raise InvalidRequest("--device cuda: torch sees no CUDA device here")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """`"cpu"`, or the GPU's name."""
    import torch

    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def random_model(preset_name: str, device: torch.device, seed: int, text: str) -> Subject:
    """A Llama of a preset's shape; `"auto"` is the largest that suits the device."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    name = _suitable(device) if preset_name == "auto" else preset_name
    preset = PRESETS[name]
    config = LlamaConfig(
        vocab_size=preset.vocabulary,
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.hidden // preset.heads,
        max_position_embeddings=131072,
        initializer_range=preset.std,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):  # made where it will run: an 8B model takes minutes on the CPU
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(device))
    return Subject(name, f"random-seed-{seed}", model.eval(), PieceTokenizer(text, _PIECES), preset)


def pretrained_model(name: str, device: torch.device) -> Subject:
    """A model and its tokenizer by hub id or local path. Raises `OSError` if it can't be had."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=_dtype(device)).to(device)
    revision = getattr(model.config, "_commit_hash", None) or "local"
    return Subject(name, f"{name}@{revision}", model.eval(), ModelTokenizer(tokenizer), None)


def context_tokens(subject: Subject) -> int | None:
    """The longest prompt that the model's positions allow, if it says so."""
    config: Any = subject.model.config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    return limit


def _suitable(device: torch.device) -> str:
    import torch

    if device.type != "cuda":
        return "small"
    free, _ = torch.cuda.mem_get_info(device)
    return next(name for name, preset in PRESETS.items() if free >= preset.gpu_bytes)


def _dtype(device: torch.device) -> torch.dtype:
    """fp32 on the CPU, where tokens are compared; bf16 on a GPU, as it would be served."""
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32
