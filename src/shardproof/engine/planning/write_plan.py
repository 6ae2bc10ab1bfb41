"""The plan of a save, made by the coordinator: which rank writes which chunks, and where in its file.

1. `merge` builds one table of all tensors, and columns of the boxes of all ranks.
2. `prove` proves that the distinct boxes of each tensor tile it. Equal boxes are replicas.
3. `_cut` cuts boxes into chunks of at most `chunk_bytes`. A chunk is contiguous in its box. So a reader can
   verify a part of a large tensor, and several ranks can share the writing of one.
4. `choose_writers` chooses one holder as the writer of each chunk.
5. `find_replicas` lists the boxes with replicas, for the replica check.
6. `_lay_out` orders each writer's file: by alignment, so that entries are aligned for any reader; then small
   tensors before large ones; then by tensor and box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.geometry import Boxes, BoxTable, cut, row_pointers, stable_order
from shardproof.engine.planning.merge import DistinctBoxes, MergedStructures, merge, prove
from shardproof.engine.planning.replicas import SAMPLE_BYTES, Replicas, SharedPieces, find_replicas
from shardproof.engine.planning.structure import Packed, Structure, pack, unpack
from shardproof.engine.planning.writers import choose_writers, find_shared

_Ints = NDArray[np.int64]

CHUNK_BYTES = 16 << 20
"""Maximum size of a chunk in bytes. Small chunks divide bytes evenly among writers and readers; large chunks
make the index short. 16 MiB gives 8,192 chunks for 128 GiB."""

LARGE_BYTES = 64 << 10
"""Minimum size of a large chunk in bytes. A load reads a large chunk on its own, straight into its
destination. It reads small chunks together with their neighbours, because a copy costs less than a read."""

_CELLS = 64
"""Cells in `chunk_bytes` (see the note in `writers`). Reading a cell of 256 KiB takes as long as opening a
file."""


def plan_writes(
    structures: Sequence[Structure],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    nodes: Sequence[int] | None = None,
    sample_bytes: int = SAMPLE_BYTES,
) -> WritePlan:
    """Plans a save from the structures of all ranks, in rank order. The plan depends only on the arguments.

    Args:
        structures: the structure of each rank.
        chunk_bytes: maximum size of a chunk in bytes.
        nodes: node number of each rank. The plan balances bytes over nodes, then over the ranks of each node.
            None: each rank is a node.
        sample_bytes: maximum bytes of replicas that a rank compares in one save of a sampled replica check.

    Raises:
        StructureError: ranks declare different dtypes, shapes or kinds for a key.
        TilingError: the boxes of a tensor do not cover it exactly once.
        ValueError: `nodes` does not have one entry for each rank, or `sample_bytes` is below 64.

    >>> from shardproof.engine.planning.structure import TensorTable
    >>> table = TensorTable(("w",), ("float32",), ((4, 2),), ("",))
    >>> upper = Structure.build(table, [], [0], [0, 0], [2, 2])
    >>> lower = Structure.build(table, [], [0], [2, 0], [2, 2])
    >>> [plan.byte_count.tolist() for plan in plan_writes([upper, lower]).rank_plans()]
    [[16], [16]]
    """
    world_size = len(structures)
    if nodes is not None and len(nodes) != world_size:
        raise ValueError(f"nodes has {len(nodes)} entries, expected one for each of {world_size} ranks")
    merged, declared = merge(structures)
    proved = prove(merged, declared)
    del declared
    parts = [_cut(merged, distinct, chunk_bytes) for distinct in proved]
    node_of = np.arange(world_size) if nodes is None else np.asarray(nodes, np.int64)
    group = _numbered(proved, [distinct.group for distinct in proved])
    rank = _concatenated([distinct.rank for distinct in proved])
    piece = _concatenated([distinct.piece for distinct in proved])
    shared = find_shared(group, rank, world_size)
    chosen = choose_writers(
        group,
        rank,
        shared,
        _numbered(proved, [part.parent for part in parts]),
        _concatenated([part.byte_count for part in parts]),
        node_of,
        cell_bytes=max(chunk_bytes // _CELLS, 1),
    )
    writers, pieces = rank[chosen], piece[chosen]
    replicas = find_replicas(merged, proved, shared, rank, piece, world_size, sample_bytes)
    del proved, group, rank, piece, shared, chosen
    return _lay_out(merged, parts, writers, pieces, world_size, replicas)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Chunks of one number of dimensions, sorted by box, then in row-major order of the box."""

    boxes: Boxes
    tensor: _Ints
    parent: _Ints
    """(c,) row of the chunk's distinct box."""
    start: _Ints
    """(c,) first element of the chunk in the row-major order of that box."""
    byte_count: _Ints


