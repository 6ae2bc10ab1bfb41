"""The plan of reading once: which rank reads each chunk that several want, and what it hands on, and when.

    every rank: `Wish.of` its read plan  ->  leader: `plan_once`  ->  every rank: its `Orders`

Arithmetic alone, no communication. Chunks that only one rank wants are no part of it: that rank reads them as
ever. The others are taken together to *units*, neighbours in one file that the same ranks want. One of those
ranks reads a unit and verifies it: the one that has the least to read so far on the node that has, largest
unit first (the longest-processing-time rule of Graham, 1969). A unit goes to another rank in one message, in
a *round* of exchange; no rank sends or receives more than `round_bytes` in a round, unless one message is
larger, so memory is bounded.

A message has, for each chunk of the unit that its receiver wants, in the order of the file, either the whole
chunk or the parts that are wanted, each row-major, in the order of the receiver's own plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardproof.loading.once_orders import Int64s, Loads, Orders, Wish
from shardproof.planning import ChunkTable

__all__ = ["ROUND_BYTES", "UNIT_BYTES", "plan_once"]

ROUND_BYTES = 32 << 20
"""Bytes that a rank sends, and receives, in one round. It holds about four times as much meanwhile."""
UNIT_BYTES = 8 << 20
"""Bytes from which on neighbouring chunks are no longer taken together."""


def plan_once(
    table: ChunkTable, wishes: Sequence[Wish], *, round_bytes: int = ROUND_BYTES, unit_bytes: int = UNIT_BYTES
) -> tuple[list[Orders], Loads]:
    """Plans the reading of every wanted chunk by one rank.

    Args:
        table: all chunks.
        wishes: of all ranks.
        round_bytes: bytes that a rank sends and receives in a round.
        unit_bytes: bytes of neighbouring chunks that are taken together.

    Returns:
        The orders of each rank, and what they come to.
    """
    world_size = len(wishes)
    rank = np.repeat(np.arange(world_size), [len(wish.chunk) for wish in wishes])
    chunk = _joined([wish.chunk for wish in wishes])
    nbytes = _joined([wish.nbytes for wish in wishes])
    holders = np.bincount(chunk, minlength=len(table))
    shared = holders[chunk] > 1
    node = np.unique([wish.node for wish in wishes], return_inverse=True)[1].reshape(-1)
    own = _sums(rank[~shared], table.byte_count[chunk[~shared]], world_size)

    chunks, unit_of, unit_start = _units(table, chunk[shared], rank[shared], holders, world_size, unit_bytes)
    units = len(unit_start) - 1
    unit_size = np.add.reduceat(table.byte_count[chunks], unit_start[:-1]) if units else unit_start[:-1]
    place = np.zeros(len(table), np.int64)  # of each shared chunk in the order of the files
    place[chunks] = np.arange(len(chunks))
    # Rows of wishes for shared chunks by unit, then rank, then place in the file: a message is a run of them.
    rows = np.flatnonzero(shared)
    rows = rows[np.lexsort((place[chunk[rows]], rank[rows], unit_of[place[chunk[rows]]]))]
    pair = unit_of[place[chunk[rows]]] * world_size + rank[rows]
    pair_key, pair_first, pair_chunks = np.unique(pair, return_index=True, return_counts=True)
    pair_unit, pair_rank = np.divmod(pair_key, world_size)
    pair_bytes = np.add.reduceat(nbytes[rows], pair_first) if len(rows) else np.zeros(0, np.int64)

    reader = _readers(pair_unit, pair_rank, unit_size, own, node)
    message = np.flatnonzero(pair_rank != reader[pair_unit])
    rounds, unit_round = _rounds(
        pair_unit[message],
        pair_rank[message],
        pair_bytes[message],
        reader,
        unit_size,
        world_size,
        round_bytes,
    )
    pair_round = np.zeros(len(pair_unit), np.int64)
    pair_round[message] = rounds
    last = int(rounds.max(initial=-1)) + 1

    parts = _joined([wish.parts for wish in wishes])
    part_first = np.cumsum(parts) - parts
    width = max((wish.sizes.shape[1] for wish in wishes), default=0)
    boxes = np.concatenate([_boxes(wish, width) for wish in wishes])
    orders = []
    for number in range(world_size):
        mine = np.flatnonzero(reader == number)
        unit_place = np.zeros(units, np.int64)
        unit_place[mine] = np.arange(len(mine))
        out = message[reader[pair_unit[message]] == number]
        into = message[pair_rank[message] == number]
        out_rows, in_rows = (rows[_ranges(pair_first[side], pair_chunks[side])] for side in (out, into))
        read = chunks[_ranges(unit_start[mine], np.diff(unit_start)[mine])]
        sent = (
            unit_place[pair_unit[out]],
            pair_rank[out],
            pair_round[out],
            pair_bytes[out],
            pair_chunks[out],
        )
        received = (reader[pair_unit[into]], pair_round[into], pair_bytes[into], pair_chunks[into])
        orders.append(
            Orders(
                last,
                _wire(unit_round[mine]),
                _wire(np.diff(unit_start)[mine]),
                _wire(read),
                _wire(np.column_stack(sent)),
                _wire(np.column_stack((chunk[out_rows], parts[out_rows]))),
                width,
                _wire(boxes[_ranges(part_first[out_rows], parts[out_rows])]),
                _wire(np.column_stack(received)),
                _wire(np.column_stack((chunk[in_rows], parts[in_rows]))),
                int(unit_size[mine].sum() + pair_bytes[out].sum() + pair_bytes[into].sum()),
            )
        )
    on_node = np.unique(node[rank] * len(table) + chunk)
    loads = Loads(
        node,
        _sums(rank, table.byte_count[chunk], world_size),
        _sums(on_node // max(len(table), 1), table.byte_count[on_node % max(len(table), 1)], node.max() + 1),
        own + _sums(reader, unit_size, world_size),
        _sums(reader[pair_unit[message]], pair_bytes[message], world_size),
        _sums(pair_rank[message], pair_bytes[message], world_size),
    )
    return orders, loads


def _units(
    table: ChunkTable, chunk: Int64s, rank: Int64s, holders: Int64s, world_size: int, unit_bytes: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Shared chunks in the order of the files, the unit of each, and the first of each unit (and the end)."""
    # Chunks that the same ranks want have the same sum of their tokens; a sum that agrees by chance puts two
    # into one unit that could be two, nothing worse.
    token = np.random.default_rng(0).integers(1, 2**63, world_size, np.int64).astype(np.uint64)
    who = np.zeros(len(table), np.uint64)
    np.add.at(who, chunk, token[rank])
    chunks = np.flatnonzero(holders > 1)
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
    """One of the ranks that want each unit: of the node with the least to read, that with the least."""
    first = np.searchsorted(unit, np.arange(len(size) + 1))
    load = own.tolist()
    nodes = node.tolist()
    of_node = _sums(node, own, int(node.max(initial=-1)) + 1).tolist()
    wanting = rank.tolist()
    reader = np.zeros(len(size), np.int64)
    for row in np.argsort(-size, kind="stable").tolist():
        wanted_by = wanting[first[row] : first[row + 1]]
        chosen = min(wanted_by, key=lambda one: (of_node[nodes[one]], load[one], one))
        reader[row] = chosen
        load[chosen] += int(size[row])
        of_node[nodes[chosen]] += int(size[row])
    return reader


