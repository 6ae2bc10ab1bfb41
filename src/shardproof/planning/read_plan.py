"""The plan of a load on one rank: which stored chunks hold which part of which wanted box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardproof.errors import FormatError, TilingError
from shardproof.geometry import Boxes, BoxTable, consecutive, intersect, overlapping_pairs, tiling_faults
from shardproof.planning.chunk_table import ChunkTable

__all__ = ["ReadPlan", "Stored", "Wanted", "plan_reads", "prove_chunks"]


_PAIRS_EACH = 16
"""Pairs of a wanted box and a chunk that are compared for each box and chunk, at most, without a search."""


class Stored(Protocol):
    """A tensor of a checkpoint."""

    @property
    def key(self) -> str:
        """Its name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The boxes that a rank wants. A row has one entry for each dimension of its tensor."""

    tensor: NDArray[np.int64]
    """(w,) row of the manifest's tensor table."""
    box_offsets: NDArray[np.int64]
    box_sizes: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """One row for each part of a wanted box that one chunk holds, sorted by chunk."""

    chunk: NDArray[np.int64]
    """(n,) row of the chunk table."""
    want: NDArray[np.int64]
    """(n,) row of `Wanted`."""
    run_start: NDArray[np.int64]
    """(n,) first element of the part in the row-major order of the wanted box; -1 if it is no run there."""
    chunk_start: NDArray[np.int64]
    """(n,) first element of the part in the row-major order of the chunk."""
    chunk_stop: NDArray[np.int64]
    """(n,) the one after its last there. The part is a run of the chunk if it has all elements between."""
    in_chunk: NDArray[np.int64]
    """(n, width) offsets of the part from the chunk's first element; dimensions beyond the tensor's are 0."""
    in_want: NDArray[np.int64]
    """(n, width) offsets of the part from the wanted box's first element."""
    sizes: NDArray[np.int64]
    """(n, width) sizes of the part; dimensions beyond the tensor's are 1."""

    def for_wants(self, want: NDArray[np.int64]) -> ReadPlan:
        """The same parts for other destinations."""
        return replace(self, want=want)

    def only(self, rows: NDArray[np.bool_]) -> ReadPlan:
        """The plan of some of the rows."""
        return ReadPlan(
            self.chunk[rows],
            self.want[rows],
            self.run_start[rows],
            self.chunk_start[rows],
            self.chunk_stop[rows],
            self.in_chunk[rows],
            self.in_want[rows],
            self.sizes[rows],
        )


def prove_chunks(tensors: Sequence[Stored], table: ChunkTable, chosen: NDArray[np.int64]) -> None:
    """Proves that the stored chunks of some tensors tile them.

    Args:
        tensors: all of the checkpoint.
        table: all chunks.
        chosen: rows of the tensors to prove.

    Raises:
        TilingError: naming the first tensor at fault.
        FormatError: more boxes than a proof would hold in memory.
    """
    chosen = _distinct(chosen)
    ndims = _ndims(tensors, chosen)
    for dimensions in _distinct(ndims).tolist():
        group = chosen[ndims == dimensions]
        rows = _rows_of(table, group)
        local = np.searchsorted(group, table.tensor[rows])
        shapes = [tensors[row].shape for row in group.tolist()]
        extents = np.fromiter(chain.from_iterable(shapes), np.int64)
        extents = extents.reshape(len(group), dimensions)
        try:
            faults = tiling_faults(extents, local, table.boxes.boxes(rows, dimensions))
        except ValueError as error:
            raise FormatError(f"the chunk index is no tiling that could have been saved: {error}") from error
        if faults:
            fault = faults[0]
            key, shape = tensors[int(group[fault.tensor])].key, shapes[fault.tensor]
            raise TilingError(
                f"checkpoint: tensor {key!r} of shape {list(shape)}: {fault.kind} at offsets "
                f"{list(fault.offsets)}, sizes {list(fault.sizes)}: the stored chunks do not cover "
                "it exactly once. Restore another step, and report this: a checkpoint is proved before it is "
                "written",
                key=key,
                kind=fault.kind,
                box=[list(fault.offsets), list(fault.sizes)],
                holders={},
            )


def plan_reads(tensors: Sequence[Stored], table: ChunkTable, wanted: Wanted) -> ReadPlan:
    """Plans the reading of wanted boxes, and proves first that every element of them is stored once.

    Args:
        tensors: all of the checkpoint. Only those that are wanted are looked at.
        table: all chunks.
        wanted: the boxes.

    Raises:
        TilingError: the stored chunks of a wanted tensor do not tile it, or a wanted box is not covered.
    """
    prove_chunks(tensors, table, wanted.tensor)
    ndims = _ndims(tensors, wanted.tensor)
    want_table = BoxTable.of(ndims, wanted.box_offsets, wanted.box_sizes)
    width = int(ndims.max(initial=0))
    parts = [_no_parts(width)]
    for dimensions in _distinct(ndims).tolist():
        wants = np.flatnonzero(ndims == dimensions)
        rows = _rows_of(table, _distinct(wanted.tensor[wants]))
        want_boxes, chunk_boxes = want_table.boxes(wants, dimensions), table.boxes.boxes(rows, dimensions)
        of_want, of_chunk = _pairs(want_boxes, wanted.tensor[wants], chunk_boxes, table.tensor[rows])
        want, chunk = want_boxes.take(of_want), chunk_boxes.take(of_chunk)
        shared = intersect(want, chunk)
        _prove_covered(tensors, wanted, wants, want_boxes, of_want, shared)
        parts.append(
            ReadPlan(
                rows[of_chunk],
                wants[of_want],
                _run_start(shared, want),
                *_extent(shared, chunk),
                _widened(shared.offsets - chunk.offsets, width, 0),
                _widened(shared.offsets - want.offsets, width, 0),
                _widened(shared.sizes, width, 1),
            )
        )
    return _sorted_by_chunk(parts)