def _cut(merged: MergedStructures, distinct: DistinctBoxes, chunk_bytes: int) -> _Chunks:
    """Cuts the distinct boxes into chunks, except those of aliases, which are not stored."""
    boxes, tensor = distinct.boxes, distinct.tensor
    rows = np.arange(len(tensor))
    if merged.aliases:
        is_stored = np.array([key not in merged.aliases for key in merged.keys], np.bool_)
        rows = np.flatnonzero(is_stored[tensor])
        boxes, tensor = boxes.take(rows), tensor[rows]
    chunks, parent = cut(boxes, np.maximum(chunk_bytes // merged.itemsizes[tensor], 1))
    volume = chunks.volumes()
    if chunks is boxes:
        return _Chunks(chunks, tensor, rows, np.zeros_like(rows), volume * merged.itemsizes[tensor])
    before = np.cumsum(volume) - volume
    begins = np.flatnonzero(np.diff(parent, prepend=-1))
    start = before - np.repeat(before[begins], np.diff(begins, append=len(parent)))
    tensor = tensor[parent]
    return _Chunks(chunks, tensor, rows[parent], start, volume * merged.itemsizes[tensor])


def _numbered(proved: Sequence[DistinctBoxes], rows: Sequence[_Ints]) -> _Ints:
    """Rows of distinct boxes, given by number of dimensions, as rows that count through all of them."""
    before = np.cumsum([0, *(len(distinct.tensor) for distinct in proved)])
    return _concatenated([row + count for row, count in zip(rows, before, strict=False)])


def _lay_out(
    merged: MergedStructures,
    parts: Sequence[_Chunks],
    writer: _Ints,
    piece: _Ints,
    world_size: int,
    replicas: Replicas,
) -> WritePlan:
    """Sorts the chunks of all dimensions by writer and file order, and gives each a position in its file."""
    tensor = _concatenated([part.tensor for part in parts])
    byte_count = _concatenated([part.byte_count for part in parts])
    position = tensor_order(merged.dtypes, tensor, byte_count)
    order = stable_order(writer * max(len(position), 1) + position[tensor])
    tensor, byte_count = tensor[order], byte_count[order]
    counts = np.bincount(writer, minlength=world_size)
    writer_start = row_pointers(counts)
    before = row_pointers(byte_count)
    number = np.empty(len(order), np.int64)  # row of each chunk in the order of the files
    number[order] = np.arange(len(order))
    ends = np.cumsum([len(part.tensor) for part in parts])
    rows = np.split(number, ends[:-1])
    boxes = BoxTable.of_groups(
        merged.ndims[tensor], [(at, part.boxes) for at, part in zip(rows, parts, strict=False)]
    )
    return WritePlan(
        merged,
        tensor,
        writer_start,
        piece[order],
        _concatenated([part.start for part in parts])[order],
        before[:-1] - np.repeat(before[writer_start[:-1]], counts),
        byte_count,
        boxes,
        tuple(sorted({*np.flatnonzero(counts).tolist(), *merged.objects.values()})),
        replicas,
    )


def tensor_order(dtypes: Sequence[str], tensor: _Ints, byte_count: _Ints) -> _Ints:
    """The order of tensors in every file: by alignment, then small before large, then by row.

    Returns the (n,) position of each tensor. A tensor is large if it has a chunk of at least `LARGE_BYTES`.

    Args:
        dtypes: names of the dtypes of n tensors.
        tensor: (c,) row of each chunk's tensor.
        byte_count: (c,) size of each chunk in bytes.

    >>> dtypes = ["uint8", "float32", "float32"]
    >>> tensor_order(dtypes, np.array([0, 1, 2]), np.array([9, 1 << 20, 4])).tolist()
    [2, 1, 0]
    """
    alignment = np.array([DTYPES[name].alignment for name in dtypes], np.int64)
    is_large = np.zeros(len(alignment), np.bool_)
    is_large[tensor[byte_count >= LARGE_BYTES]] = True
    rows = np.arange(len(alignment))
    positions = np.empty_like(rows)
    positions[np.lexsort((rows, is_large, -alignment))] = rows
    return positions


def _concatenated(columns: Sequence[_Ints]) -> _Ints:
    if len(columns) == 1:
        return columns[0]
    return np.concatenate([np.zeros(0, np.int64), *columns])


_Wire = tuple[
    list[Packed],
    tuple[str, ...],
    int,
    dict[str, str],
    dict[str, tuple[str, tuple[int, ...]]],
    tuple[int, int, list[tuple[int, Packed]]],
]


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """The chunks that one rank writes: a row for each, in the order of the rank's file."""

    piece: NDArray[np.int64]
    """(n,) row of the chunk's piece among the rank's pieces."""
    piece_start: NDArray[np.int64]
    """(n,) first element of the chunk in the row-major order of its piece."""
    byte_start: NDArray[np.int64]
    """(n,) first byte, counted from the first data byte of the file. There is no gap between chunks."""
    byte_count: NDArray[np.int64]
    """(n,) size of each chunk in bytes."""
    box_offsets: NDArray[np.int64]
    """(m,) global offsets of the chunks, as in `BoxTable`."""
    box_sizes: NDArray[np.int64]
    """(m,) sizes of the chunks."""
    objects: tuple[str, ...]
    """Keys of the objects that this rank stores."""
    files: int
    """Number of shard files of the whole checkpoint."""
    aliases: dict[str, str]
    """Alias to the key that is stored."""
    empty: dict[str, tuple[str, tuple[int, ...]]]
    """Tensors without elements, so without chunks: key to dtype and shape. The first writer declares them."""
    shared: SharedPieces
    """The pieces that other ranks also hold."""

    def encode(self) -> bytes:
        """The plan as bytes, for the rendezvous."""
        columns = (self.piece, self.piece_start, self.byte_count, self.box_offsets, self.box_sizes)
        wire = [pack(column) for column in columns]
        rest = self.objects, self.files, self.aliases, self.empty, self.shared.wire()
        return msgspec.msgpack.encode((wire, *rest))

    @staticmethod
    def decode(data: bytes) -> RankPlan:
        """The plan that `encode` wrote."""
        wire, objects, files, aliases, empty, shared = msgspec.msgpack.decode(data, type=_Wire)
        piece, piece_start, byte_count, offsets, sizes = map(unpack, wire)
        byte_start = np.cumsum(byte_count) - byte_count  # there is no gap between chunks
        chunks = piece, piece_start, byte_start, byte_count, offsets, sizes
        return RankPlan(*chunks, objects, files, aliases, empty, SharedPieces.of_wire(shared))


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """The chunks that all ranks write: a row for each, by writer, then in the order of the writer's file."""

    merged: MergedStructures
    tensor: NDArray[np.int64]
    """(n,) row of the chunk's tensor in `merged.keys`."""
    writer_start: NDArray[np.int64]
    """(world size + 1,) row pointers: rank r writes the rows writer_start[r] to writer_start[r + 1]."""
    piece: NDArray[np.int64]
    """(n,) as in `RankPlan`, like the next three columns."""
    piece_start: NDArray[np.int64]
    byte_start: NDArray[np.int64]
    byte_count: NDArray[np.int64]
    boxes: BoxTable
    """(n,) box of each chunk."""
    writers: tuple[int, ...]
    """The ranks with a chunk or an object to write, ascending."""
    replicas: Replicas
    """The boxes that several ranks hold."""

    @property
    def is_stored(self) -> list[bool]:
        """True for each merged tensor with a row in the manifest, False for an alias."""
        return [key not in self.merged.aliases for key in self.merged.keys]

    def bytes_by_rank(self) -> NDArray[np.int64]:
        """(world size,) bytes of the chunks that each rank writes."""
        return np.diff(row_pointers(self.byte_count)[self.writer_start])

    def rank_plans(self) -> list[RankPlan]:
        """The plan of each rank, in rank order."""
        owned: dict[int, list[str]] = {}
        for key, owner in self.merged.objects.items():
            owned.setdefault(owner, []).append(key)
        empty = {
            key: (dtype, shape)
            for key, dtype, shape in zip(
                self.merged.keys, self.merged.dtypes, self.merged.shapes, strict=True
            )
            if 0 in shape and key not in self.merged.aliases
        }
        shared = self.replicas.of_ranks(len(self.writer_start) - 1)
        plans = []
        for rank, (first, stop) in enumerate(pairwise(self.writer_start.tolist())):
            rows, boxes = slice(first, stop), self.boxes.between(first, stop)
            plans.append(
                RankPlan(
                    self.piece[rows],
                    self.piece_start[rows],
                    self.byte_start[rows],
                    self.byte_count[rows],
                    boxes.offsets,
                    boxes.sizes,
                    tuple(owned.get(rank, ())),
                    len(self.writers),
                    self.merged.aliases,
                    empty if self.writers[:1] == (rank,) else {},
                    shared[rank],
                )
            )
        return plans
