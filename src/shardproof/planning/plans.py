"""What is planned: for all ranks as the coordinator keeps it, and for one rank as it is answered."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.planning.columns import Packed, pack, unpack
from shardproof.planning.merge import Merged
from shardproof.planning.replicas import Replicas, SharedPieces

__all__ = ["RankPlan", "WritePlan"]

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
