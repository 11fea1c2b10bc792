"""Pages described as planes: where each byte of an image lies, and what is no geometry."""

import contextlib
import ctypes
import itertools
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.storage.geometries import BLOCKS, LAYOUTS, Layout

from kvtide import GeometryMismatch, PagedKV, Plane


def small(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize("make", LAYOUTS)
def test_the_planes_of_a_block_hold_its_bytes_in_order(make: Callable[[], Layout]) -> None:
    layout = make()
    layout.fill(1)
    paged = layout.paged()
    assert paged.blocks == BLOCKS
    assert paged.device == ("cpu", 0)
    for block in range(BLOCKS):
        planes = [ctypes.string_at(p.base + block * p.stride, p.nbytes) for p in paged.planes_at]
        assert b"".join(planes) == layout.image(block)


@pytest.mark.parametrize("make", LAYOUTS)
def test_an_image_is_ordered_by_layer(make: Callable[[], Layout]) -> None:
    layers = [layer for _, layer in make().paged().planes]
    assert layers == sorted(layers)


def test_layers_can_be_named_and_order_the_image() -> None:
    first, second = small(4, 16), small(4, 32)
    paged = PagedKV.from_tensors([first, second], layers=[7, 2])
    assert paged.planes == ((64, 2), (32, 7))
    assert paged.planes_at[0].base == second.data_ptr()


def test_spans_are_the_planes_without_their_layers() -> None:
    tensor = small(4, 16)
    (span,) = PagedKV.from_tensors([tensor]).spans
    assert (span.base, span.stride, span.nbytes) == (tensor.data_ptr(), 32, 32)


def test_the_description_keeps_the_tensors() -> None:
    tensor = small(4, 16)
    assert any(owner is tensor for owner in PagedKV.from_tensors([tensor]).owners)


def test_one_block_needs_no_stride() -> None:
    assert PagedKV.from_tensors([small(16).expand(1, 16)]).blocks == 1


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ([], {}, "at least one tensor"),
        ([()], {}, "at least one tensor"),
        ([5], {}, "expected tensors, got int"),
        ([small(4, 8), "kv"], {}, "expected tensors, got str"),
        ([small(4, 8), small(4, 8, dtype=torch.bfloat16)], {}, "all tensors must agree"),
        ([small(4, 8), torch.zeros(4, 8, dtype=torch.float16, device="meta")], {}, "all tensors must agree"),
        ([torch.zeros(4, 8, device="meta")], {}, "'meta' are not supported"),
        ([torch.zeros(4, 8).to_sparse()], {}, "has no strides"),
        ([small(4, 8), small(5, 8)], {}, "number of blocks"),
        ([small(4, 8)], {"block_dim": 2}, "block_dim 2 is no dimension"),
        ([small(4, 8)], {"block_dim": -1}, "block_dim -1 is no dimension"),
        ([small(4, 8)], {"layers": [0, 1]}, "1 entries and 2 layers"),
        ([small(4, 8)], {"layers": [-1]}, "no layer"),
        ([small(4, 8)], {"layers": ["0"]}, "integers"),
        ([small(0, 8)], {}, "at least one block"),
        ([small(4, 0)], {}, "no bytes"),
        # The inner dimensions have to be dense: these are transposed, strided and expanded.
        ([small(4, 8, 2).transpose(1, 2)], {}, "not dense"),
        ([small(4, 8)[:, ::2]], {}, "not dense"),
        ([small(4, 1).expand(4, 8)], {}, "not dense"),
        # Expanded where the blocks are counted, and where planes are.
        ([small(8).expand(4, 8)], {}, "overlap"),
        ([small(4, 8).expand(2, 4, 8)], {"block_dim": 1}, "share memory"),
        # One tensor twice.
        ([small(4, 8)] * 2, {}, "share memory"),
    ],
)
def test_what_is_no_geometry_is_said_so(
    tensors: list[object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(GeometryMismatch, match=re.escape(message)):
        PagedKV.from_tensors(tensors, **options)  # type: ignore[arg-type]


def test_S4_8_a_device_ordinal_that_no_device_has() -> None:
    planes = [Plane(4096, 64, 64, 0)]
    for ordinal in (2**40, 2**31, -1, True, 1.0):
        with pytest.raises(GeometryMismatch, match="ordinal"):
            PagedKV(planes, blocks=2, dtype="uint8", device=("cuda", ordinal))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plane",
    [Plane(0, 8, 8, 0), Plane(64, 8, 0, 0), Plane(64, 8, 8, -1), Plane(64, 4, 8, 0), Plane(64, 8, 8.0, 0)],  # type: ignore[arg-type]
)
def test_a_plane_that_cannot_be(plane: Plane) -> None:
    with pytest.raises(GeometryMismatch):
        PagedKV([plane], blocks=2, dtype="uint8", device=("cpu", 0))


@pytest.mark.parametrize("blocks", [0, -1, 1.5, True])
def test_a_number_of_blocks_that_cannot_be(blocks: int) -> None:
    with pytest.raises(GeometryMismatch, match="at least one block"):
        PagedKV([Plane(64, 8, 8, 0)], blocks=blocks, dtype="uint8", device=("cpu", 0))


# -- planes may interleave, never share a byte ------------------------------------------------

small_planes = st.builds(
    lambda base, nbytes, padding: Plane(base, nbytes + padding, nbytes, 0),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(0, 12),
)


@settings(max_examples=1500, deadline=None)
@given(planes=st.lists(small_planes, min_size=1, max_size=5), blocks=st.integers(1, 6))
# The third plane meets the first one, which is not its neighbour.
@example(planes=[Plane(1, 10, 4, 0), Plane(5, 1, 1, 0), Plane(12, 10, 2, 0)], blocks=3)
# Three that interleave without sharing anything.
@example(planes=[Plane(1, 9, 3, 0), Plane(4, 9, 3, 0), Plane(7, 9, 3, 0)], blocks=4)
# Strides that differ, and yet no byte is shared.
@example(planes=[Plane(1, 4, 1, 0), Plane(2, 8, 1, 0)], blocks=4)
def test_planes_are_refused_exactly_if_they_share_a_byte(planes: list[Plane], blocks: int) -> None:
    taken = [
        {plane.base + block * plane.stride + at for block in range(blocks) for at in range(plane.nbytes)}
        for plane in planes
    ]
    share = any(one & other for one, other in itertools.combinations(taken, 2))
    with pytest.raises(GeometryMismatch, match="share memory") if share else contextlib.nullcontext():
        PagedKV(planes, blocks=blocks, dtype="uint8", device=("cpu", 0))
