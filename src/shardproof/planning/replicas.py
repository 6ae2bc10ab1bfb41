"""Which boxes several ranks hold, and in which save the ranks compare these replicas.

Note: How the sample moves
--------------------------
Boxes that the same ranks hold make a *set*. All sets stand on one line of bytes, and sets that share a rank
do not overlap there: a set begins after the last byte of any of its ranks. Sets with the most holders come
first, so that where sets are nested, as those of a device mesh are, no rank has a gap.

Boxes are cut into *slices* of at most a quarter of `sample_bytes`, and the line into *turns* of three
quarters. A slice belongs to the turn in which it begins. It follows that

- all holders of a slice derive its turn from the plan alone, and compare it in the same save;
- no rank compares more than `sample_bytes` in a turn: its slices do not overlap, and only the last exceeds
  the turn;
- after as many saves as there are turns, every replica has been compared.

The coordinator sends each rank where its sets begin on the line, and which of its pieces they have. The rank
knows the sizes of its pieces and derives the rest by the same arithmetic as the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.geometry import BoxTable, row_pointers
from shardproof.planning.merge import MergedStructures
from shardproof.planning.prove import DistinctBoxes
from shardproof.planning.structure import Packed, Structure, pack, unpack
from shardproof.planning.writers import SharedBoxes

__all__ = ["SAMPLE_BYTES", "Replicas", "SharedPieces", "Slices", "find_replicas"]

_Ints = NDArray[np.int64]
_Wire = tuple[int, int, list[tuple[int, Packed]]]
_NONE = np.zeros(0, np.int64)

SAMPLE_BYTES = 64 << 20
"""Bytes of replicas that a rank compares in one save of a sampled check, at most: some milliseconds."""

_SLICES = 4
"""Slices in `sample_bytes`. A turn has the length of all but one."""
_LEAST = _SLICES * max(dtype.itemsize for dtype in DTYPES.values())


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Shared boxes cut into n slices, sorted by box, then in row-major order of the box."""

    box: _Ints
    """(n,) row of the box that the slice is cut from."""
    start: _Ints
    """(n,) first element of the slice in the row-major order of that box."""
    byte_count: _Ints
    """(n,) bytes of the slice."""
    turn: _Ints
    """(n,) turn in which the slice is compared."""
    boxes: BoxTable
    """The n slices, each a box."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPieces:
    """The pieces of one rank that other ranks hold, too, set by set along the line."""

    sample_bytes: int = SAMPLE_BYTES
    turns: int = 1
    sets: tuple[tuple[int, _Ints], ...] = ()
    """For each set its first byte on the line, and the rows of its pieces."""

    def wire(self) -> _Wire:
        """The encoded form."""
        return self.sample_bytes, self.turns, [(place, pack(pieces)) for place, pieces in self.sets]

    @staticmethod
    def of_wire(wire: _Wire) -> SharedPieces:
        """Decodes what `wire` returned."""
        sample_bytes, turns, sets = wire
        return SharedPieces(sample_bytes, turns, tuple([(place, unpack(packed)) for place, packed in sets]))

    def slices(self, structure: Structure) -> Slices:
        """The slices of these pieces. `Slices.box` has rows of the rank's pieces.

        Args:
            structure: structure of the rank.
        """
        table = structure.tensors()
        ndims = np.array([len(shape) for shape in table.shapes], np.int64)
        itemsizes = np.array([DTYPES[name].itemsize for name in table.dtypes], np.int64)
        pieces = np.concatenate([_NONE, *(rows for _, rows in self.sets)])
        tensor = structure.box_tensor
        held = BoxTable.of(ndims[tensor], structure.box_offsets, structure.box_sizes).take(pieces)
        counts = np.array([len(rows) for _, rows in self.sets], np.int64)
        places = np.array([place for place, _ in self.sets], np.int64)
        slices = _cut(held, itemsizes[tensor[pieces]], counts, places, self.sample_bytes, self.turns)
        return replace(slices, box=pieces[slices.box])


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """The boxes that several ranks hold, as the coordinator has them: m boxes in s sets, set by set."""

    sample_bytes: int
    turns: int
    boxes: BoxTable
    tensor: _Ints
    """(m,) row of the box's tensor in the merged table."""
    itemsize: _Ints
    """(m,) bytes of an element."""
    counts: _Ints
    """(s,) boxes of each set."""
    places: _Ints
    """(s,) first byte of each set on the line; ascending among sets that share a rank."""
    ranks: tuple[_Ints, ...]
    """For each set its holders, ascending."""
    pieces: tuple[_Ints, ...]
    """For each set (boxes, holders) rows of the holders' own pieces; (boxes, 1) if all holders have the same
    rows."""

    def of_ranks(self, world_size: int) -> list[SharedPieces]:
        """The part of each rank, in rank order."""
        parts: list[list[tuple[int, _Ints]]] = [[] for _ in range(world_size)]
        for place, ranks, pieces in zip(self.places.tolist(), self.ranks, self.pieces, strict=True):
            alike = pieces.shape[1] == 1
            for column, rank in enumerate(ranks.tolist()):
                parts[rank].append((place, pieces[:, 0 if alike else column]))
        return [SharedPieces(self.sample_bytes, self.turns, tuple(sets)) for sets in parts]

    def slices(self) -> Slices:
        """The slices of all these boxes."""
        return _cut(self.boxes, self.itemsize, self.counts, self.places, self.sample_bytes, self.turns)


