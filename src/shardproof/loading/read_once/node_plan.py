"""The plan of reading once on one node: which rank reads each unit into its shared memory, where and when.

    every rank: `ChunkRequest.of(plan)`  ->  coordinator: `plan_node`  ->  every rank: its `NodeOrders`

Nothing is packed and nothing sent: whoever wants a chunk takes its parts from where its reader has put it. A
reader takes its units in the order of the files, in *rounds* of `ROUND_BYTES`, or of one unit that is larger.
The rounds follow one another through its memory, a ring, so each but the first few lies where earlier ones
were, and begins when these were taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from shardproof.geometry import consecutive
from shardproof.loading.read_once.orders import ChunkRequest, Int64s, Loads
from shardproof.loading.read_once.units import UNIT_BYTES, Units, wire
from shardproof.planning import ChunkTable

__all__ = ["AHEAD", "RING_BYTES", "ROUND_BYTES", "NodeOrders", "plan_node"]

ROUND_BYTES = 1 << 20
"""Bytes that a rank reads before it tells the others."""
RING_BYTES = 8 << 20
"""A rank's memory, unless two rounds are larger: small, so that what was read is in the processors' caches
when it is taken."""
AHEAD = 7
"""Rounds of a rank that not all have taken from, at most."""
_ALIGNMENT = 64


class NodeOrders(msgspec.Struct, frozen=True, array_like=True):
    """What one rank does. Columns are int64 as bytes."""

    nbytes: tuple[int, ...]
    """By rank: bytes of its memory."""
    rounds: bytes
    """(r, 2) each round that this rank reads: byte of its memory, and how many rounds, from the first on,
    must have been taken by all before it is read."""
    takers: bytes
    """(-, 2) each of them again, and a rank that takes something from it; this one too."""
    read: bytes
    """(u, 3) each unit that this rank reads: round, byte of the round, chunks; in the order of the files."""
    read_chunks: bytes
    """Rows of the chunk table, unit by unit."""
    taken: bytes
    """(t, 4) each chunk that this rank wants: rank that reads it, round of that rank, byte of its memory, row
    of the table; sorted by rank and round."""
    moved: int
    """Bytes that this rank reads, and takes from others, by these orders."""

    def shared_chunks(self) -> Int64s:
        """Rows of the chunk table that this rank finds in memory, or reads for others."""
        taken = np.frombuffer(self.taken, np.int64).reshape(-1, 4)[:, 3]
        return np.concatenate([np.frombuffer(self.read_chunks, np.int64), taken])


def plan_node(
    table: ChunkTable,
    requests: Sequence[ChunkRequest],
    *,
    round_bytes: int = ROUND_BYTES,
    ring_bytes: int = RING_BYTES,
    unit_bytes: int = UNIT_BYTES,
) -> tuple[list[NodeOrders], Loads]:
    """Plans the reading of every chunk that several ranks of one node want by one of them.

    Args:
        table: all chunks.
        requests: of all ranks, which are on one node.
        round_bytes: bytes that a rank reads in a round.
        ring_bytes: bytes of a rank's memory.
        unit_bytes: bytes of neighbouring chunks that are read together.

    Returns:
        The orders of each rank, and what they come to.
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
        takers = np.column_stack((number[units.pair_unit[own_pairs]], units.pair_rank[own_pairs]))
        wanted = np.flatnonzero(units.pair_rank == rank)
        rows = units.requests[consecutive(units.pair_first[wanted], units.pair_chunks[wanted])]
        unit = np.repeat(units.pair_unit[wanted], units.pair_chunks[wanted])
        chunk = units.chunk[rows]
        byte = begin[unit] + table.byte_start[chunk] - first[unit]
        taken = np.column_stack((units.reader[unit], number[unit], byte, chunk))
        from_others = wanted[units.reader[units.pair_unit[wanted]] != rank]
        orders.append(
            NodeOrders(
                tuple(nbytes),
                wire(rounds[rank]),
                wire(np.unique(takers, axis=0)),
                wire(np.column_stack((number[mine], inside[mine], count[mine]))),
                wire(units.chunks[consecutive(units.start[mine], count[mine])]),
                wire(taken[np.lexsort((taken[:, 1], taken[:, 0]))]),
                int(units.size[mine].sum() + units.pair_bytes[from_others].sum()),
            )
        )
    return orders, units.loads(table)


def _rounds(sizes: list[int], round_bytes: int) -> tuple[list[int], list[int], list[int]]:
    """Of each unit the round and its byte in it; and of each round the bytes."""
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
    """Rounds one after another through a ring; what it takes.

    Returns:
        (r, 2) of each round its byte, and how many rounds from the first on must be gone before it begins:
        those that lie where it is to be, and all before them; and the bytes of the ring.
    """
    ring = min(sum(sizes), max(ring_bytes, 2 * max(sizes, default=0)))
    places = np.zeros((len(sizes), 2), np.int64)
    there: deque[tuple[int, int]] = deque()  # begin and end of rounds that may still be in memory
    byte = gone = 0
    for number, nbytes in enumerate(sizes):
        if byte + nbytes > ring:
            byte = 0
        in_the_way = [at for at, (begin, end) in enumerate(there) if begin < byte + nbytes and byte < end]
        for _ in range(max(in_the_way[-1] + 1 if in_the_way else 0, len(there) + 1 - AHEAD)):
            there.popleft()
            gone += 1
        places[number] = byte, gone
        there.append((byte, byte + nbytes))
        byte += nbytes
    return places, ring
