"""Chooses the rank that writes each chunk, among the ranks that hold it.

Note: How bytes are balanced
----------------------------
The boxes that the same ranks hold form a *set*. The chunks of a set, in the order of tensors and boxes, form
one line of bytes. Each holder gets one contiguous share of the line, so that neighbours in a tensor are
neighbours in a file.

The lengths of the shares follow a water-filling rule, first for nodes, then for the ranks of each node: bytes
raise the least loaded to one common level. Bytes with one holder come first, then the sets, those with the
fewest holders first. If sets cross (a node is in several), each set is filled again after the others, for at
most `_ROUNDS` rounds. Each round lowers the sum of the squared loads. Its minimum is the fairest division of
divisible bytes. The result depends only on the input.

Chunks are not divided. The line is cut into equal *cells*. A chunk belongs to the cell that contains the
chunk's middle. Its writer is the rank whose share contains the middle of that cell. So small boxes of many
holders need few files. A rank gets at most a chunk and a cell more than its share of a set, and the next sets
take this excess into account.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.geometry import consecutive, row_pointers, stable_order

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

_ROUNDS = 8
"""Maximum number of rounds for sets that cross."""


def choose_writers(
    group: _Ints,
    rank: _Ints,
    shared: SharedBoxes,
    chunk_group: _Ints,
    chunk_bytes: _Ints,
    nodes: _Ints,
    *,
    cell_bytes: int = 1,
) -> _Ints:
    """Chooses one holder as the writer of each chunk, and balances bytes over nodes, then over ranks.

    Returns the (c,) row of the chosen replica of each chunk, 0 to n - 1. See the note "How bytes are
    balanced".

    Args:
        group: (n,) row of the distinct box of each replica.
        rank: (n,) rank of each replica.
        shared: result of `find_shared` for these replicas.
        chunk_group: (c,) row of the distinct box of each chunk, ascending.
        chunk_bytes: (c,) size of each chunk in bytes.
        nodes: (world size,) node number of each rank.
        cell_bytes: size of a cell in bytes. Chunks of one set and one cell have one writer.

    >>> group, rank = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0])
    >>> chunk_group, chunk_bytes = np.array([0, 0, 1, 2]), np.array([4, 4, 6, 3])
    >>> from shardproof.engine.planning.writers import find_shared
    >>> shared = find_shared(group, rank, 2)
    >>> rank[choose_writers(group, rank, shared, chunk_group, chunk_bytes, np.array([0, 1]))].tolist()
    [0, 1, 1, 0]
    """
    boxes = int(group.max(initial=-1)) + 1
    replica = np.empty(boxes, np.int64)
    replica[group] = np.arange(len(group))
    chosen = replica[chunk_group]
    at = np.full(boxes, -1, np.int64)  # row of each box in `shared`
    at[shared.box] = np.arange(len(shared.box))
    shared_chunks = np.flatnonzero(at[chunk_group] >= 0)
    if len(shared_chunks) == 0:
        return chosen
    has_one_holder = np.ones(len(chosen), np.bool_)
    has_one_holder[shared_chunks] = False
    loads = _sums(rank[chosen[has_one_holder]], chunk_bytes[has_one_holder], len(nodes))
    holder = rank[shared.rows]
    lines = shared_chunks[stable_order(shared.set[at[chunk_group[shared_chunks]]])]
    begins = np.flatnonzero(np.diff(shared.set[at[chunk_group[lines]]], prepend=-1))
    sets = []
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(lines)], strict=True):
        chunks = lines[begin:end]
        first = at[chunk_group[chunks[0]]]
        ranks = holder[shared.starts[first] : shared.starts[first + 1]]
        sets.append(_Set.of(chunks, chunk_bytes, ranks, nodes))
    for line, holders in zip(sets, _writers(sets, loads, len(nodes), nodes, cell_bytes), strict=True):
        chosen[line.chunks] = shared.rows[shared.starts[at[chunk_group[line.chunks]]] + holders]
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    """The chunks that the same ranks hold, in the order of the line, and those ranks by node."""

    chunks: _Ints
    """(c,) rows of the chunks, ascending."""
    byte_count: _Ints
    """(c,) size of each chunk in bytes."""
    order: _Ints
    """(k,) position of each entry of `ranks` among the holders sorted by rank."""
    ranks: _Ints
    """(k,) the holders, sorted by node, then by rank."""
    node_starts: _Ints
    """(j,) start of each node's ranks in `ranks`."""

    @staticmethod
    def of(chunks: _Ints, chunk_bytes: _Ints, ranks: _Ints, nodes: _Ints) -> _Set:
        order = np.argsort(nodes[ranks], kind="stable")
        starts = np.flatnonzero(np.diff(nodes[ranks[order]], prepend=nodes.min() - 1))
        return _Set(chunks, chunk_bytes[chunks], order, ranks[order], starts)