def _pairs(
    wants: Boxes, want_tensor: NDArray[np.int64], chunks: Boxes, chunk_tensor: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of wanted boxes and of chunks of the same tensor that share an element, by want, then chunk.

    Where tensors have few chunks (`_PAIRS_EACH`), every want is compared with every chunk of its tensor:
    for 20,000 tensors in 2 chunks that takes 3 ms and the search of all boxes 25.

    Args:
        wants: wanted boxes.
        want_tensor: (wants,) their tensors.
        chunks: stored boxes.
        chunk_tensor: (chunks,) their tensors, ascending.
    """
    first = np.searchsorted(chunk_tensor, want_tensor, "left")
    count = np.searchsorted(chunk_tensor, want_tensor, "right") - first
    if int(count.sum()) > _PAIRS_EACH * (len(wants) + len(chunks)):
        return overlapping_pairs(_with_tensor(wants, want_tensor), _with_tensor(chunks, chunk_tensor))
    of_want = np.repeat(np.arange(len(wants)), count)
    of_chunk = consecutive(first, count)
    meet = intersect(wants.take(of_want), chunks.take(of_chunk)).nonempty()
    return of_want[meet], of_chunk[meet]


def _no_parts(width: int) -> ReadPlan:
    none, wide = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
    return ReadPlan(none, none, none, none, none, wide, wide, wide)


def _sorted_by_chunk(parts: Sequence[ReadPlan]) -> ReadPlan:
    chunk = np.concatenate([part.chunk for part in parts])
    order = np.argsort(chunk, kind="stable")
    return ReadPlan(
        chunk[order],
        np.concatenate([part.want for part in parts])[order],
        np.concatenate([part.run_start for part in parts])[order],
        np.concatenate([part.chunk_start for part in parts])[order],
        np.concatenate([part.chunk_stop for part in parts])[order],
        np.concatenate([part.in_chunk for part in parts])[order],
        np.concatenate([part.in_want for part in parts])[order],
        np.concatenate([part.sizes for part in parts])[order],
    )


def _ndims(tensors: Sequence[Stored], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """(rows,) dimensions of some tensors."""
    return np.fromiter([len(tensors[row].shape) for row in rows.tolist()], np.int64, len(rows))


def _distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The distinct values, ascending, of small numbers such as rows and dimensions; faster than a sort."""
    return np.flatnonzero(np.bincount(values))


def _rows_of(table: ChunkTable, tensors: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of the chunks of some tensors (ascending); the table is sorted by tensor."""
    first = np.searchsorted(table.tensor, tensors, "left")
    count = np.searchsorted(table.tensor, tensors, "right") - first
    return consecutive(first, count)


def _with_tensor(boxes: Boxes, tensor: NDArray[np.int64]) -> Boxes:
    """The boxes with the tensor's row as a first dimension, so that boxes of different tensors never meet."""
    return Boxes(
        np.column_stack((tensor, boxes.offsets)), np.column_stack((np.ones_like(tensor), boxes.sizes))
    )


def _prove_covered(
    tensors: Sequence[Stored],
    wanted: Wanted,
    wants: NDArray[np.int64],
    boxes: Boxes,
    of_want: NDArray[np.int64],
    shared: Boxes,
) -> None:
    """Chunks of one tensor are disjoint, so a wanted box is covered when the volumes add up."""
    found = np.zeros(len(wants), np.int64)
    np.add.at(found, of_want, shared.volumes())
    short = np.flatnonzero(found != boxes.volumes())
    if len(short):
        row = int(short[0])
        key = tensors[int(wanted.tensor[wants[row]])].key
        offsets, sizes = boxes.offsets[row].tolist(), boxes.sizes[row].tolist()
        raise TilingError(
            f"tensor {key!r}: the wanted box at offsets {offsets}, sizes {sizes} has "
            f"{int(boxes.volumes()[row])} "
            f"elements, of which the checkpoint holds {int(found[row])}; the box reaches outside the tensor",
            key=key,
            kind="out of bounds",
            box=[offsets, sizes],
            holders={},
        )


def _run_start(part: Boxes, parent: Boxes) -> NDArray[np.int64]:
    """First element of each part in its parent's row-major order where the part is one run of it, else -1."""
    start, stop = _extent(part, parent)
    return np.where(stop - start == part.volumes(), start, -1)


def _extent(part: Boxes, parent: Boxes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First element of each part in its parent's row-major order, and the one after its last."""
    count, dimensions = part.sizes.shape
    strides = np.ones((count, dimensions), np.int64)
    if dimensions:
        np.cumprod(parent.sizes[:, :0:-1], axis=1, out=strides[:, -2::-1])
    start = ((part.offsets - parent.offsets) * strides).sum(axis=1)
    return start, start + ((part.sizes - 1) * strides).sum(axis=1) + 1


def _widened(columns: NDArray[np.int64], width: int, fill: int) -> NDArray[np.int64]:
    wide = np.full((len(columns), width), fill, np.int64)
    wide[:, : columns.shape[1]] = columns
    return wide