def find_replicas(
    merged: MergedStructures,
    proved: Sequence[DistinctBoxes],
    shared: SharedBoxes,
    rank: _Ints,
    piece: _Ints,
    world_size: int,
    sample_bytes: int,
) -> Replicas:
    """Puts all boxes that several ranks hold on the line, but for those of aliases.

    Args:
        merged: tables of all tensors.
        proved: the distinct boxes by number of dimensions.
        shared: those that several ranks hold.
        rank: (n,) rank of each holding.
        piece: (n,) row of each holding's box in that rank's structure.
        world_size: number of ranks.
        sample_bytes: bytes that a rank compares in one turn, at most.

    Raises:
        ValueError: `sample_bytes` is below 64: four slices of one element of the largest dtype.
    """
    if sample_bytes < _LEAST:
        raise ValueError(f"sample_bytes must be {_LEAST} or more, found {sample_bytes!r}")
    tensors = np.concatenate([_NONE, *(distinct.tensor for distinct in proved)])
    stored = np.array([key not in merged.aliases for key in merged.keys], np.bool_)
    kept = np.flatnonzero(stored[tensors[shared.box]])
    kept, counts = _by_set(shared, kept)
    ends = np.cumsum(counts)
    tensor = tensors[shared.box[kept]]
    boxes, itemsize = _boxes(proved, shared.box[kept], merged.ndims[tensor]), merged.itemsizes[tensor]
    ranks, pieces = [], []
    for first, end in zip((ends - counts).tolist(), ends.tolist(), strict=True):
        starts = shared.starts[kept[first:end]]
        holders = int(shared.starts[kept[first] + 1] - starts[0])
        rows = shared.rows[starts[:, None] + np.arange(holders)]
        held = piece[rows]
        ranks.append(rank[rows[0]])
        pieces.append(held[:, :1].copy() if bool((held == held[:, :1]).all()) else held)
    before = row_pointers(boxes.volumes() * itemsize)
    places, length = _line(ranks, (before[ends] - before[ends - counts]).tolist(), world_size)
    slice_bytes = sample_bytes // _SLICES
    turns = max(1, -(-(length - slice_bytes) // (sample_bytes - slice_bytes)))
    return Replicas(sample_bytes, turns, boxes, tensor, itemsize, counts, places, tuple(ranks), tuple(pieces))


def _by_set(shared: SharedBoxes, kept: _Ints) -> tuple[_Ints, _Ints]:
    """Rows of `shared` set by set, sets with the most holders first, and the number of boxes of each set."""
    holders = np.diff(shared.starts)[kept]
    numbers = shared.set[kept]
    kept = kept[np.lexsort((numbers, -holders))]
    begins = np.flatnonzero(np.diff(shared.set[kept], prepend=-1))
    return kept, np.diff(begins, append=len(kept))


def _boxes(proved: Sequence[DistinctBoxes], rows: _Ints, ndim: _Ints) -> BoxTable:
    """The distinct boxes of some rows, which are numbered through all numbers of dimensions."""
    groups, before = [], 0
    for distinct in proved:
        row = rows - before
        chosen = np.flatnonzero((row >= 0) & (row < len(distinct.tensor)))
        groups.append((chosen, distinct.boxes.take(row[chosen])))
        before += len(distinct.tensor)
    return BoxTable.of_groups(ndim, groups)


def _line(ranks: Sequence[_Ints], byte_count: Sequence[int], world_size: int) -> tuple[_Ints, int]:
    """The first byte of each set on the line, and the length of the line."""
    ends = np.zeros(world_size, np.int64)  # one past the last byte of each rank on the line
    places = np.zeros(len(ranks), np.int64)
    for row, (holders, count) in enumerate(zip(ranks, byte_count, strict=True)):
        places[row] = ends[holders].max()
        ends[holders] = places[row] + count
    return places, int(ends.max(initial=0))


def _cut(
    boxes: BoxTable, itemsize: _Ints, counts: _Ints, places: _Ints, sample_bytes: int, turns: int
) -> Slices:
    """Cuts boxes, which stand set by set, into slices. Where a slice begins on the line gives its turn."""
    slice_bytes = sample_bytes // _SLICES
    parts, box, start = boxes.cut(slice_bytes // itemsize)
    byte_count = parts.volumes() * itemsize[box]
    end = np.cumsum(byte_count)
    of_set = np.repeat(np.arange(len(counts)), counts)[box]
    first = np.searchsorted(of_set, np.arange(len(counts)))
    place = end - byte_count + (places - (end - byte_count)[first])[of_set]
    turn = np.minimum(place // (sample_bytes - slice_bytes), turns - 1)
    return Slices(box, start, byte_count, turn, parts)