def _writers(sets: list[_Set], loads: _Floats, world_size: int, nodes: _Ints, cell_bytes: int) -> list[_Ints]:
    """For each set: (c,) position of each chunk's writer among the holders sorted by rank."""
    _, node_of = np.unique(nodes, return_inverse=True)
    node_loads = _sums(node_of, loads, world_size)
    nodes_of = [node_of[line.ranks[line.node_starts]] for line in sets]
    fewest_holders_first = sorted(range(len(sets)), key=lambda at: len(sets[at].ranks))
    shares = [np.zeros(len(line.ranks)) for line in sets]

    def add(at: int, share: _Floats) -> None:
        loads[sets[at].ranks] += share
        node_loads[nodes_of[at]] += np.add.reduceat(share, sets[at].node_starts)

    def refill(at: int) -> _Floats:
        """Takes the shares of a set from the loads. Returns new ones: (k,) bytes of each holder."""
        add(at, -shares[at])
        line = sets[at]
        total = np.array([float(line.byte_count.sum())])
        share = _filled(node_loads[nodes_of[at]], np.zeros(1, np.int64), total)  # over nodes, then over ranks
        is_divided = len(line.node_starts) == len(line.ranks)
        return share if is_divided else _filled(loads[line.ranks], line.node_starts, share)

    are_crossing = np.bincount(np.concatenate(nodes_of)).max() > 1
    for _ in range(_ROUNDS if are_crossing else 0):
        moved = 0.0
        for at in fewest_holders_first:
            share = refill(at)
            add(at, share)
            moved = max(moved, float(np.abs(share - shares[at]).max()))
            shares[at] = share
        if moved <= cell_bytes:
            break
    writers = [np.zeros(0, np.int64)] * len(sets)
    for at in fewest_holders_first:
        line, share = sets[at], refill(at)
        middle = np.cumsum(line.byte_count) - line.byte_count / 2
        cell = (np.floor(middle / cell_bytes) + 0.5) * cell_bytes
        writer = np.minimum(np.searchsorted(np.cumsum(share), cell, "right"), len(line.ranks) - 1)
        shares[at] = _sums(writer, line.byte_count, len(line.ranks))
        add(at, shares[at])
        writers[at] = line.order[writer]
    return writers


def _sums(at: _Ints, values: _Ints | _Floats, length: int) -> _Floats:
    """(length,) sum of the values of each index in `at`."""
    return np.bincount(at, weights=values, minlength=length).astype(np.float64)


