"""The plan of a save: which rank writes which boxes, and where in its file. Made by the coordinator alone.

1. `merge`: one table of tensors, all declared boxes in columns.
2. `prove`: the distinct boxes of each tensor tile it. Equal boxes are replicas by that fact.
3. Cut boxes into chunks of at most `chunk_bytes`, each one run of its box, so that no large tensor has to be
   read whole to be verified, nor written by one rank alone.
4. `choose_writers`: one holder writes each chunk.
5. `find_replicas`: what several ranks hold, for comparing it.
6. Lay out each writer's file: by alignment, so that entries stay aligned for any reader, then small tensors
   before large ones, then by tensor and box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.geometry import Boxes, BoxTable, cut, row_pointers, stable_order
from shardproof.planning.merge import Merged, merge
from shardproof.planning.prove import Distinct, prove
from shardproof.planning.replicas import SAMPLE_BYTES, Replicas, SharedPieces, find_replicas
from shardproof.planning.structure import Packed, Structure, pack, unpack
from shardproof.planning.writers import choose_writers, find_shared

__all__ = ["CHUNK_BYTES", "LARGE_BYTES", "RankPlan", "WritePlan", "places_in_files", "plan_writes"]

_Ints = NDArray[np.int64]

CHUNK_BYTES = 16 << 20
"""Upper bound of a chunk: small for even shares of writers and readers, large for the number of rows in the
index. 16 MiB is 8,192 chunks for 128 GiB."""

LARGE_BYTES = 64 << 10
"""A chunk of so many bytes is large: it can be read on its own, straight into place. Below, a copy costs less
than a read, so small ones share one."""

_CELLS = 64
"""Small boxes that several ranks hold stay together by so many parts of a chunk's upper bound: 256 KiB, which
take about as long to read as a file takes to open."""


def plan_writes(
    structures: Sequence[Structure],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    nodes: Sequence[int] | None = None,
    sample_bytes: int = SAMPLE_BYTES,
) -> WritePlan:
    """Plans a save from the structures of all ranks, in rank order.

    Args:
        structures: one for each rank.
        chunk_bytes: upper bound of a chunk, bytes.
        nodes: the node of each rank, by any numbers, over which bytes are balanced first; None: each rank is
            one.
        sample_bytes: of replicas that a rank compares in one save, at most, where not all are.

    Raises:
        StructureError: ranks disagree on what a key is.
        TilingError: the boxes of a tensor do not cover it exactly once.

    >>> from shardproof.planning.structure import TensorTable
    >>> table = TensorTable(("w",), ("float32",), ((4, 2),), ("",))
    >>> upper = Structure.build(table, [], [0], [0, 0], [2, 2])
    >>> lower = Structure.build(table, [], [0], [2, 0], [2, 2])
    >>> [plan.byte_count.tolist() for plan in plan_writes([upper, lower]).rank_plans()]
    [[16], [16]]
    """
    world_size = len(structures)
    if nodes is not None and len(nodes) != world_size:
        raise ValueError(f"{len(nodes)} nodes are named for {world_size} ranks")
    merged, declared = merge(structures)
    proved = prove(merged, declared)
    del declared
    parts = [_cut(merged, distinct, chunk_bytes) for distinct in proved]
    places = np.arange(world_size) if nodes is None else np.asarray(nodes, np.int64)
    group, rank, piece = _holdings(proved)
    shared = find_shared(group, rank, world_size)
    chosen = choose_writers(
        group, rank, shared, *_chunks_of(proved, parts), places, cell_bytes=max(chunk_bytes // _CELLS, 1)
    )
    writers, pieces = rank[chosen], piece[chosen]
    replicas = find_replicas(merged, proved, shared, rank, piece, world_size, sample_bytes)
    del proved, group, rank, piece, shared, chosen
    return _lay_out(merged, parts, writers, pieces, world_size, replicas)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Chunks of one number of dimensions, by box, in row-major order within their box."""

    boxes: Boxes
    tensor: _Ints
    parent: _Ints
    """(c,) the distinct box that each is cut from."""
    start: _Ints
    """(c,) first element in the row-major order of that box."""
    byte_count: _Ints


