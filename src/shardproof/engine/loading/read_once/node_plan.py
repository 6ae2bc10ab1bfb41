"""The plan of a read-once exchange on one node: which rank reads each unit, and its place in shared memory.

    every rank: `ChunkRequest.of(plan)`  ->  coordinator: `plan_node`  ->  every rank: its `NodeOrders`

Ranks pack and send nothing: a rank copies the parts that it wants from the shared memory of the reader. A
reader reads its units in file order, in *rounds* of `ROUND_BYTES`, or of one larger unit. Its memory is a
ring buffer. All rounds except the first few reuse the memory of earlier rounds. So the reader waits until
every receiver has copied its parts of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from shardproof.engine.geometry import consecutive
from shardproof.engine.loading.read_once.units import UNIT_BYTES, ChunkRequest, Int64s, Units, wire
from shardproof.engine.planning import ChunkTable

ROUND_BYTES = 1 << 20
"""Bytes that a rank reads before it notifies the others."""
RING_BYTES = 8 << 20
"""Bytes of a rank's ring buffer, unless two rounds are larger. A small buffer stays in the caches of the
processors until the receivers copy from it."""
AHEAD = 7
"""Maximum number of rounds of a reader that receivers have not copied from yet."""
_ALIGNMENT = 64


class NodeOrders(msgspec.Struct, frozen=True, array_like=True):
    """The orders of one rank. Columns are int64 as bytes."""

    nbytes: tuple[int, ...]
    """Bytes of each rank's ring, by rank."""
    rounds: bytes
    """(r, 2) each round that this rank reads: its first byte in the ring, and the number of rounds, from the
    first on, that must be free before the rank reads it."""
    receivers: bytes
    """(-, 2) a round that this rank reads, and a rank that copies from it, this rank included."""
    read: bytes
    """(u, 3) each unit that this rank reads, in file order: round, byte in the round, number of chunks."""
    read_chunks: bytes
    """Rows of the chunk table, unit by unit."""
    copies: bytes
    """(t, 4) each chunk that this rank copies: reader, round of the reader, byte in the reader's ring, row of
    the chunk table. Sorted by reader and round."""
    total_bytes: int
    """Bytes that this rank reads, and copies from other ranks."""

    def shared_chunks(self) -> Int64s:
        """Rows of the chunk table that this rank copies from shared memory, or reads for others."""
        copies = np.frombuffer(self.copies, np.int64).reshape(-1, 4)[:, 3]
        return np.concatenate([np.frombuffer(self.read_chunks, np.int64), copies])


def plan_node(
    table: ChunkTable,
    requests: Sequence[ChunkRequest],
    *,
    round_bytes: int = ROUND_BYTES,
    ring_bytes: int = RING_BYTES,
    unit_bytes: int = UNIT_BYTES,
) -> tuple[list[NodeOrders], int]:
    """Assigns each chunk that several ranks of one node want to one reader, and to a place in its ring.

    Returns the orders of each rank, and the bytes that they save from being read again.
    """
    world_size = len(requests)
    units = Units.of(table, requests, min(unit_bytes, round_bytes))
    count = np.diff(units.start)
    number, inside = np.zeros(len(units.size), np.int64), np.zeros(len(units.size), np.int64)
    rounds: list[Int64s] = []
    nbytes: list[int] = []
    for rank in range(world_size):
        mine = np.flatnonzero(units.reader == rank)
        number[mine], inside[mine], sizes = _rounds(units.size[mine].tolist(), round_bytes)
        places, needed = _ring(sizes, ring_bytes)
        rounds.append(places)
        nbytes.append(needed)
    begin = np.zeros(len(units.size), np.int64)
    for rank in range(world_size):
        mine = np.flatnonzero(units.reader == rank)
        begin[mine] = rounds[rank][number[mine], 0] + inside[mine]
    first = table.byte_start[units.chunks[units.start[:-1]]]
    orders = []
    for rank in range(world_size):
        mine = np.flatnonzero(units.reader == rank)
        own_pairs = np.flatnonzero(units.reader[units.pair_unit] == rank)
        receivers = np.column_stack((number[units.pair_unit[own_pairs]], units.pair_rank[own_pairs]))
        wanted = np.flatnonzero(units.pair_rank == rank)
        rows = units.requests[consecutive(units.pair_first[wanted], units.pair_chunks[wanted])]
        unit = np.repeat(units.pair_unit[wanted], units.pair_chunks[wanted])
        chunk = units.chunk[rows]
        byte = begin[unit] + table.byte_start[chunk] - first[unit]
        copies = np.column_stack((units.reader[unit], number[unit], byte, chunk))
        from_others = wanted[units.reader[units.pair_unit[wanted]] != rank]
        orders.append(
            NodeOrders(
                tuple(nbytes),
                wire(rounds[rank]),
                wire(np.unique(receivers, axis=0)),
                wire(np.column_stack((number[mine], inside[mine], count[mine]))),
                wire(units.chunks[consecutive(units.start[mine], count[mine])]),
                wire(copies[np.lexsort((copies[:, 1], copies[:, 0]))]),
                int(units.size[mine].sum() + units.pair_bytes[from_others].sum()),
            )
        )
    return orders, units.saved


def _rounds(sizes: list[int], round_bytes: int) -> tuple[list[int], list[int], list[int]]:
    """The round of each unit, the byte of each unit in its round, and the bytes of each round."""
    number: list[int] = []
    inside: list[int] = []
    rounds: list[int] = []
    for nbytes in sizes:
        if not rounds or rounds[-1] + nbytes > round_bytes:
            rounds.append(0)
        number.append(len(rounds) - 1)
        inside.append(rounds[-1])
        rounds[-1] += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return number, inside, rounds


def _ring(sizes: list[int], ring_bytes: int) -> tuple[Int64s, int]:
    """Places rounds one after another in a ring.

    Returns:
        (r, 2) the first byte of each round, and the number of rounds, from the first on, that must be free
        before the reader reads it: the rounds that overlap it in the ring, and all before them. And the bytes
        of the ring.
    """
    ring = min(sum(sizes), max(ring_bytes, 2 * max(sizes, default=0)))
    places = np.zeros((len(sizes), 2), np.int64)
    in_use: deque[tuple[int, int]] = deque()  # begin and end of rounds that are not free yet
    byte = free = 0
    for number, nbytes in enumerate(sizes):
        if byte + nbytes > ring:
            byte = 0
        overlapping = [at for at, (begin, end) in enumerate(in_use) if begin < byte + nbytes and byte < end]
        for _ in range(max(overlapping[-1] + 1 if overlapping else 0, len(in_use) + 1 - AHEAD)):
            in_use.popleft()
            free += 1
        places[number] = byte, free
        in_use.append((byte, byte + nbytes))
        byte += nbytes
    return places, ring
