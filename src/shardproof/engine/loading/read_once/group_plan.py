"""The plan of a read-once exchange over a process group: the reader of each chunk, its receivers, the rounds.

    every rank: `ChunkRequest.of` its read plan  ->  coordinator: `plan_once`  ->  every rank: its `Orders`

This is arithmetic without communication. The plan leaves out chunks that only one rank wants, and chunks of
which several ranks want different blocks: each rank reads these itself. `Units` groups the other chunks and
assigns a reader to each unit, which reads and verifies it.

The reader sends a unit to each other rank in one message, in one *round* of the exchange. In a round no rank
sends or receives more than `round_bytes`, unless a single message is larger. So memory is bounded.

A message holds the chunks of the unit that its receiver wants, in file order. For each it holds the whole
chunk, or the parts that the receiver wants, row-major and in the order of the receiver's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardproof.engine.geometry import consecutive
from shardproof.engine.loading.read_once.units import (
    UNIT_BYTES,
    ChunkRequest,
    Int64s,
    Orders,
    Units,
    joined,
    wire,
)
from shardproof.engine.planning import ChunkTable

ROUND_BYTES = 32 << 20
"""Bytes that a rank sends, and receives, in one round. Its buffers take about four times as much."""


def plan_once(
    table: ChunkTable,
    requests: Sequence[ChunkRequest],
    *,
    round_bytes: int = ROUND_BYTES,
    unit_bytes: int = UNIT_BYTES,
) -> tuple[list[Orders], int]:
    """Assigns each chunk that several ranks want to one reader, and its messages to rounds.

    Returns the orders of each rank, and the bytes that they save from being read again.
    """
    world_size = len(requests)
    units = Units.of(table, requests, unit_bytes)
    message = units.received
    rounds, unit_round = _rounds(
        units.pair_unit[message],
        units.pair_rank[message],
        units.pair_bytes[message],
        units.reader,
        units.size,
        world_size,
        round_bytes,
    )
    pair_round = np.zeros(len(units.pair_unit), np.int64)
    pair_round[message] = rounds
    last = int(rounds.max(initial=-1)) + 1

    parts = joined([request.parts for request in requests])
    width = max((request.sizes.shape[1] for request in requests), default=0)
    boxes = np.zeros((sum(len(request.sizes) for request in requests), 2, width), np.int64)
    boxes[:, 1] = 1  # dimensions beyond a tensor's have offset 0 and size 1
    first = 0
    for request in requests:
        own = boxes[first : first + len(request.sizes), :, : request.sizes.shape[1]]
        own[:, 0], own[:, 1] = request.in_chunk, request.sizes
        first += len(request.sizes)
    plan = _PlacedUnits(units, message, pair_round, unit_round, last, parts, width, boxes)
    return [plan.orders(rank) for rank in range(world_size)], units.saved


@dataclass(frozen=True, slots=True, eq=False)
class _PlacedUnits:
    """Units whose messages have rounds."""

    units: Units
    message: Int64s
    """Pairs whose rank receives the unit from another rank, in the order of the pairs."""
    pair_round: Int64s
    unit_round: Int64s
    rounds: int
    parts: Int64s
    """By request, the number of its parts."""
    width: int
    """Dimensions of `boxes`."""
    boxes: Int64s
    """(p, 2, width) boxes of all parts, request by request."""

    def orders(self, rank: int) -> Orders:
        """The orders of one rank."""
        units, message, parts = self.units, self.message, self.parts
        reader, counts = units.reader, np.diff(units.start)
        mine = np.flatnonzero(reader == rank)
        unit_place = np.zeros(len(reader), np.int64)
        unit_place[mine] = np.arange(len(mine))
        out = message[reader[units.pair_unit[message]] == rank]
        into = message[units.pair_rank[message] == rank]
        out_rows, in_rows = (
            units.requests[consecutive(units.pair_first[side], units.pair_chunks[side])]
            for side in (out, into)
        )
        read = units.chunks[consecutive(units.start[mine], counts[mine])]
        out_bytes, in_bytes = units.pair_bytes[out], units.pair_bytes[into]
        unit, receiver = unit_place[units.pair_unit[out]], units.pair_rank[out]
        sent = (unit, receiver, self.pair_round[out], out_bytes, units.pair_chunks[out])
        received = (reader[units.pair_unit[into]], self.pair_round[into], in_bytes, units.pair_chunks[into])
        part_first = np.cumsum(parts) - parts
        return Orders(
            self.rounds,
            wire(self.unit_round[mine]),
            wire(counts[mine]),
            wire(read),
            wire(np.column_stack(sent)),
            wire(np.column_stack((units.chunk[out_rows], parts[out_rows]))),
            self.width,
            wire(self.boxes[consecutive(part_first[out_rows], parts[out_rows])]),
            wire(np.column_stack(received)),
            wire(np.column_stack((units.chunk[in_rows], parts[in_rows]))),
            int(units.size[mine].sum() + out_bytes.sum() + in_bytes.sum()),
        )


def _rounds(
    unit: Int64s,
    rank: Int64s,
    nbytes: Int64s,
    reader: Int64s,
    unit_size: Int64s,
    world_size: int,
    round_bytes: int,
) -> tuple[Int64s, Int64s]:
    """The round of each message, and the round of the first message of each unit.

    The rounds of a reader ascend from unit to unit, so that a unit stays in memory for a few rounds only.
    Readers take turns, and each begins with the rank after it, so that they do not all send to one rank.
    """
    before = np.zeros(len(reader), np.int64)
    for number in range(world_size):
        mine = np.flatnonzero(reader == number)
        before[mine] = np.arange(len(mine))
    turn = np.lexsort(((rank - reader[unit]) % world_size, reader[unit], before[unit]))
    rounds = np.zeros(len(unit), np.int64)
    unit_round = np.full(len(reader), -1, np.int64)
    now = [0] * world_size
    read, sent = [0] * world_size, [0] * world_size  # bytes in the current round of each reader
    received: list[dict[int, int]] = [{} for _ in range(world_size)]
    units, ranks, sizes, readers = unit.tolist(), rank.tolist(), nbytes.tolist(), reader.tolist()
    spans = unit_size.tolist()
    for row in turn.tolist():
        number, size, into = readers[units[row]], sizes[row], received[ranks[row]]
        begins = unit_round[units[row]] < 0
        while (
            (sent[number] and sent[number] + size > round_bytes)
            or (into.get(now[number], 0) and into[now[number]] + size > round_bytes)
            or (begins and read[number] and read[number] + spans[units[row]] > round_bytes)
        ):
            now[number] += 1
            sent[number] = read[number] = 0
        if begins:
            unit_round[units[row]] = now[number]
            read[number] += spans[units[row]]
        rounds[row] = now[number]
        sent[number] += size
        into[now[number]] = into.get(now[number], 0) + size
    return rounds, unit_round