def _rounds(
    unit: Int64s,
    rank: Int64s,
    nbytes: Int64s,
    reader: Int64s,
    unit_size: Int64s,
    world_size: int,
    round_bytes: int,
) -> tuple[Int64s, Int64s]:
    """The round of each message, and that of the first of each unit.

    A reader's rounds never go back from one unit to the next, so that it holds a unit for a few rounds only.
    Readers take turns, and each begins with the rank after it, so that none waits for one that all send to.
    """
    before = np.zeros(len(reader), np.int64)
    for number in range(world_size):
        mine = np.flatnonzero(reader == number)
        before[mine] = np.arange(len(mine))
    turn = np.lexsort(((rank - reader[unit]) % world_size, reader[unit], before[unit]))
    rounds = np.zeros(len(unit), np.int64)
    unit_round = np.full(len(reader), -1, np.int64)
    now = [0] * world_size
    read, sent = [0] * world_size, [0] * world_size  # in the round where each reader is
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


def _boxes(wish: Wish, width: int) -> Int64s:
    """(p, 2, width) offsets and sizes of the parts; dimensions beyond the tensor's are 0 and 1."""
    boxes = np.zeros((len(wish.sizes), 2, width), np.int64)
    boxes[:, 1] = 1
    boxes[:, 0, : wish.sizes.shape[1]] = wish.in_chunk
    boxes[:, 1, : wish.sizes.shape[1]] = wish.sizes
    return boxes


def _joined(columns: Sequence[Int64s]) -> Int64s:
    return np.concatenate([np.zeros(0, np.int64), *columns])


def _sums(group: Int64s, values: Int64s, groups: int) -> Int64s:
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values)
    return sums


def _ranges(first: Int64s, count: Int64s) -> Int64s:
    """The numbers from each first on, so many of each."""
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(int(count.sum()))


def _wire(column: Int64s) -> bytes:
    return np.ascontiguousarray(column, np.int64).tobytes()
