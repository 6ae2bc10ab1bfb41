"""The chunk table, and the plan of a load on one rank: which chunk has which part of which requested box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.geometry import (
    Boxes,
    BoxTable,
    consecutive,
    intersect,
    overlapping_pairs,
    stable_order,
    tiling_faults,
)
from shardproof.errors import FormatError, TilingError


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """A row for each chunk, sorted by `tensor`. The last three columns form `boxes`."""

    tensor: NDArray[np.int64]
    """(n,) row of the chunk's tensor in the manifest."""
    file: NDArray[np.int64]
    """(n,) row of the chunk's file in the manifest."""
    byte_start: NDArray[np.int64]
    """(n,) first byte of the chunk, counted from the start of the file."""
    byte_count: NDArray[np.int64]
    """(n,) size of the chunk in bytes."""
    digest: NDArray[np.uint64]
    """(n, 2) high and low half of the chunk's digest (`shardproof.engine.format.ChunkHasher`)."""
    box_start: NDArray[np.int64]
    """(n + 1,) row pointers."""
    box_offsets: NDArray[np.int64]
    """(m,) global offsets of the chunks, elements."""
    box_sizes: NDArray[np.int64]
    """(m,) sizes of the chunks, elements."""

    @property
    def boxes(self) -> BoxTable:
        """The box of each chunk."""
        return BoxTable(self.box_start, self.box_offsets, self.box_sizes)

    def __len__(self) -> int:
        return len(self.tensor)


def chunk_table(
    tensor: np.ndarray[Any, Any],
    file: np.ndarray[Any, Any],
    byte_start: np.ndarray[Any, Any],
    byte_count: np.ndarray[Any, Any],
    digest: np.ndarray[Any, Any],
    box_start: np.ndarray[Any, Any],
    box_offsets: np.ndarray[Any, Any],
    box_sizes: np.ndarray[Any, Any],
) -> ChunkTable:
    """Builds a `ChunkTable`. Sorts the rows by tensor; rows of one tensor keep their order."""
    order = stable_order(tensor)
    boxes = BoxTable(box_start, box_offsets, box_sizes).take(order)
    box = boxes.start, boxes.offsets, boxes.sizes
    return ChunkTable(tensor[order], file[order], byte_start[order], byte_count[order], digest[order], *box)


OWN_ADVICE = "Load another step, and report a bug: each save proves that its chunks cover their tensors"
"""Advice about a checkpoint that shardproof saved."""
_PAIRS_EACH = 16
"""`_pairs` compares all pairs if there are at most this many per box and chunk; otherwise it searches."""


