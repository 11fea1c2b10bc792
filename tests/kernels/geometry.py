"""Layouts of pages that engines use, over plain memory: what the byte-equality matrix runs over."""

import random
from collections.abc import Callable

from kvtide.kernels.device import Span

PAGES = 12

Layout = Callable[[int], list[Span]]


def apart(base: int) -> list[Span]:
    """K and V apart, 3 layers, each its own tensor [pages, bytes]."""
    return [Span(base + i * PAGES * 1024, 1024, 1024) for i in range(6)]


def packed(base: int) -> list[Span]:
    """K and V packed in one cell: one tensor a layer, two planes of it."""
    spans = []
    for layer in range(3):
        at = base + layer * PAGES * 2048
        spans += [Span(at, 2048, 1024), Span(at + 1024, 2048, 1024)]
    return spans


def one_plane(base: int) -> list[Span]:
    """One plane a layer (MLA), 576 elements of two bytes a token, 4 tokens."""
    return [Span(base + i * PAGES * 4608, 4608, 4608) for i in range(3)]


def unequal(base: int) -> list[Span]:
    """Planes of different sizes in one image: an indexer's scales beside the keys."""
    spans, at = [], base
    for nbytes in (4096, 512, 40960, 64):
        spans.append(Span(at, nbytes, nbytes))
        at += PAGES * nbytes
    return spans


def padded(base: int) -> list[Span]:
    """Pages with room between them that belongs to nobody."""
    return [Span(base + i * PAGES * 1536, 1536, 1000) for i in range(4)]


def blocks_outermost(base: int) -> list[Span]:
    """All layers of a page side by side, pages far apart."""
    return [Span(base + i * 768, 4 * 768, 768) for i in range(4)]


def heads(base: int) -> list[Span]:
    """A transformers cache layer [1, heads, tokens, dim]: a small plane a head."""
    return [Span(base + i * PAGES * 256, 256, 256) for i in range(32)]


def odd(base: int) -> list[Span]:
    """Sizes, strides and addresses that are multiples of nothing."""
    return [Span(base + 3, 101, 33), Span(base + 7001, 257, 255), Span(base + 20_001, 1, 1)]


def by_two(base: int) -> list[Span]:
    return [Span(base + 2, 1030, 1026), Span(base + 20_000, 514, 38)]


def by_eight(base: int) -> list[Span]:
    return [Span(base + 8, 1032, 1024), Span(base + 20_000, 520, 520)]


LAYOUTS: list[Layout] = [
    apart,
    packed,
    one_plane,
    unequal,
    padded,
    blocks_outermost,
    heads,
    odd,
    by_two,
    by_eight,
]


def extent(spans: list[Span], base: int) -> int:
    """Bytes from `base` that the pages reach."""
    return max(span.base + (PAGES - 1) * span.stride + span.nbytes for span in spans) - base


def some_blocks(seed: int, count: int = 7) -> list[int]:
    """Not all, and in no order."""
    return random.Random(seed).sample(range(PAGES), count)


def image_of(memory: bytes, spans: list[Span], base: int, block: int) -> bytes:
    """What the image of a page must be, read by plain slicing."""
    parts = []
    for span in spans:
        at = span.base - base + block * span.stride
        parts.append(memory[at : at + span.nbytes])
    return b"".join(parts)


def with_images(memory: bytes, spans: list[Span], base: int, blocks: list[int], images: list[bytes]) -> bytes:
    """What the memory must be after a load: named pages replaced, every other byte as it was."""
    changed = bytearray(memory)
    for block, image in zip(blocks, images, strict=True):
        offset = 0
        for span in spans:
            at = span.base - base + block * span.stride
            changed[at : at + span.nbytes] = image[offset : offset + span.nbytes]
            offset += span.nbytes
    return bytes(changed)
