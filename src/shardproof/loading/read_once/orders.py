"""What ranks that read once tell the coordinator, and what it tells them: columns, as bytes on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.planning import ChunkTable, ReadPlan

__all__ = ["ChunkRequest", "Int64s", "Loads", "Orders"]

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRequest:
    """What one rank wants: rows for the chunks, ascending, and rows for the parts of those cut."""

    node: str
    """Name of the machine: ranks on one share its way to the storage."""
    chunk: Int64s
    """(c,) row of the chunk table."""
    nbytes: Int64s
    """(c,) bytes of the message that would hand it on."""
    read: Int64s
    """(c,) bytes of it that this rank would read by itself: its blocks, or all."""
    parts: Int64s
    """(c,) number of its parts, 0 where the whole chunk is sent."""
    in_chunk: Int64s
    """(p, width) offsets of each part from the chunk's first element."""
    sizes: Int64s
    """(p, width) sizes of each part."""

    @staticmethod
    def of(node: str, table: ChunkTable, plan: ReadPlan, part_bytes: Int64s, read: Int64s) -> ChunkRequest:
        """What a read plan wants.

        Args:
            node: name of the machine.
            table: all chunks.
            plan: of this rank, sorted by chunk.
            part_bytes: (n,) bytes of each part of the plan, as stored.
            read: (c,) bytes that this rank would read of each chunk of the plan by itself.
        """
        chunk, first, parts = np.unique(plan.chunk, return_index=True, return_counts=True)
        summed = np.add.reduceat(part_bytes, first) if len(first) else np.zeros(0, np.int64)
        count = table.byte_count[chunk]
        whole = summed >= count  # also where parts that overlap add up to more
        cut = np.repeat(~whole, parts)
        return ChunkRequest(
            node,
            chunk,
            np.where(whole, count, summed),
            read,
            np.where(whole, 0, parts),
            plan.in_chunk[cut],
            plan.sizes[cut],
        )

    def encode(self) -> bytes:
        """This request as bytes for the rendezvous."""
        columns = (self.chunk, self.nbytes, self.read, self.parts, self.in_chunk, self.sizes)
        return msgspec.msgpack.encode(
            (self.node, self.sizes.shape[1], [np.ascontiguousarray(column).tobytes() for column in columns])
        )

    @staticmethod
    def decode(data: bytes) -> ChunkRequest:
        """The request that `encode` wrote."""
        node, width, wire = msgspec.msgpack.decode(data, type=tuple[str, int, list[bytes]])
        chunk, nbytes, read, parts, in_chunk, sizes = (np.frombuffer(column, np.int64) for column in wire)
        rows = int(parts.sum())
        return ChunkRequest(
            node, chunk, nbytes, read, parts, in_chunk.reshape(rows, width), sizes.reshape(rows, width)
        )


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """What one rank does: units it reads, messages it sends and receives. Columns are int64 as bytes."""

    rounds: int
    """Of exchange; the same on all ranks."""
    read_rounds: bytes
    """(u,) round before which each unit that this rank reads must be there; in the order of the files."""
    read_counts: bytes
    """(u,) chunks of each unit."""
    read_chunks: bytes
    """Rows of the chunk table, unit by unit."""
    sent: bytes
    """(s, 5) each message: unit (place in the columns above), rank, round, bytes, chunks."""
    sent_chunks: bytes
    """(-, 2) of each message each chunk: row of the chunk table, number of parts (0: the whole)."""
    sent_width: int
    sent_boxes: bytes
    """(-, 2, width) of each part: offsets in its chunk, sizes."""
    received: bytes
    """(r, 4) each message: rank, round, bytes, chunks."""
    received_chunks: bytes
    """(-, 2) as `sent_chunks`."""
    moved: int
    """Bytes that this rank reads, sends and receives by these orders."""

    def shared_chunks(self) -> Int64s:
        """Rows of the chunk table that this rank reads for several, or is sent."""
        received = np.frombuffer(self.received_chunks, np.int64).reshape(-1, 2)[:, 0]
        return np.concatenate([np.frombuffer(self.read_chunks, np.int64), received])


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Bytes over ranks that reading once, and reading all, would take."""

    node: Int64s
    """(ranks,) number of each rank's node."""
    read_all: Int64s
    """(ranks,) read by each rank that reads all that it wants itself."""
    distinct_all: Int64s
    """(nodes,) of that, bytes that differ within a node, at most: a node's page cache serves the rest."""
    read_once: Int64s
    """(ranks,) read by each rank by the plan."""
    sent: Int64s
    """(ranks,)"""
    received: Int64s
    """(ranks,)"""

    @property
    def saved(self) -> int:
        """Bytes that reading once does not read again."""
        return int(self.read_all.sum() - self.read_once.sum())
