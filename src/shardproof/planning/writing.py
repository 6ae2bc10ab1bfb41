"""The plan of a save: which rank writes which boxes, and where in its file. Made by the leader alone.

1. `merge`: one table of tensors, all declared boxes in columns.
2. Prove that the distinct boxes of each tensor tile it. Equal boxes are replicas by that fact.
3. `balance_writers`: one holder writes.
4. Cut boxes into chunks of at most `chunk_bytes`, each one run of its box, so that no large tensor has to be
   read whole to be verified.
5. Lay out each writer's file: by alignment, then tensor, then box. Entries stay aligned for any reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.errors import TilingError
from shardproof.geometry import Boxes, TilingFault, cut, deduplicate, tiling_faults
from shardproof.planning.balance import balance_writers
from shardproof.planning.merge import Declared, Merged, merge
from shardproof.planning.structure import Structure

__all__ = ["CHUNK_BYTES", "RankPlan", "WritePlan", "plan_writes"]

CHUNK_BYTES = 16 << 20
"""Upper bound of a chunk. Loading part of a tensor reads whole chunks to verify them, so small is good; large
is good for the number of rows in the index. 16 MiB is 8,192 chunks for 128 GiB."""


_Wire = tuple[list[bytes], tuple[str, ...], int, dict[str, str], dict[str, tuple[str, tuple[int, ...]]]]


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """What one rank writes: one row a chunk, in the order of its file."""

    piece: NDArray[np.int64]
    """(n,) row of the rank's own pieces."""
    piece_start: NDArray[np.int64]
    """(n,) first element of the chunk in the row-major order of its piece."""
    byte_start: NDArray[np.int64]
    """(n,) first byte, counted from the first byte of data in the file."""
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

    def encode(self) -> bytes:
        """This plan as bytes for the rendezvous."""
        columns = (self.piece, self.piece_start, self.byte_start, self.byte_count)
        wire = [column.tobytes() for column in (*columns, self.box_offsets, self.box_sizes)]
        return msgspec.msgpack.encode((wire, self.objects, self.files, self.aliases, self.empty))

    @staticmethod
    def decode(data: bytes) -> RankPlan:
        """The plan that `encode` wrote."""
        wire, objects, files, aliases, empty = msgspec.msgpack.decode(data, type=_Wire)
        piece, piece_start, byte_start, byte_count, offsets, sizes = (
            np.frombuffer(column, np.int64) for column in wire
        )
        return RankPlan(
            piece, piece_start, byte_start, byte_count, offsets, sizes, objects, files, aliases, empty
        )


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

    @property
    def stored_keys(self) -> list[str]:
        """Keys that have a row of their own in the manifest (all but aliases)."""
        return [key for key in self.merged.keys if key not in self.merged.aliases]

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
                )
            )
        return plans


def plan_writes(structures: Sequence[Structure], *, chunk_bytes: int = CHUNK_BYTES) -> WritePlan:
    """Plans a save from the structures of all ranks, in rank order.

    Args:
        structures: one for each rank.
        chunk_bytes: upper bound of a chunk, bytes.

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
    merged = merge(structures)
    world_size = len(structures)
    parts = [
        _chunks_of(merged, dimensions, declared, world_size, chunk_bytes)
        for dimensions, declared in _proved(merged)
    ]
    return _lay_out(merged, parts, world_size)


@dataclass(frozen=True, slots=True, eq=False)
class _Distinct:
    """The distinct boxes of one number of dimensions, and which holding belongs to which."""

    declared: Declared
    first: NDArray[np.int64]
    group: NDArray[np.int64]


def _proved(merged: Merged) -> list[tuple[int, _Distinct]]:
    """The distinct boxes, shown to tile every tensor."""
    proved = []
    for dimensions, declared in merged.declared.items():
        first, group = deduplicate(declared.tensor, declared.boxes)
        of_this = np.flatnonzero(merged.ndims == dimensions)
        shapes = np.array([merged.shapes[row] for row in of_this.tolist()], np.int64)
        shapes = shapes.reshape(len(of_this), dimensions)
        local = np.searchsorted(of_this, declared.tensor[first])
        faults = tiling_faults(shapes, local, declared.boxes.take(first))
        if faults:
            key = merged.keys[int(of_this[faults[0].tensor])]
            raise _tiling_error(key, merged, declared, group, faults[0], len(faults))
        proved.append((dimensions, _Distinct(declared, first, group)))
    return proved


def _tiling_error(
    key: str, merged: Merged, declared: Declared, group: NDArray[np.int64], fault: TilingFault, faults: int
) -> TilingError:
    """The first fault in words: the boxes at fault and the ranks that hold them."""
    row = merged.keys.index(key)
    holders: dict[str, list[int]] = {}
    for distinct in fault.boxes:
        held = np.flatnonzero(group == distinct)
        box = _interval(declared.boxes.offsets[held[0]].tolist(), declared.boxes.sizes[held[0]].tolist())
        holders[box] = sorted(set(declared.rank[held].tolist()))
    at = _interval(fault.offsets, fault.sizes)
    shape = list(merged.shapes[row])
    said = ", ".join(f"{box} on {_ranks(ranks)}" for box, ranks in holders.items())
    if fault.kind == "gap":
        had = sorted(set(declared.rank[declared.tensor == row].tolist()))
        said = f"no rank holds {at}; pieces of it are on {_ranks(had)}" if had else "no rank holds any of it"
        advice = "a rank that holds this part did not declare it, or offsets are wrong"
    elif fault.kind == "overlap":
        said = f"{at} is held by different boxes: {said}"
        advice = "replicas must be equal boxes; different boxes must not share an element"
    else:
        said = f"the box {said} reaches outside"
        advice = "offsets and sizes must lie within the global shape"
    more = f" ({faults - 1} more tensors have such faults)" if faults > 1 else ""
    return TilingError(
        f"tensor {key!r} of shape {shape}: {fault.kind}: {said}. Expected: boxes that cover it exactly once; "
        f"{advice}{more}",
        key=key,
        kind=fault.kind,
        box=[list(fault.offsets), list(fault.sizes)],
        holders=holders,
    )


def _interval(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    inner = ",".join(f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True))
    return f"[{inner}]"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Chunks of one number of dimensions, in row-major order within their box."""

    boxes: Boxes
    tensor: NDArray[np.int64]
    writer: NDArray[np.int64]
    piece: NDArray[np.int64]
    piece_start: NDArray[np.int64]
    volume: NDArray[np.int64]