class TensorShape(Protocol):
    """Key and shape of a tensor in a checkpoint."""

    @property
    def key(self) -> str:
        """The key."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestedBoxes:
    """The boxes that a rank requests. The last two columns are as in `BoxTable`."""

    tensor: NDArray[np.int64]
    """(w,) row of the box's tensor in the manifest."""
    box_offsets: NDArray[np.int64]
    """(m,) global offsets of the boxes."""
    box_sizes: NDArray[np.int64]
    """(m,) sizes of the boxes."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """A row for each intersection of a requested box and a chunk (a part), sorted by chunk."""

    chunk: NDArray[np.int64]
    """(n,) row of the chunk table."""
    requested: NDArray[np.int64]
    """(n,) row of the requested box."""
    requested_start: NDArray[np.int64]
    """(n,) first element of the part in the row-major order of the requested box; -1 if the part is not
    contiguous there."""
    chunk_start: NDArray[np.int64]
    """(n,) first element of the part in the row-major order of the chunk."""
    chunk_stop: NDArray[np.int64]
    """(n,) element after the part's last one in that order. The part is contiguous in the chunk if it
    contains all elements between the two."""
    in_chunk: NDArray[np.int64]
    """(n, width) offsets of the part relative to the chunk; 0 in dimensions that the tensor does not have."""
    in_requested: NDArray[np.int64]
    """(n, width) offsets of the part relative to the requested box."""
    sizes: NDArray[np.int64]
    """(n, width) sizes of the part; 1 in dimensions that the tensor does not have."""

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> ReadPlan:
        """The plan of some rows: indices in any order, or a mask."""
        return ReadPlan(*(getattr(self, column.name)[rows] for column in fields(self)))


def prove_chunks(
    tensors: Sequence[TensorShape], table: ChunkTable, chosen: NDArray[np.int64], *, advice: str = OWN_ADVICE
) -> None:
    """Proves that the stored chunks of some tensors tile them.

    Args:
        tensors: all tensors of the checkpoint.
        table: all chunks of the checkpoint.
        chosen: rows of the chosen tensors.
        advice: what the user can do about chunks that do not tile their tensor, for the error message.

    Raises:
        TilingError: the chunks of a tensor do not tile it. The error names the first such tensor.
        FormatError: there are so many chunks that the proof would not fit in memory.
    """
    chosen = _distinct(chosen)
    ndims = _ndims(tensors, chosen)
    for dimensions in _distinct(ndims).tolist():
        group = chosen[ndims == dimensions]
        rows = _rows_of(table, group)
        position = np.searchsorted(group, table.tensor[rows])
        shapes = [tensors[row].shape for row in group.tolist()]
        extents = np.fromiter(chain.from_iterable(shapes), np.int64)
        extents = extents.reshape(len(group), dimensions)
        try:
            faults = tiling_faults(extents, position, table.boxes.boxes(rows, dimensions))
        except ValueError as error:
            raise FormatError(f"the chunk index is not a tiling that a save can write: {error}") from error
        if faults:
            fault = faults[0]
            key, shape = tensors[int(group[fault.tensor])].key, shapes[fault.tensor]
            raise TilingError(
                f"checkpoint: tensor {key!r} of shape {list(shape)}: {fault.kind} at offsets "
                f"{list(fault.offsets)}, sizes {list(fault.sizes)}: the stored chunks do not cover the "
                f"tensor exactly once. {advice}",
                key=key,
                kind=fault.kind,
                box=[list(fault.offsets), list(fault.sizes)],
                holders={},
            )


def plan_reads(
    tensors: Sequence[TensorShape], table: ChunkTable, wanted: RequestedBoxes, *, advice: str = OWN_ADVICE
) -> ReadPlan:
    """Plans which parts of which chunks fill the requested boxes.

    The rows are sorted by chunk, one for each intersection of a box and a chunk.

    The function first proves that each element of the boxes is stored exactly once. The arguments are those
    of `prove_chunks`.

    Raises:
        TilingError: the chunks of a requested tensor do not tile it, or a box exceeds its tensor.
        FormatError: see `prove_chunks`.
    """
    prove_chunks(tensors, table, wanted.tensor, advice=advice)
    ndims = _ndims(tensors, wanted.tensor)
    want_table = BoxTable.of(ndims, wanted.box_offsets, wanted.box_sizes)
    width = int(ndims.max(initial=0))
    none, wide = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
    parts = [ReadPlan(none, none, none, none, none, wide, wide, wide)]
    for dimensions in _distinct(ndims).tolist():
        wants = np.flatnonzero(ndims == dimensions)
        rows = _rows_of(table, _distinct(wanted.tensor[wants]))
        want_boxes, chunk_boxes = want_table.boxes(wants, dimensions), table.boxes.boxes(rows, dimensions)
        of_want, of_chunk = _pairs(want_boxes, wanted.tensor[wants], chunk_boxes, table.tensor[rows])
        want, chunk = want_boxes.take(of_want), chunk_boxes.take(of_chunk)
        shared = intersect(want, chunk)
        _prove_covered(tensors, wanted, wants, want_boxes, of_want, shared)
        start, stop = _extent(shared, want)
        parts.append(
            ReadPlan(
                rows[of_chunk],
                wants[of_want],
                np.where(stop - start == shared.volumes(), start, -1),
                *_extent(shared, chunk),
                _widened(shared.offsets - chunk.offsets, width, 0),
                _widened(shared.offsets - want.offsets, width, 0),
                _widened(shared.sizes, width, 1),
            )
        )
    columns = (np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(ReadPlan))
    plan = ReadPlan(*columns)
    return plan.take(np.argsort(plan.chunk, kind="stable"))


def _pairs(
    wants: Boxes, want_tensor: NDArray[np.int64], chunks: Boxes, chunk_tensor: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of a requested box and a chunk of its tensor that share an element, sorted by box, then chunk.

    If tensors have few chunks (`_PAIRS_EACH`), comparing each box with each chunk of its tensor is faster
    than a search through all boxes. `chunk_tensor`, the row of each chunk's tensor, is ascending.
    """
    first = np.searchsorted(chunk_tensor, want_tensor, "left")
    count = np.searchsorted(chunk_tensor, want_tensor, "right") - first
    if int(count.sum()) > _PAIRS_EACH * (len(wants) + len(chunks)):
        return overlapping_pairs(_with_tensor(wants, want_tensor), _with_tensor(chunks, chunk_tensor))
    of_want = np.repeat(np.arange(len(wants)), count)
    of_chunk = consecutive(first, count)
    meet = intersect(wants.take(of_want), chunks.take(of_chunk)).nonempty()
    return of_want[meet], of_chunk[meet]


def _ndims(tensors: Sequence[TensorShape], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """(rows,) number of dimensions of the tensors in these rows."""
    return np.fromiter([len(tensors[row].shape) for row in rows.tolist()], np.int64, len(rows))


def _distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The distinct values, ascending. For small integers (rows, dimensions) this is faster than a sort."""
    return np.flatnonzero(np.bincount(values))


def _rows_of(table: ChunkTable, tensors: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of the chunks of some tensors. The tensors' rows are ascending."""
    first = np.searchsorted(table.tensor, tensors, "left")
    count = np.searchsorted(table.tensor, tensors, "right") - first
    return consecutive(first, count)


def _with_tensor(boxes: Boxes, tensor: NDArray[np.int64]) -> Boxes:
    """Adds the tensor's row as first dimension, so that boxes of different tensors never overlap."""
    return Boxes(
        np.column_stack((tensor, boxes.offsets)), np.column_stack((np.ones_like(tensor), boxes.sizes))
    )


def _prove_covered(
    tensors: Sequence[TensorShape],
    wanted: RequestedBoxes,
    wants: NDArray[np.int64],
    boxes: Boxes,
    of_want: NDArray[np.int64],
    shared: Boxes,
) -> None:
    """Raises if the chunks do not cover a box.

    The chunks of a tensor are disjoint. So they cover a box if the volumes of its parts add up to its own.
    """
    found = np.zeros(len(wants), np.int64)
    np.add.at(found, of_want, shared.volumes())
    short = np.flatnonzero(found != boxes.volumes())
    if len(short):
        row = int(short[0])
        key = tensors[int(wanted.tensor[wants[row]])].key
        offsets, sizes = boxes.offsets[row].tolist(), boxes.sizes[row].tolist()
        raise TilingError(
            f"tensor {key!r}: the requested box at offsets {offsets}, sizes {sizes} has "
            f"{int(boxes.volumes()[row])} elements, but the checkpoint stores {int(found[row])} of them. The "
            "box must lie within the tensor",
            key=key,
            kind="out of bounds",
            box=[offsets, sizes],
            holders={},
        )


def _extent(part: Boxes, parent: Boxes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First element of each part in its parent's row-major order, and the element after its last one."""
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
