"""The engine's paged KV memory, described as planes.

A plane is one run of bytes a block: base address, block stride, bytes a block, layer. Nothing is
inferred from a tensor's shape but which dimension counts blocks, and the caller says that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtide.core.errors import GeometryMismatch
from kvtide.kernels.device import Span

if TYPE_CHECKING:
    import torch


class Plane(NamedTuple):
    """Bytes of one layer's part: block `i` is `nbytes` at `base + i * stride`."""

    base: int
    stride: int
    nbytes: int
    layer: int


class PagedKV:
    """Pages on one device. The memory is the engine's; `owners` keep it alive while copies run.

    planes_at: addresses and strides, in the image's order: layer by layer. planes: of these,
    (bytes a block, layer); spans: the same as kernels see them.
    blocks: pages of every plane. device: (`"cpu"` or `"cuda"`, ordinal).
    block_tokens: tokens a page, if the engine says so; checked against the setting at attach.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        *,
        blocks: int,
        dtype: str,
        device: tuple[str, int],
        block_tokens: int | None = None,
        owners: Sequence[Any] = (),
    ) -> None:
        if not planes:
            raise GeometryMismatch("pages need at least one plane")
        if type(blocks) is not int or blocks < 1:
            raise GeometryMismatch(f"pages need at least one block, not {blocks!r}")
        for plane in planes:
            base, stride, nbytes, layer = plane
            if not (type(base) is type(stride) is type(nbytes) is type(layer) is int):
                raise GeometryMismatch(f"{plane} must consist of integers")
            if nbytes < 1 or base < 1 or layer < 0:
                raise GeometryMismatch(f"{plane} has no address, no bytes or no layer")
            if blocks > 1 and stride < nbytes:
                raise GeometryMismatch(
                    f"blocks of a plane overlap: stride {stride} < {nbytes} bytes; is "
                    "block_dim the dimension that counts blocks, and is the tensor not expanded?"
                )
        if type(device[1]) is not int or device[1] not in range(1 << 15):
            raise GeometryMismatch(f"no device can have the ordinal {device[1]}")
        self.planes_at = tuple(sorted(planes, key=lambda plane: plane.layer))
        self.planes = tuple((plane.nbytes, plane.layer) for plane in self.planes_at)
        self.spans = tuple(Span(plane.base, plane.stride, plane.nbytes) for plane in self.planes_at)
        self.blocks = blocks
        self.dtype = dtype
        self.device = device
        self.block_tokens = block_tokens
        self.owners = tuple(owners)
        _refuse_overlap(self.planes_at, blocks)

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        *,
        block_dim: int = 0,
        layers: Sequence[int] | None = None,
        block_tokens: int | None = None,
    ) -> PagedKV:
        """Describe tensors of any shape `[..., blocks, ...]`, a tensor or a tuple of them a layer.

        block_dim: the dimension that counts blocks. Each index of the dimensions before it is a
        plane of its own (`[2, blocks, ...]` with `block_dim=1` is K and V apart; a transformers
        layer `[1, heads, blocks, tokens, dim]` with `block_dim=2` is a plane a head). The
        dimensions behind it are opaque and must be dense; the block stride may be padded.
        layers: the layer of each entry, by default its position. block_tokens: tokens a page, to
        be checked against the cache's. Raises `GeometryMismatch`.
        """
        entries = [tuple(t) if isinstance(t, (list, tuple)) else (t,) for t in tensors]
        flat = [tensor for entry in entries for tensor in entry]
        if not flat:
            raise GeometryMismatch("pass at least one tensor")
        numbers = list(range(len(entries))) if layers is None else list(layers)
        if len(numbers) != len(entries):
            raise GeometryMismatch(f"{len(entries)} entries and {len(numbers)} layers")
        first = flat[0]
        for tensor in flat:
            if not hasattr(tensor, "data_ptr"):
                raise GeometryMismatch(f"expected tensors, got {type(tensor).__name__}")
            if str(tensor.layout) != "torch.strided":
                raise GeometryMismatch(f"a {tensor.layout} tensor has no strides")
            if tensor.device != first.device or tensor.dtype != first.dtype:
                raise GeometryMismatch(
                    f"all tensors must agree: {tensor.dtype} on {tensor.device} is not "
                    f"{first.dtype} on {first.device}"
                )
            if not 0 <= block_dim < tensor.dim():
                raise GeometryMismatch(f"block_dim {block_dim} is no dimension of {tuple(tensor.shape)}")
            if tensor.shape[block_dim] != first.shape[block_dim]:
                raise GeometryMismatch("the tensors differ in their number of blocks")
        kind = first.device.type
        if kind not in ("cpu", "cuda"):
            raise GeometryMismatch(f"pages on {kind!r} are not supported: use cpu or cuda tensors")
        planes = [
            plane
            for layer, entry in zip(numbers, entries, strict=True)
            for tensor in entry
            for plane in _planes(tensor, block_dim, layer)
        ]
        return cls(
            planes,
            blocks=first.shape[block_dim],
            dtype=str(first.dtype).removeprefix("torch."),
            device=(kind, first.device.index or 0),
            block_tokens=block_tokens,
            owners=flat,
        )


def _planes(tensor: torch.Tensor, block_dim: int, layer: int) -> list[Plane]:
    shape, strides, item = tensor.shape, tensor.stride(), tensor.element_size()
    dense = 1
    for dim in range(tensor.dim() - 1, block_dim, -1):
        if shape[dim] != 1 and strides[dim] != dense:
            raise GeometryMismatch(
                f"dimension {dim} of {tuple(shape)} is not dense inside a block (stride "
                f"{strides[dim]}, expected {dense}): describe its parts as planes of their own"
            )
        dense *= shape[dim]
    bases = [tensor.data_ptr()]
    for dim in range(block_dim):
        bases = [base + index * strides[dim] * item for base in bases for index in range(shape[dim])]
    return [Plane(base, strides[block_dim] * item, dense * item, layer) for base in bases]


def _refuse_overlap(planes: Sequence[Plane], blocks: int) -> None:
    """Two planes may interleave, never share bytes: a load of one would overwrite the other."""
    reaching: list[tuple[int, Plane]] = []
    for high in sorted(planes, key=lambda plane: plane.base):
        # What ends before this plane begins meets none of those that follow either.
        reaching = [(end, low) for end, low in reaching if end > high.base]
        for _, low in reaching:
            if _share_bytes(low, high, blocks):
                raise GeometryMismatch(f"two planes share memory: {low} and {high}")
        reaching.append((high.base + (blocks - 1) * high.stride + high.nbytes, high))


def _share_bytes(one: Plane, other: Plane, blocks: int) -> bool:
    """Whether any block of one plane meets any block of the other."""
    wide, narrow = (one, other) if one.stride >= other.stride else (other, one)
    step = max(1, narrow.stride)  # with one block the stride says nothing, and may be 0
    # Where the strides agree, the two ends of one plane stand at every distance to the other.
    walk = (0, blocks - 1) if wide.stride == narrow.stride else range(blocks)
    for number in walk:
        at = wide.base + number * wide.stride - narrow.base
        first = max(0, (at - narrow.nbytes) // step + 1)
        last = min(blocks - 1, (at + wide.nbytes - 1) // step)
        if first <= last:
            return True
    return False