def _chunks_of(
    merged: Merged, dimensions: int, distinct: _Distinct, world_size: int, chunk_bytes: int
) -> _Chunks:
    """Chooses writers and cuts; boxes of aliases are not stored."""
    declared = distinct.declared
    aliased = np.array([key in merged.aliases for key in merged.keys], bool)
    kept = ~aliased[declared.tensor[distinct.first]]
    volumes = declared.boxes.take(distinct.first).volumes()
    byte_count = np.where(kept, volumes * merged.itemsizes[declared.tensor[distinct.first]], 0)
    holding = balance_writers(distinct.group, declared.rank, byte_count, world_size)[kept]
    boxes, tensor = declared.boxes.take(holding), declared.tensor[holding]
    chunks, parent = cut(boxes, np.maximum(chunk_bytes // merged.itemsizes[tensor], 1))
    volume = chunks.volumes()
    before = np.cumsum(volume) - volume
    starts = np.flatnonzero(np.diff(parent, prepend=-1))
    piece_start = before - np.repeat(before[starts], np.diff(starts, append=len(parent)))
    return _Chunks(
        chunks,
        tensor[parent],
        declared.rank[holding][parent],
        declared.piece[holding][parent],
        piece_start,
        volume,
    )


def _lay_out(merged: Merged, parts: Sequence[_Chunks], world_size: int) -> WritePlan:
    """Orders the chunks of all dimensions by writer, alignment, tensor and box, and gives each its bytes."""
    width = max((part.boxes.ndim for part in parts), default=0)

    def column(name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(part, name) for part in parts] or [np.zeros(0, np.int64)])

    def padded(name: str) -> NDArray[np.int64]:
        rows = [np.zeros((len(part.boxes), width), np.int64) for part in parts]
        for row, part in zip(rows, parts, strict=True):
            row[:, : part.boxes.ndim] = getattr(part.boxes, name)
        return np.concatenate(rows or [np.zeros((0, width), np.int64)])

    tensor, writer = column("tensor"), column("writer")
    alignment = np.array([DTYPES[name].alignment for name in merged.dtypes], np.int64)
    order = np.lexsort((tensor, -alignment[tensor], writer))
    tensor, writer = tensor[order], writer[order]
    byte_count = column("volume")[order] * merged.itemsizes[tensor]
    writer_start = np.searchsorted(writer, np.arange(world_size + 1))
    before = np.cumsum(byte_count) - byte_count
    data_start = np.append(before, 0)[np.minimum(writer_start[:-1], max(len(tensor) - 1, 0))]
    ndim = merged.ndims[tensor]
    filled = np.arange(width) < ndim[:, None]
    return WritePlan(
        merged,
        tensor,
        writer_start,
        column("piece")[order],
        column("piece_start")[order],
        before - data_start[writer],
        byte_count,
        np.append(0, np.cumsum(ndim)),
        padded("offsets")[order][filled],
        padded("sizes")[order][filled],
        tuple(sorted({*np.unique(writer).tolist(), *merged.objects.values()})),
    )
