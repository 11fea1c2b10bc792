"""The copy kernels in Triton's interpreter, over host memory: the byte-equality matrix of CI."""

import ctypes
import os
import random
from array import array

import pytest
from tests.kernels import geometry

from kvtide.kernels.chunks import PITCH, pieces
from kvtide.kernels.device import Span

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="host addresses need Triton's interpreter"
)


class Room:
    """Random bytes at a 512-aligned address."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self._bytes = ctypes.create_string_buffer(nbytes + PITCH)
        self.base = -(-ctypes.addressof(self._bytes) // PITCH) * PITCH
        self.nbytes = nbytes
        ctypes.memmove(self.base, random.Random(seed).randbytes(nbytes), nbytes)

    def read(self) -> bytes:
        return ctypes.string_at(self.base, self.nbytes)


@interpreted
@pytest.mark.parametrize("limit", [1 << 20, 1536], ids=["whole", "cut"])
@pytest.mark.parametrize("layout", geometry.LAYOUTS, ids=lambda layout: layout.__name__)
def test_bytes_survive_the_round(layout: geometry.Layout, limit: int) -> None:
    pytest.importorskip("triton")
    from kvtide.kernels.pack import pack, unpack

    pages = Room(geometry.extent(layout(0), 0), seed=1)
    spans = layout(pages.base)
    before = pages.read()
    stored, loaded = geometry.some_blocks(2), geometry.some_blocks(3)
    sources, targets = array("q", stored), array("q", loaded)
    images = [geometry.image_of(before, spans, pages.base, block) for block in stored]
    for piece in pieces(tuple(spans), (1, len(spans)), limit):
        staging = Room(piece.pitch * len(stored), seed=4)
        table = piece.rows.buffer_info()[0]
        pack(piece, table, sources.buffer_info()[0], len(stored), staging.base)
        for i, image in enumerate(images):
            packed = ctypes.string_at(staging.base + i * piece.pitch, piece.nbytes)
            assert packed == image[piece.offset : piece.offset + piece.nbytes]
        unpack(piece, table, targets.buffer_info()[0], len(loaded), staging.base)
        # Later pieces read pages that this one did not write: their planes are others.
    images = [geometry.image_of(before, spans, pages.base, block) for block in stored]
    # A plane's pages may be overwritten only after all of them were packed; each piece does so.
    assert pages.read() == geometry.with_images(before, spans, pages.base, loaded, images)


@interpreted
def test_S2_9_more_items_than_programs_and_no_blocks_at_all() -> None:
    pytest.importorskip("triton")
    from kvtide.kernels.pack import PROGRAMS, pack

    pages = Room(4096, seed=1)
    (piece,) = pieces((Span(pages.base, 32, 32),), (1,), 1 << 20)
    ids = array("q", range(PROGRAMS * 3 + 1))
    staging = Room(piece.pitch * len(ids), seed=2)
    table, numbers = piece.rows.buffer_info()[0], ids.buffer_info()[0]
    before = staging.read()
    pack(piece, table, numbers, 0, staging.base)
    assert staging.read() == before
    pack(piece, table, numbers, len(ids), staging.base)
    for i in ids:
        assert ctypes.string_at(staging.base + i * piece.pitch, 32) == pages.read()[i * 32 : i * 32 + 32]
