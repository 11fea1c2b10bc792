"""Cutting images to fit staging."""

import pytest

from kvtide.kernels.chunks import PITCH, ROW, batches, coarse, pieces
from kvtide.kernels.device import Span

SPANS = (Span(1 << 20, 4096, 4096), Span(2 << 20, 4096, 4096), Span(3 << 20, 10_000, 10_000))


@pytest.mark.parametrize("limit", [512, 1024, 4096, 8192, 1 << 20])
@pytest.mark.parametrize("groups", [(3,), (1, 3), (1, 2, 3)])
def test_pieces_cover_the_image_once_and_in_order(limit: int, groups: tuple[int, ...]) -> None:
    at = first = 0
    for piece in pieces(SPANS, groups, limit):
        assert piece.offset == at
        assert piece.first == first
        assert 0 < piece.nbytes <= limit
        assert piece.pitch % PITCH == 0
        inside = 0
        for row in range(piece.tiles):
            base, stride, nbytes, offset = piece.rows[row * ROW : row * ROW + ROW]
            assert offset == inside
            assert 0 < nbytes <= piece.tile * piece.width
            for number in (base, stride, nbytes, offset):
                assert number % piece.width == 0
            inside += nbytes
        assert inside == piece.nbytes
        at += piece.nbytes
        first += piece.tiles
    assert at == 18_192
    ends = [sum(span.nbytes for span in SPANS[:end]) for end in groups]
    starts = {piece.offset for piece in pieces(SPANS, groups, limit)}
    assert starts >= {0, *ends[:-1]}  # none across the end of a group


def test_an_image_that_fits_is_one_piece() -> None:
    (piece,) = pieces(SPANS, (3,), 1 << 20)
    assert piece.width == 16
    assert piece.nbytes == 18_192


@pytest.mark.parametrize(("base", "width"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (0, 16)])
def test_the_element_is_as_wide_as_alignment_allows(base: int, width: int) -> None:
    (piece,) = pieces((Span((1 << 20) + base, 4096, 4096),), (1,), 1 << 20)
    assert piece.width == width


@pytest.mark.parametrize("groups", [(), (2,), (3, 3), (2, 1, 3), (4,)])
def test_groups_that_do_not_rise_to_the_planes_are_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="groups"):
        pieces(SPANS, groups, 4096)


@pytest.mark.parametrize("count", [1, 2, 7, 512, 1000])
@pytest.mark.parametrize("pitch", [512, 1 << 20, 2 << 20])
def test_batches_cover_the_blocks_and_fit(count: int, pitch: int) -> None:
    at = 0
    for first, end in batches(count, pitch, 32 << 20):
        assert first == at < end
        assert (end - first) * pitch <= 32 << 20
        at = end
    assert at == count


def test_small_groups_are_joined_in_order() -> None:
    spans = tuple(Span(4096 * i, 4096, 4096) for i in range(7))
    groups = (1, 2, 3, 4, 5, 6, 7)
    assert coarse(spans, groups, 4096) == (groups, (0, 1, 2, 3, 4, 5, 6))
    assert coarse(spans, groups, 8192) == ((2, 4, 7), (0, 0, 1, 1, 2, 2, 2))
    assert coarse(spans, groups, 1 << 20) == ((7,), (0,) * 7)
    assert coarse(spans, (3, 7), 8192) == ((3, 7), (0, 1))
