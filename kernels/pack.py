"""Triton kernels that gather planes of pages into contiguous images in staging, and scatter them.

Everything is a raw address: pages belong to the engine and have no one tensor. With
TRITON_INTERPRET=1 the same kernels run on host addresses. Importing this loads triton.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kvtide.kernels.chunks import Piece

PROGRAMS = 32
"""Programs a launch: enough for several times the link's speed, few enough for a busy GPU."""


_ADDRESS = 1 << 40
"""Triton compiles anew for integers of another size: addresses are large."""


@triton.jit(do_not_specialize=["table", "ids", "staging", "pitch", "tiles", "total"])
def _move(
    table,  # address of int64 [tiles, 4]: address in page 0, page stride, bytes, offset in staging
    ids,  # address of int64 [blocks]: page numbers
    staging,  # address of the first image in staging
    pitch,  # bytes from one image in staging to the next
    tiles,
    total,  # tiles x blocks
    WIDTH: tl.constexpr,  # bytes by which all addresses and sizes are divisible
    TILE: tl.constexpr,  # elements of WIDTH bytes a tile
    PACK: tl.constexpr,
):
    if WIDTH == 1:
        element = tl.int8
    elif WIDTH == 2:
        element = tl.int16
    elif WIDTH == 4:
        element = tl.int32
    else:
        element = tl.int64
    # Sixteen bytes are two int64; the hints let the compiler join them into one access.
    SIZE: tl.constexpr = 8 if WIDTH == 16 else WIDTH
    COUNT: tl.constexpr = TILE * (WIDTH // SIZE)
    rows = tl.cast(table, tl.int64).to(tl.pointer_type(tl.int64))
    pages = tl.cast(ids, tl.int64).to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, COUNT)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        block = item // tiles
        row = rows + (item % tiles) * 4
        # Strides and page numbers are 64 bits wide: pages lie beyond 2 GiB of their base.
        page = tl.load(row) + tl.load(row + 1) * tl.load(pages + block)
        count = tl.load(row + 2) // SIZE
        image = tl.cast(staging, tl.int64) + tl.cast(block, tl.int64) * pitch + tl.load(row + 3)
        if WIDTH == 16:
            page = tl.multiple_of(page, 16)
            image = tl.multiple_of(image, 16)
            count = tl.multiple_of(count, 2)
        outside = page.to(tl.pointer_type(element)) + lane
        inside = image.to(tl.pointer_type(element)) + lane
        mask = lane < count
        if PACK:
            tl.store(inside, tl.load(outside, mask=mask), mask=mask)
        else:
            tl.store(outside, tl.load(inside, mask=mask), mask=mask)


def pack(piece: Piece, table: int, ids: int, blocks: int, staging: int) -> None:
    """Gather `piece` of `blocks` pages into staging, on torch's current stream.

    `table`: address of the piece's rows; `ids`: address of the page numbers, int64; `staging`:
    address of the first image, 512-aligned, the next one `piece.pitch` bytes on. All of them are
    addresses that the device reads, and stay valid until the kernel has ended.
    """
    _launch(piece, table, ids, blocks, staging, True)


def unpack(piece: Piece, table: int, ids: int, blocks: int, staging: int) -> None:
    """Scatter from staging into pages: the reverse of `pack`."""
    _launch(piece, table, ids, blocks, staging, False)


def compile_for(piece: Piece, packing: bool) -> None:
    """Compile and load the kernel of a piece: a launch that has nothing to do."""
    _start(piece, _ADDRESS, _ADDRESS, _ADDRESS, 0, packing)


def _launch(piece: Piece, table: int, ids: int, blocks: int, staging: int, packing: bool) -> None:
    total = piece.tiles * blocks
    if total:
        _start(piece, table, ids, staging, total, packing)


def _start(piece: Piece, table: int, ids: int, staging: int, total: int, packing: bool) -> None:
    _move[(max(1, min(PROGRAMS, total)),)](
        table, ids, staging, piece.pitch, piece.tiles, total,
        WIDTH=piece.width, TILE=piece.tile, PACK=packing, num_warps=4,
    )  # fmt: skip
