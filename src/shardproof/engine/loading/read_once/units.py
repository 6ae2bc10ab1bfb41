"""What ranks request and are ordered to read in the read-once exchange, as columns, and its units.

Units are neighbouring chunks that the same ranks want.

A unit holds only chunks that several ranks want. It leaves out a chunk whose blocks the ranks can read
separately at little more than the size of the chunk (`_SHARE`). Readers are assigned by the
longest-processing-time rule (Graham, 1969): the largest unit first, to the node with the least to read so
far, and there to the rank with the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.engine.planning import ChunkTable, ReadPlan

UNIT_BYTES = 8 << 20
"""Neighbouring chunks join one unit up to this many bytes."""
_SHARE = 16
"""A chunk is in a unit if one read of it saves more than a sixteenth of its bytes."""

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Units, and the ranks that want them. A *pair* is a unit and a rank that wants it, sorted by both."""

    rank: Int64s
    """(w,) rank of each request for a chunk; the requests of rank 0 first."""
    chunk: Int64s
    """(w,) row of the chunk table that is requested."""
    read: Int64s
    """(w,) bytes of the chunk that the rank would read without an exchange."""
    own: Int64s
    """(ranks,) bytes outside of units, which each rank reads for itself."""
    node: Int64s
    """(ranks,) number of each rank's node."""
    chunks: Int64s
    """(c,) rows of the chunk table, unit by unit, in file order."""
    start: Int64s
    """(u + 1,) position in `chunks` where each unit begins."""
    size: Int64s
    """(u,) bytes of each unit."""
    reader: Int64s
    """(u,) rank that reads each unit."""
    requests: Int64s
    """Rows of the requests, by pair, then by position in the file."""
    pair_unit: Int64s
    pair_rank: Int64s
    pair_first: Int64s
    """Position in `requests` where each pair begins."""
    pair_chunks: Int64s
    pair_bytes: Int64s

    @staticmethod
    def of(table: ChunkTable, requests: Sequence[ChunkRequest], unit_bytes: int) -> Units:
        """Makes the units for the requests of all ranks, of at most `unit_bytes` neighbouring bytes."""
        world_size = len(requests)
        rank = np.repeat(np.arange(world_size), [len(request.chunk) for request in requests])
        chunk = joined([request.chunk for request in requests])
        nbytes = joined([request.nbytes for request in requests])
        read = joined([request.read for request in requests])
        spared = sums(chunk, read, len(table)) - table.byte_count
        is_shared = (np.bincount(chunk, minlength=len(table)) > 1) & (spared * _SHARE > table.byte_count)
        shared = is_shared[chunk]
        node = np.unique([request.node for request in requests], return_inverse=True)[1].reshape(-1)
        own = sums(rank[~shared], read[~shared], world_size)

        chunks, unit_of, start = _units(table, chunk[shared], rank[shared], is_shared, world_size, unit_bytes)
        units = len(start) - 1
        size = np.add.reduceat(table.byte_count[chunks], start[:-1]) if units else start[:-1]
        place = np.zeros(len(table), np.int64)  # of each shared chunk in the order of the files
        place[chunks] = np.arange(len(chunks))
        rows = np.flatnonzero(shared)
        rows = rows[np.lexsort((place[chunk[rows]], rank[rows], unit_of[place[chunk[rows]]]))]
        pair = unit_of[place[chunk[rows]]] * world_size + rank[rows]
        pair_key, pair_first, pair_chunks = np.unique(pair, return_index=True, return_counts=True)
        pair_unit, pair_rank = np.divmod(pair_key, world_size)
        pair_bytes = np.add.reduceat(nbytes[rows], pair_first) if len(rows) else np.zeros(0, np.int64)
        reader = _readers(pair_unit, pair_rank, size, own, node)
        return Units(
            rank,
            chunk,
            read,
            own,
            node,
            chunks,
            start,
            size,
            reader,
            rows,
            pair_unit,
            pair_rank,
            pair_first,
            pair_chunks,
            pair_bytes,
        )

    @property
    def received(self) -> Int64s:
        """Pairs whose rank is not the reader."""
        return np.flatnonzero(self.pair_rank != self.reader[self.pair_unit])

    @property
    def saved(self) -> int:
        """Bytes that these units save from being read again."""
        return int(self.read.sum() - self.own.sum() - self.size.sum())


def _units(
    table: ChunkTable,
    chunk: Int64s,
    rank: Int64s,
    is_shared: NDArray[np.bool_],
    world_size: int,
    unit_bytes: int,
) -> tuple[Int64s, Int64s, Int64s]:
    """Shared chunks in file order, the unit of each, and the first chunk of each unit (and the end)."""
    # Chunks that the same ranks want have the same sum of tokens. If two sums are equal by chance, two units
    # become one, and ranks receive nothing wrong: messages are made from the requests.
    token = np.random.default_rng(0).integers(1, 2**63, world_size, np.int64).astype(np.uint64)
    who = np.zeros(len(table), np.uint64)
    np.add.at(who, chunk, token[rank])
    chunks = np.flatnonzero(is_shared)
    chunks = chunks[np.lexsort((table.byte_start[chunks], table.file[chunks]))]
    file, start, count = table.file[chunks], table.byte_start[chunks], table.byte_count[chunks]
    new = np.ones(len(chunks), bool)
    new[1:] = (
        (file[1:] != file[:-1])
        | (start[1:] != start[:-1] + count[:-1])
        | (who[chunks[1:]] != who[chunks[:-1]])
    )
    run = np.cumsum(new) - 1
    within = (start - start[np.flatnonzero(new)][run]) // unit_bytes if len(run) else start
    new[1:] |= within[1:] != within[:-1]
    return chunks, np.cumsum(new) - 1, np.append(np.flatnonzero(new), len(chunks))


def _readers(unit: Int64s, rank: Int64s, size: Int64s, own: Int64s, node: Int64s) -> Int64s:
    """The reader of each unit: on the node with the least to read, the rank with the least."""
    first = np.searchsorted(unit, np.arange(len(size) + 1))
    load = own.tolist()
    nodes = node.tolist()
    of_node = sums(node, own, int(node.max(initial=-1)) + 1).tolist()
    wanting = rank.tolist()
    reader = np.zeros(len(size), np.int64)
    for row in np.argsort(-size, kind="stable").tolist():
        wanted_by = wanting[first[row] : first[row + 1]]
        chosen = min(wanted_by, key=lambda one: (of_node[nodes[one]], load[one], one))
        reader[row] = chosen
        load[chosen] += int(size[row])
        of_node[nodes[chosen]] += int(size[row])
    return reader


def joined(columns: Sequence[Int64s]) -> Int64s:
    """All columns, one after another."""
    return np.concatenate([np.zeros(0, np.int64), *columns])


def sums(group: Int64s, values: Int64s, groups: int) -> Int64s:
    """The sum of the values of each group."""
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values)
    return sums


def wire(column: Int64s) -> bytes:
    """A column as bytes."""
    return np.ascontiguousarray(column, np.int64).tobytes()


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
