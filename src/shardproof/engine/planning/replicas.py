"""The boxes that several ranks hold, and the save in which the ranks compare these replicas.

Note: How successive samples cover all replicas
-----------------------------------------------
The boxes that the same ranks hold form a *set*. All sets lie on one line of bytes. Sets that share a rank do
not overlap there: a set begins after the last byte of any of its ranks. Sets with the most holders come
first. So if sets are nested, as those of a device mesh are, no rank has a gap.

Boxes are cut into *slices* of at most a quarter of `sample_bytes`, and the line into *turns* of three
quarters. A slice belongs to the turn in which it begins. Therefore

- all holders of a slice derive its turn from the plan, and compare it in the same save;
- no rank compares more than `sample_bytes` in a turn: its slices do not overlap, and only the last exceeds
  the turn;
- after as many saves as there are turns, every replica has been compared.

The coordinator sends each rank the start of its sets on the line, and the rows of their pieces. The rank
derives the rest from the sizes of its pieces, by the same arithmetic as the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.geometry import BoxTable, row_pointers
from shardproof.engine.planning.merge import DistinctBoxes, MergedStructures
from shardproof.engine.planning.structure import Packed, Structure, pack, unpack
from shardproof.engine.planning.writers import SharedBoxes

_Ints = NDArray[np.int64]
_Wire = tuple[int, int, list[tuple[int, Packed]]]
_NONE = np.zeros(0, np.int64)

SAMPLE_BYTES = 64 << 20
"""Maximum bytes of replicas that a rank compares in one save of a sampled check: a few milliseconds."""

_SLICES = 4
"""Slices in `sample_bytes`. A turn is one slice shorter."""
_MIN_SAMPLE_BYTES = _SLICES * max(dtype.itemsize for dtype in DTYPES.values())


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Shared boxes cut into n slices, sorted by box, then in row-major order of the box."""

    box: _Ints
    """(n,) row of the slice's box."""
    start: _Ints
    """(n,) first element of the slice in the row-major order of that box."""
    byte_count: _Ints
    """(n,) size of the slice in bytes."""
    turn: _Ints
    """(n,) turn in which the ranks compare the slice."""
    boxes: BoxTable
    """(n,) box of the slice."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPieces:
    """The pieces of one rank that other ranks also hold, set by set along the line."""

    sample_bytes: int = SAMPLE_BYTES
    turns: int = 1
    sets: tuple[tuple[int, _Ints], ...] = ()
    """The first byte of each set on the line, and the rows of its pieces."""

    def wire(self) -> _Wire:
        """The encoded form."""
        return self.sample_bytes, self.turns, [(start, pack(pieces)) for start, pieces in self.sets]

    @staticmethod
    def of_wire(wire: _Wire) -> SharedPieces:
        """Decodes the result of `wire`."""
        sample_bytes, turns, sets = wire
        return SharedPieces(sample_bytes, turns, tuple([(start, unpack(packed)) for start, packed in sets]))

    def slices(self, structure: Structure) -> Slices:
        """The slices of these pieces. `Slices.box` refers to rows of the rank's pieces."""
        table = structure.tensors()
        ndims = np.array([len(shape) for shape in table.shapes], np.int64)
        itemsizes = np.array([DTYPES[name].itemsize for name in table.dtypes], np.int64)
        pieces = np.concatenate([_NONE, *(rows for _, rows in self.sets)])
        tensor = structure.box_tensor
        boxes = BoxTable.of(ndims[tensor], structure.box_offsets, structure.box_sizes).take(pieces)
        counts = np.array([len(rows) for _, rows in self.sets], np.int64)
        starts = np.array([start for start, _ in self.sets], np.int64)
        slices = _cut(boxes, itemsizes[tensor[pieces]], counts, starts, self.sample_bytes, self.turns)
        return replace(slices, box=pieces[slices.box])


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """The boxes that several ranks hold, on the coordinator: m boxes in s sets, set by set."""

    sample_bytes: int
    turns: int
    boxes: BoxTable
    tensor: _Ints
    """(m,) row of the box's tensor in the merged table."""
    itemsize: _Ints
    """(m,) element size in bytes."""
    counts: _Ints
    """(s,) number of boxes in each set."""
    starts: _Ints
    """(s,) first byte of each set on the line; ascending among sets that share a rank."""
    ranks: tuple[_Ints, ...]
    """The holders of each set, ascending."""
    pieces: tuple[_Ints, ...]
    """For each set (boxes, holders) rows of the holders' pieces; (boxes, 1) if the rows of all are equal."""

    def of_ranks(self, world_size: int) -> list[SharedPieces]:
        """The shared pieces of each rank, in rank order."""
        parts: list[list[tuple[int, _Ints]]] = [[] for _ in range(world_size)]
        for start, ranks, pieces in zip(self.starts.tolist(), self.ranks, self.pieces, strict=True):
            are_equal = pieces.shape[1] == 1
            for column, rank in enumerate(ranks.tolist()):
                parts[rank].append((start, pieces[:, 0 if are_equal else column]))
        return [SharedPieces(self.sample_bytes, self.turns, tuple(sets)) for sets in parts]

    def slices(self) -> Slices:
        """The slices of all these boxes."""
        return _cut(self.boxes, self.itemsize, self.counts, self.starts, self.sample_bytes, self.turns)


