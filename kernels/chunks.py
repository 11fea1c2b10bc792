"""How a job is cut to fit staging: pieces of an image, and the tiles that a copy kernel walks.

Pure arithmetic on addresses and sizes; it knows no device.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvtide.kernels.device import Span

PITCH = 512
"""Images lie in staging at multiples of this, which is what a copy engine likes best."""

COPY = 64 << 10
"""Bytes from which a copy engine's cost is its bytes, and no more its descriptor."""

RAMP = 4 << 20
"""Bytes of the first chunk; it takes the link as long as submitting the next takes Python."""

ROW = 4
"""int64 a row of the tile table: address in page 0, page stride, bytes, offset in the piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of every image that one copy moves.

    `offset`, `nbytes`: the range in the image. `group`: the group it belongs to. `pitch`: the
    distance of two of them in staging. `width`: bytes an element, the largest of 1, 2, 4, 8, 16 by
    which every address is divisible. `tile`: elements a tile. `rows`: the tile table.
    `first`: its first row in the table of all pieces.
    """

    offset: int
    nbytes: int
    group: int
    pitch: int
    width: int
    tile: int
    rows: array[int]
    first: int

    @property
    def tiles(self) -> int:
        return len(self.rows) // ROW


@functools.lru_cache(maxsize=256)
def pieces(spans: tuple[Span, ...], groups: tuple[int, ...], limit: int) -> tuple[Piece, ...]:
    """Cut an image into pieces of at most `limit` bytes, none across the end of a group."""
    if limit < PITCH or limit % PITCH:
        raise ValueError(f"staging is a multiple of {PITCH} bytes, not {limit}")
    if not groups or groups[-1] != len(spans) or list(groups) != sorted(set(groups)):
        raise ValueError(f"groups {groups} do not rise to the {len(spans)} planes")
    made: list[Piece] = []
    start = offset = 0
    for group, end in enumerate(groups):
        cut: list[Span] = []
        for span in _fitting(spans[start:end], limit):
            if sum(part.nbytes for part in cut) + span.nbytes > limit:
                offset = _close(made, cut, offset, group)
            cut.append(span)
        offset = _close(made, cut, offset, group)
        start = end
    return tuple(made)


def coarse(
    spans: tuple[Span, ...], groups: tuple[int, ...], least: int = COPY
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Join groups until each has `least` bytes an image: ends of the joined ones, and for each group
    the joined one that it became part of.

    A group's event then comes a little later than it could; with copies of a few KiB each it would
    come much later, and take many times longer to submit.
    """
    ends: list[int] = []
    place: list[int] = []
    start = nbytes = 0
    for end in groups:
        place.append(len(ends))
        nbytes += sum(span.nbytes for span in spans[start:end])
        start = end
        if nbytes >= least:
            ends.append(end)
            nbytes = 0
    if nbytes:
        if ends:  # the rest is too small for itself
            ends[-1] = start
            place = [min(at, len(ends) - 1) for at in place]
        else:
            ends.append(start)
    return tuple(ends), tuple(place)


def batches(count: int, pitch: int, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of blocks whose pieces fit staging.

    Small at the beginning and at the end: the link is idle while the first is packed, and while the
    last is unpacked.
    """
    fits = limit // pitch
    least = min(fits, max(1, -(-RAMP // pitch)))
    first, step = 0, least
    while first < count:
        size = max(least, min(step, fits, (count - first) // 2))
        yield first, min(count, first + size)
        first, step = first + size, step * 2


def _fitting(spans: tuple[Span, ...], limit: int) -> Iterator[Span]:
    for span in spans:
        for at in range(0, span.nbytes, limit):
            yield Span(span.base + at, span.stride, min(limit, span.nbytes - at))


def _close(made: list[Piece], cut: list[Span], offset: int, group: int) -> int:
    """Make a piece of `cut`, empty it, and return where the next one starts in the image."""
    if not cut:
        return offset
    bits, at = 16, 0
    for span in cut:
        bits |= span.base | span.stride | span.nbytes | at
        at += span.nbytes
    width = bits & -bits
    # Small planes get small tiles, else most threads of a program would be masked out.
    widest = max(span.nbytes for span in cut) // width
    tile = min(2048, max(256, 1 << (max(1, widest) - 1).bit_length()))
    rows: array[int] = array("q")
    at = 0
    for span in cut:
        for part in range(0, span.nbytes, tile * width):
            nbytes = min(tile * width, span.nbytes - part)
            rows.extend((span.base + part, span.stride, nbytes, at + part))
        at += span.nbytes
    first = made[-1].first + made[-1].tiles if made else 0
    pitch = -(-at // PITCH) * PITCH
    made.append(Piece(offset, at, group, pitch, width, tile, rows, first))
    cut.clear()
    return offset + at