def _cut(merged: Merged, distinct: Distinct, chunk_bytes: int) -> _Chunks:
    """Cuts the distinct boxes; those of aliases are not stored."""
    boxes, tensor = distinct.boxes, distinct.tensor
    kept = np.arange(len(tensor))
    if merged.aliases:
        stored = np.array([key not in merged.aliases for key in merged.keys], np.bool_)
        kept = np.flatnonzero(stored[tensor])
        boxes, tensor = boxes.take(kept), tensor[kept]
    chunks, parent = cut(boxes, np.maximum(chunk_bytes // merged.itemsizes[tensor], 1))
    volume = chunks.volumes()
    if chunks is boxes:
        return _Chunks(chunks, tensor, kept, np.zeros_like(kept), volume * merged.itemsizes[tensor])
    before = np.cumsum(volume) - volume
    begins = np.flatnonzero(np.diff(parent, prepend=-1))
    start = before - np.repeat(before[begins], np.diff(begins, append=len(parent)))
    tensor = tensor[parent]
    return _Chunks(chunks, tensor, kept[parent], start, volume * merged.itemsizes[tensor])


def _holdings(proved: Sequence[Distinct]) -> tuple[_Ints, _Ints, _Ints]:
    """Of every holding the distinct box, the rank, and the row of the box among the rank's pieces.

    Distinct boxes are counted through all numbers of dimensions.
    """
    before = np.cumsum([0, *(len(distinct.tensor) for distinct in proved)])
    return (
        _joined([distinct.group + count for distinct, count in zip(proved, before, strict=False)]),
        _joined([distinct.rank for distinct in proved]),
        _joined([distinct.piece for distinct in proved]),
    )


def _chunks_of(proved: Sequence[Distinct], parts: Sequence[_Chunks]) -> tuple[_Ints, _Ints]:
    """Of every chunk the distinct box, counted as in `_holdings`, and the bytes."""
    before = np.cumsum([0, *(len(distinct.tensor) for distinct in proved)])
    return (
        _joined([part.parent + count for part, count in zip(parts, before, strict=False)]),
        _joined([part.byte_count for part in parts]),
    )


def _lay_out(
    merged: Merged,
    parts: Sequence[_Chunks],
    writer: _Ints,
    piece: _Ints,
    world_size: int,
    replicas: Replicas,
) -> WritePlan:
    """Orders the chunks of all dimensions as each writer's file has them, and gives each its bytes."""
    tensor = _joined([part.tensor for part in parts])
    byte_count = _joined([part.byte_count for part in parts])
    place = places_in_files(merged.dtypes, tensor, byte_count)
    order = stable_order(writer * max(len(place), 1) + place[tensor])
    tensor, byte_count = tensor[order], byte_count[order]
    counts = np.bincount(writer, minlength=world_size)
    writer_start = row_pointers(counts)
    before = row_pointers(byte_count)
    number = np.empty(len(order), np.int64)  # of each chunk in the order of the files
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
        _joined([part.start for part in parts])[order],
        before[:-1] - np.repeat(before[writer_start[:-1]], counts),
        byte_count,
        boxes.start,
        boxes.offsets,
        boxes.sizes,
        tuple(sorted({*np.flatnonzero(counts).tolist(), *merged.objects.values()})),
        replicas,
    )


def places_in_files(dtypes: Sequence[str], tensor: _Ints, byte_count: _Ints) -> _Ints:
    """The order of tensors in every file: by alignment, then small before large, then as they are given.

    Args:
        dtypes: of n tensors.
        tensor: (c,) the tensor of each chunk.
        byte_count: (c,) bytes of each chunk.

    Returns:
        (n,) place of each tensor. A tensor is large if it has a chunk of `LARGE_BYTES`.

    >>> dtypes = ["uint8", "float32", "float32"]
    >>> places_in_files(dtypes, np.array([0, 1, 2]), np.array([9, 1 << 20, 4])).tolist()
    [2, 1, 0]
    """
    alignment = np.array([DTYPES[name].alignment for name in dtypes], np.int64)
    is_large = np.zeros(len(alignment), np.bool_)
    is_large[tensor[byte_count >= LARGE_BYTES]] = True
    rows = np.arange(len(alignment))
    places = np.empty_like(rows)
    places[np.lexsort((rows, is_large, -alignment))] = rows
    return places


def _joined(columns: Sequence[_Ints]) -> _Ints:
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
    """What one rank writes: one row a chunk, in the order of its file."""

    piece: NDArray[np.int64]
    """(n,) row of the rank's own pieces."""
    piece_start: NDArray[np.int64]
    """(n,) first element of the chunk in the row-major order of its piece."""
    byte_start: NDArray[np.int64]
    """(n,) first byte, counted from the first byte of data in the file, where chunks stand without a gap."""
    byte_count: NDArray[np.int64]
    box_offsets: NDArray[np.int64]
    """Flat global offsets, as many for each chunk as its tensor has dimensions."""
    box_sizes: NDArray[np.int64]
    objects: tuple[str, ...]
    """Keys of the objects that this rank stores."""
    files: int
    """Number of shard files of the whole checkpoint."""
    aliases: dict[str, str]
    """Keys stored under another key."""
    empty: dict[str, tuple[str, tuple[int, ...]]]
    """Tensors without an element, for which no chunk speaks, to dtype and shape; one writer declares them."""
    shared: SharedPieces
    """The pieces that other ranks hold too."""

    def encode(self) -> bytes:
        """This plan as bytes for the rendezvous."""
        columns = (self.piece, self.piece_start, self.byte_count, self.box_offsets, self.box_sizes)
        wire = [pack(column) for column in columns]
        rest = self.objects, self.files, self.aliases, self.empty, self.shared.wire()
        return msgspec.msgpack.encode((wire, *rest))

    @staticmethod
    def decode(data: bytes) -> RankPlan:
        """The plan that `encode` wrote."""
        wire, objects, files, aliases, empty, shared = msgspec.msgpack.decode(data, type=_Wire)
        piece, piece_start, byte_count, offsets, sizes = map(unpack, wire)
        byte_start = np.cumsum(byte_count) - byte_count  # chunks follow each other without a gap
        chunks = piece, piece_start, byte_start, byte_count, offsets, sizes
        return RankPlan(*chunks, objects, files, aliases, empty, SharedPieces.of_wire(shared))


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """What all ranks write: one row a chunk, by writer, then in the order of the writer's file."""

    merged: Merged
    tensor: NDArray[np.int64]
    """(n,) row of `merged.keys`."""
    writer_start: NDArray[np.int64]
    """(world size + 1,) row pointers: rank r has rows writer_start[r] to writer_start[r + 1]."""
    piece: NDArray[np.int64]
    piece_start: NDArray[np.int64]
    byte_start: NDArray[np.int64]
    byte_count: NDArray[np.int64]
    box_start: NDArray[np.int64]
    """(n + 1,) row pointers into the box columns."""
    box_offsets: NDArray[np.int64]
    box_sizes: NDArray[np.int64]
    writers: tuple[int, ...]
    """The ranks that write a file, ascending: those with a chunk or an object."""
    replicas: Replicas
    """The boxes that several ranks hold, whoever of them writes."""

    @property
    def is_stored(self) -> list[bool]:
        """Of each merged tensor, whether it has a row of its own in the manifest (all but aliases)."""
        return [key not in self.merged.aliases for key in self.merged.keys]

    def rank_plans(self) -> list[RankPlan]:
        """The part of each rank."""
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
        box_starts = self.box_start[self.writer_start].tolist()
        shared = self.replicas.of_ranks(len(self.writer_start) - 1)
        plans = []
        for rank, first in enumerate(self.writer_start[:-1].tolist()):
            rows = slice(first, int(self.writer_start[rank + 1]))
            boxes = slice(box_starts[rank], box_starts[rank + 1])
            plans.append(
                RankPlan(
                    self.piece[rows],
                    self.piece_start[rows],
                    self.byte_start[rows],
                    self.byte_count[rows],
                    self.box_offsets[boxes],
                    self.box_sizes[boxes],
                    tuple(owned.get(rank, ())),
                    len(self.writers),
                    self.merged.aliases,
                    empty if self.writers[:1] == (rank,) else {},
                    shared[rank],
                )
            )
        return plans
