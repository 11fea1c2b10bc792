"""Engines' layouts of paged memory, as torch tensors: what the byte-equality tests run over."""

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtide import PagedKV

BLOCKS = 7
TOKENS = 4
LAYERS = 3
HEADS = 2
DIM = 16


@dataclass
class Layout:
    """Tensors as an engine has them: per layer a tuple of views into `memory`."""

    memory: list[torch.Tensor]
    layers: list[tuple[torch.Tensor, ...]]
    block_dim: int = 0

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.memory:
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))

    def dump(self) -> list[bytes]:
        """All bytes, the padding between pages included."""
        return [ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) for t in self.memory]

    def image(self, block: int) -> bytes:
        """A block's bytes, read by torch's own indexing."""
        return b"".join(_bytes(cell) for cell in self.cells(block))

    def put(self, block: int, other: "Layout", source: int) -> None:
        """What a load of another layout's block is to do."""
        for to, cell in zip(self.cells(block), other.cells(source), strict=True):
            to.copy_(cell)

    def cells(self, block: int) -> list[torch.Tensor]:
        found = []
        for layer in self.layers:
            for tensor in layer:
                outer = itertools.product(*(range(size) for size in tensor.shape[: self.block_dim]))
                found += [tensor[(*index, block)] for index in outer]
        return found

    def paged(self, device: tuple[str, int] = ("cpu", 0)) -> PagedKV:
        """The description; with another device, that device's pages on this memory."""
        made = PagedKV.from_tensors(self.layers, block_dim=self.block_dim)
        if device == made.device:
            return made
        return PagedKV(
            made.planes_at, blocks=made.blocks, dtype=made.dtype, device=device, owners=made.owners
        )


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def apart() -> Layout:
    """K and V apart: two tensors a layer."""
    memory = [torch.empty(BLOCKS, TOKENS, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    return Layout(memory, [(memory[2 * i], memory[2 * i + 1]) for i in range(LAYERS)])


def two_outermost() -> Layout:
    """K and V apart in one tensor `[2, blocks, ...]`."""
    memory = [torch.empty(2, BLOCKS, TOKENS, HEADS, DIM, dtype=torch.float16) for _ in range(LAYERS)]
    return Layout(memory, [(tensor,) for tensor in memory], block_dim=1)


def packed() -> Layout:
    """K and V packed in one cell."""
    memory = [torch.empty(BLOCKS, TOKENS, HEADS, 2 * DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    return Layout(memory, [(tensor,) for tensor in memory])


def blocks_outermost() -> Layout:
    """All layers of a page side by side; each layer's K and V a plane of its own."""
    tensor = torch.empty(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    return Layout([tensor], [(tensor[:, i, 0], tensor[:, i, 1]) for i in range(LAYERS)])


def one_cell() -> Layout:
    """Blocks outermost, the whole page one plane."""
    tensor = torch.empty(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM, dtype=torch.float32)
    return Layout([tensor], [(tensor,)])


def latent() -> Layout:
    """One plane a layer (MLA)."""
    memory = [torch.empty(BLOCKS, TOKENS, 576, dtype=torch.bfloat16) for _ in range(LAYERS)]
    return Layout(memory, [(tensor,) for tensor in memory])


def unequal() -> Layout:
    """Planes of different sizes, also from layer to layer."""
    sizes = [(512, 64), (32,), (512, 1, 64)]
    layers = [tuple(torch.empty(BLOCKS, TOKENS, n, dtype=torch.uint8) for n in row) for row in sizes]
    return Layout([tensor for layer in layers for tensor in layer], layers)


def padded() -> Layout:
    """Room between the pages that is nobody's."""
    memory = [torch.empty(BLOCKS, 3 * TOKENS * DIM + 5, dtype=torch.bfloat16) for _ in range(LAYERS)]
    layers = [(t[:, : TOKENS * DIM].unflatten(1, (TOKENS, DIM)),) for t in memory]
    return Layout(memory, layers)


def heads() -> Layout:
    """A transformers cache layer `[1, heads, tokens, dim]`: a plane a head, with room for more tokens."""
    memory = [torch.empty(1, HEADS, BLOCKS * TOKENS + 3, DIM) for _ in range(2 * LAYERS)]
    views = [t[:, :, : BLOCKS * TOKENS].unflatten(2, (BLOCKS, TOKENS)) for t in memory]
    return Layout(memory, [(views[2 * i], views[2 * i + 1]) for i in range(LAYERS)], block_dim=2)


LAYOUTS: list[Callable[[], Layout]] = [
    apart,
    two_outermost,
    packed,
    blocks_outermost,
    one_cell,
    latent,
    unequal,
    padded,
    heads,
]
