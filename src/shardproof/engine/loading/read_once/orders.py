"""The requests of the ranks for the read-once exchange, and the orders of the coordinator, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.engine.planning import ChunkTable, ReadPlan

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRequest:
    """The chunks that one rank wants, ascending. If it does not want a whole chunk, also the parts."""

    node: str
    """Host name: the ranks of a node share its connection to the storage."""
    chunk: Int64s
    """(c,) row of the chunk table."""
    nbytes: Int64s
    """(c,) bytes that a message needs for the chunk."""
    read: Int64s
    """(c,) bytes of the chunk that this rank would read without an exchange: its blocks, or all."""
    parts: Int64s
    """(c,) number of parts, 0 if the whole chunk is sent."""
    in_chunk: Int64s
    """(p, width) offsets of each part from the chunk's first element."""
    sizes: Int64s
    """(p, width) sizes of each part."""

    @staticmethod
    def of(node: str, table: ChunkTable, plan: ReadPlan, part_bytes: Int64s, read: Int64s) -> ChunkRequest:
        """The request for a read plan.

        Args:
            node: host name.
            table: all chunks.
            plan: plan of this rank, sorted by chunk.
            part_bytes: (n,) bytes of each part of the plan, as stored.
            read: (c,) bytes of each chunk of the plan that this rank would read without an exchange.
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
    """The orders of one rank: units to read, messages to send and receive. Columns are int64 as bytes."""

    rounds: int
    """Number of rounds, the same on all ranks."""
    read_rounds: bytes
    """(u,) first round that needs each unit that this rank reads; units in file order."""
    read_counts: bytes
    """(u,) number of chunks of each unit."""
    read_chunks: bytes
    """Rows of the chunk table, unit by unit."""
    sent: bytes
    """(s, 5) each message: unit (position in the columns above), receiver, round, bytes, number of chunks."""
    sent_chunks: bytes
    """(-, 2) each chunk of each message: row of the chunk table, number of parts (0: the whole chunk)."""
    sent_width: int
    sent_boxes: bytes
    """(-, 2, width) each part: offsets in its chunk, sizes."""
    received: bytes
    """(r, 4) each message: sender, round, bytes, number of chunks."""
    received_chunks: bytes
    """(-, 2) as `sent_chunks`."""
    total_bytes: int
    """Bytes that this rank reads, sends and receives by these orders."""

    def shared_chunks(self) -> Int64s:
        """Rows of the chunk table that this rank reads for several ranks, or receives."""
        received = np.frombuffer(self.received_chunks, np.int64).reshape(-1, 2)[:, 0]
        return np.concatenate([np.frombuffer(self.read_chunks, np.int64), received])
