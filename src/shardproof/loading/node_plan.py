"""The plan of reading once on one node: which rank reads each unit into its shared memory, where and when.

    every rank: `Wish.of` its read plan  ->  leader: `plan_node`  ->  every rank: its `NodeOrders`

Nothing is packed and nothing sent: whoever wants a chunk takes its parts from where its reader has put it.
The units of a reader follow one another through its memory, in rounds of `round_bytes`, or of one unit that
is larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from shardproof.loading.once_orders import Int64s, Loads, Wish
from shardproof.loading.once_units import UNIT_BYTES, Units, ranges, wire
from shardproof.planning import ChunkTable

__all__ = ["NODE_ROUND_BYTES", "NodeOrders", "plan_node"]

NODE_ROUND_BYTES = 4 << 20
"""Bytes that a rank reads in one round. Its memory holds two rounds."""
_ALIGNMENT = 64


class NodeOrders(msgspec.Struct, frozen=True, array_like=True):
    """What one rank does. Columns are int64 as bytes."""

    rounds: int
    """The same on all ranks."""
    nbytes: tuple[int, ...]
    """By rank: bytes of its memory that one round takes, at most."""
    read: bytes
    """(u, 3) each unit that this rank reads: round, byte of the memory, chunks; in the order of the files."""
    read_chunks: bytes
    """Rows of the chunk table, unit by unit."""
    placed: bytes
    """(p, 4) each chunk that this rank wants: round, rank that reads it, byte of its memory, row of the
    table."""
    moved: int
    """Bytes that this rank reads and places by these orders."""

    def shared_chunks(self) -> Int64s:
        """Rows of the chunk table that this rank finds in memory, or reads for others."""
        placed = np.frombuffer(self.placed, np.int64).reshape(-1, 4)[:, 3]
        return np.concatenate([np.frombuffer(self.read_chunks, np.int64), placed])


def plan_node(
    table: ChunkTable,
    wishes: Sequence[Wish],
    *,
    round_bytes: int = NODE_ROUND_BYTES,
    unit_bytes: int = UNIT_BYTES,
) -> tuple[list[NodeOrders], Loads]:
    """Plans the reading of every chunk that several ranks of one node want by one of them.

    Args:
        table: all chunks.
        wishes: of all ranks, which are on one node.
        round_bytes: bytes that a rank reads in a round.
        unit_bytes: bytes of neighbouring chunks that are read together.

    Returns:
        The orders of each rank, and what they come to.
    """
    world_size = len(wishes)
    units = Units.of(table, wishes, min(unit_bytes, round_bytes))
    count = np.diff(units.start)
    number, byte, nbytes = _places(units.reader.tolist(), units.size.tolist(), world_size, round_bytes)
    first = table.byte_start[units.chunks[units.start[:-1]]]
    orders = []
    for rank in range(world_size):
        mine = np.flatnonzero(units.reader == rank)
        wanted = np.flatnonzero(units.pair_rank == rank)
        rows = units.wishes[ranges(units.pair_first[wanted], units.pair_chunks[wanted])]
        unit = np.repeat(units.pair_unit[wanted], units.pair_chunks[wanted])
        chunk = units.chunk[rows]
        inside = table.byte_start[chunk] - first[unit]
        placed = np.column_stack((number[unit], units.reader[unit], byte[unit] + inside, chunk))
        orders.append(
            NodeOrders(
                int(number.max(initial=-1)) + 1,
                tuple(nbytes),
                wire(np.column_stack((number[mine], byte[mine], count[mine]))),
                wire(units.chunks[ranges(units.start[mine], count[mine])]),
                wire(placed[np.argsort(placed[:, 0], kind="stable")]),
                int(units.size[mine].sum() + units.pair_bytes[wanted].sum()),
            )
        )
    return orders, units.loads(table)


def _places(
    reader: list[int], size: list[int], world_size: int, round_bytes: int
) -> tuple[Int64s, Int64s, list[int]]:
    """Round and byte of each unit, and the bytes of each rank's largest round."""
    number, byte = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    now, filled, most = [0] * world_size, [0] * world_size, [0] * world_size
    for unit, (rank, nbytes) in enumerate(zip(reader, size, strict=True)):
        if filled[rank] and filled[rank] + nbytes > round_bytes:
            now[rank] += 1
            filled[rank] = 0
        number[unit], byte[unit] = now[rank], filled[rank]
        filled[rank] += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        most[rank] = max(most[rank], filled[rank])
    return number, byte, most