def find_replicas(
    merged: MergedStructures,
    proved: Sequence[DistinctBoxes],
    shared: SharedBoxes,
    rank: _Ints,
    piece: _Ints,
    world_size: int,
    sample_bytes: int,
) -> Replicas:
    """Finds all boxes that several ranks hold, except those of aliases, and places them on the line.

    Args:
        merged: tables of all tensors.
        proved: the distinct boxes by number of dimensions.
        shared: the distinct boxes that several ranks hold.
        rank: (n,) rank of each replica.
        piece: (n,) row of each replica's box in that rank's structure.
        world_size: number of ranks.
        sample_bytes: maximum bytes that a rank compares in one turn.

    Raises:
        ValueError: `sample_bytes` is below 64: four slices of one element of the largest dtype.
    """
    if sample_bytes < _MIN_SAMPLE_BYTES:
        raise ValueError(f"sample_bytes must be {_MIN_SAMPLE_BYTES} or more, found {sample_bytes!r}")
    tensors = np.concatenate([_NONE, *(distinct.tensor for distinct in proved)])
    is_stored = np.array([key not in merged.aliases for key in merged.keys], np.bool_)
    stored = np.flatnonzero(is_stored[tensors[shared.box]])
    # By set, sets with the most holders first.
    stored = stored[np.lexsort((shared.set[stored], -np.diff(shared.starts)[stored]))]
    counts = np.diff(np.flatnonzero(np.diff(shared.set[stored], prepend=-1)), append=len(stored))
    ends = np.cumsum(counts)
    tensor = tensors[shared.box[stored]]
    boxes, itemsize = _boxes(proved, shared.box[stored], merged.ndims[tensor]), merged.itemsizes[tensor]
    ranks, pieces = [], []
    for first, end in zip((ends - counts).tolist(), ends.tolist(), strict=True):
        begins = shared.starts[stored[first:end]]
        holders = int(shared.starts[stored[first] + 1] - begins[0])
        rows = shared.rows[begins[:, None] + np.arange(holders)]
        columns = piece[rows]
        ranks.append(rank[rows[0]])
        pieces.append(columns[:, :1].copy() if bool((columns == columns[:, :1]).all()) else columns)
    before = row_pointers(boxes.volumes() * itemsize)
    ends_on_line = np.zeros(world_size, np.int64)  # of each rank's last set
    starts = np.zeros(len(ranks), np.int64)
    for row, (of_set, count) in enumerate(
        zip(ranks, (before[ends] - before[ends - counts]).tolist(), strict=True)
    ):
        starts[row] = ends_on_line[of_set].max()
        ends_on_line[of_set] = starts[row] + count
    length = int(ends_on_line.max(initial=0))
    slice_bytes = sample_bytes // _SLICES
    turns = max(1, -(-(length - slice_bytes) // (sample_bytes - slice_bytes)))
    return Replicas(sample_bytes, turns, boxes, tensor, itemsize, counts, starts, tuple(ranks), tuple(pieces))


def _boxes(proved: Sequence[DistinctBoxes], rows: _Ints, ndim: _Ints) -> BoxTable:
    """The distinct boxes of some rows. Rows count through all numbers of dimensions."""
    groups, before = [], 0
    for distinct in proved:
        row = rows - before
        chosen = np.flatnonzero((row >= 0) & (row < len(distinct.tensor)))
        groups.append((chosen, distinct.boxes.take(row[chosen])))
        before += len(distinct.tensor)
    return BoxTable.of_groups(ndim, groups)


def _cut(
    boxes: BoxTable, itemsize: _Ints, counts: _Ints, starts: _Ints, sample_bytes: int, turns: int
) -> Slices:
    """Cuts boxes, sorted by set, into slices. The start of a slice on the line determines its turn."""
    slice_bytes = sample_bytes // _SLICES
    parts, box, start = boxes.cut(slice_bytes // itemsize)
    byte_count = parts.volumes() * itemsize[box]
    end = np.cumsum(byte_count)
    of_set = np.repeat(np.arange(len(counts)), counts)[box]
    first = np.searchsorted(of_set, np.arange(len(counts)))
    begin = end - byte_count + (starts - (end - byte_count)[first])[of_set]
    turn = np.minimum(begin // (sample_bytes - slice_bytes), turns - 1)
    return Slices(box, start, byte_count, turn, parts)
