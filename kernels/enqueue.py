"""How a CUDA job is enqueued: chunk after chunk over its lanes, so that it needs no Python later (R22).

Chunk `i` goes to lane `i % lanes`: while one lane copies, the other packs. In a lane the stream's
order protects staging, so the only events are the ones at the start, at groups' ends and the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtide.kernels.chunks import ROW, Piece, batches
from kvtide.kernels.device import Direction, Job
from kvtide.kernels.lane import Copier, Lane, table_of

GroupEnds = Callable[[int], None]
WaitAfter = Callable[[Lane], None]


def prepare(cut: Sequence[Piece], lane: Lane, packing: bool) -> None:
    """Compile and load the kernels of these pieces, and make the lane's staging."""
    import torch

    from kvtide.kernels.pack import compile_for

    lane.staging()
    with torch.cuda.stream(lane.torch_stream):
        for piece in {(piece.width, piece.tile): piece for piece in cut}.values():
            compile_for(piece, packing)


def chunks_of(job: Job, cut: Sequence[Piece], staging: int) -> int:
    """How many chunks `packed` will make: more lanes than chunks are of no use."""
    count = len(job.blocks)
    return sum(len(list(batches(count, piece.pitch, staging))) for piece in cut)


def packed(
    job: Job,
    cut: Sequence[Piece],
    lanes: Sequence[Lane],
    staging: int,
    copier: Copier,
    wait_after: WaitAfter,
    group_ends: GroupEnds,
) -> None:
    """Through staging: planes by a kernel, images by the copy engine, one copy a slot."""
    import torch

    from kvtide.kernels.pack import pack, unpack

    store = job.direction is Direction.STORE
    count = len(job.blocks)
    table = table_of([piece.rows for piece in cut], job.blocks)
    ids_at = (len(table) - count) * table.itemsize
    tables = [lane.put_table(table) for lane in lanes]
    waited = [False] * len(lanes)
    turn = 0
    for number, piece in enumerate(cut):
        for first, end in batches(count, piece.pitch, staging):
            at, turn = turn, (turn + 1) % len(lanes)
            lane, base = lanes[at], lanes[at].staging()
            rows = tables[at] + piece.first * ROW * 8
            ids = tables[at] + ids_at + first * 8
            images = [base + i * piece.pitch for i in range(end - first)]
            slots = [host + piece.offset for host in job.hosts[first:end]]
            sizes = [piece.nbytes] * (end - first)
            if not store:
                copier.copy(images, slots, sizes, lane.stream)
            if not waited[at]:
                # Only here: a load fills its staging while the engine still reads the pages.
                wait_after(lane)
                waited[at] = True
            with torch.cuda.stream(lane.torch_stream):
                (pack if store else unpack)(piece, rows, ids, end - first, base)
            if store:
                copier.copy(slots, images, sizes, lane.stream)
        if number + 1 == len(cut) or cut[number + 1].group != piece.group:
            group_ends(piece.group)


def plain(
    job: Job,
    ends: Sequence[int],
    lane: Lane,
    copier: Copier,
    wait_after: WaitAfter,
    group_ends: GroupEnds,
) -> None:
    """Plane by plane through the copy engine: right everywhere, slow for small planes."""
    wait_after(lane)
    offset = start = 0
    for group, stop in enumerate(ends):
        for span in job.spans[start:stop]:
            planes = [span.base + block * span.stride for block in job.blocks]
            slots = [host + offset for host in job.hosts]
            sizes = [span.nbytes] * len(planes)
            if job.direction is Direction.STORE:
                copier.copy(slots, planes, sizes, lane.stream)
            else:
                copier.copy(planes, slots, sizes, lane.stream)
            offset += span.nbytes
        start = stop
        group_ends(group)