def _filled(loads: _Floats, starts: _Ints, totals: _Floats) -> _Floats:
    """Water-filling: raises the lowest loads of each segment to one level.

    `starts` and `totals` are (s,): the first load of each segment, and the amount to divide in it. Returns
    the (k,) amount added to each load.

    >>> _filled(np.array([5.0, 1.0, 2.0, 0.0]), np.array([0, 3]), np.array([5.0, 2.0])).tolist()
    [0.0, 3.0, 2.0, 2.0]
    """
    counts = np.diff(starts, append=len(loads))
    segment = np.repeat(np.arange(len(starts)), counts)
    order = np.lexsort((loads, segment)) if len(starts) > 1 else np.argsort(loads, kind="stable")
    ascending = loads[order]
    before = np.cumsum(ascending) - ascending
    before -= before[starts][segment]
    within = np.arange(len(loads)) - starts[segment]
    # Water reaches a load after it has filled all lower ones of the segment.
    wet = ascending * within - before <= totals[segment]
    deepest = np.add.reduceat(wet, starts, dtype=np.int64)
    last = starts + deepest - 1
    levels = (totals + before[last] + ascending[last]) / deepest
    return np.maximum(levels[segment] - loads, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class SharedBoxes:
    """The distinct boxes that two ranks or more hold: m boxes, h replicas."""

    box: _Ints
    """(m,) row of the distinct box, ascending."""
    rows: _Ints
    """(h,) row of the replica, sorted by box, then by rank. A second copy on the same rank does not count."""
    starts: _Ints
    """(m + 1,) row pointers into `rows`."""
    set: _Ints
    """(m,) number of the box's set, from 0. Boxes of the same holders have the same number."""


def find_shared(group: _Ints, rank: _Ints, world_size: int) -> SharedBoxes:
    """Finds the boxes that several ranks hold, and groups them by their holders.

    `group` and `rank` are the distinct box and the rank of each replica.

    >>> shared = find_shared(np.array([0, 0, 1, 2, 2, 3, 3]), np.array([1, 0, 0, 0, 1, 1, 2]), 3)
    >>> shared.box.tolist(), shared.rows.tolist(), shared.starts.tolist(), shared.set.tolist()
    ([0, 2, 3], [1, 0, 3, 4, 5, 6], [0, 2, 4, 6], [0, 0, 1])
    """
    none = np.zeros(0, np.int64)
    boxes = int(group.max(initial=-1)) + 1
    if len(group) == boxes:  # each box has one replica
        return SharedBoxes(none, none, np.zeros(1, np.int64), none)
    holders = np.bincount(group, minlength=boxes)
    rows = np.flatnonzero(holders[group] > 1)
    key = group[rows] * world_size + rank[rows]
    order = stable_order(key)
    rows, key = rows[order], key[order]
    repeated = np.flatnonzero(key[1:] == key[:-1]) + 1
    if len(repeated):
        rows = np.delete(rows, repeated)
        holders = np.bincount(group[rows], minlength=boxes)
        rows = rows[holders[group[rows]] > 1]
    box = np.flatnonzero(holders > 1) if len(rows) else none
    starts = row_pointers(holders[box])
    return SharedBoxes(box, rows, starts, _sets(rank[rows], starts))


def _sets(ranks: _Ints, starts: _Ints) -> _Ints:
    """(m,) number of each box's set, in the order of the first box of each set.

    `ranks` are the holders, box after box, and `starts` the (m + 1,) row pointers into them.

    The function sums 64-bit hashes of each box's holders, and compares boxes of equal sums with the first one
    of that sum. A box with other holders but an equal sum gets its own number, which only adds a set.
    """
    if len(starts) == 1:
        return np.zeros(0, np.int64)
    sums = np.add.reduceat(_hashes(ranks), starts[:-1])
    _, first, number = np.unique(sums, return_index=True, return_inverse=True)
    first = first[number.reshape(-1)]
    counts, rows = np.diff(starts), np.arange(len(first))
    same = counts == counts[first]
    expected = consecutive(starts[first], counts)
    differs = ranks != ranks[np.minimum(expected, len(ranks) - 1)]
    same &= np.add.reduceat(differs, starts[:-1], dtype=np.int64) == 0
    first = np.where(same, first, rows)
    is_first = first == rows
    number_of: _Ints = np.cumsum(is_first) - 1
    return number_of[first]


def _hashes(ranks: _Ints) -> NDArray[np.uint64]:
    """A hash of each rank: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = (ranks + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
