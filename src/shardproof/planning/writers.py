"""Chooses the rank that writes each chunk, among the ranks that hold it.

Note: How bytes are balanced
----------------------------
Boxes that the same ranks hold make a *set*. The chunks of a set, in the order of tensors and boxes, form one
line of bytes. Each holder gets one contiguous share of the line, so that neighbours in a tensor are
neighbours in a file.

The lengths of the shares follow a water-filling rule, first for nodes, then for the ranks of each node: bytes
raise the least loaded to one common level. Bytes that one rank alone holds come first, then the sets, those
with the fewest holders first. Where sets cross (a node is in several), each set is filled again after the
others, for at most `_ROUNDS` rounds. Each round lowers the sum of the squared loads; its minimum is the
fairest division of divisible bytes. The result depends on the input alone.

Chunks are not divided. The line is cut into equal *cells*. A chunk belongs to the cell that holds the chunk's
middle, and goes to the rank whose share holds the middle of that cell. So small boxes of many holders fill
few files. A rank gets at most a chunk and a cell more than its share of a set, and the sets that follow take
this excess into account.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.geometry import consecutive, row_pointers, stable_order

__all__ = ["SharedBoxes", "choose_writers", "find_shared"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

_ROUNDS = 8
"""Rounds of filling for sets that cross, at most."""


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
    """Chooses one holder for each chunk, such that bytes are even over nodes, then over ranks.

    See the note "How bytes are balanced".

    Args:
        group: (n,) row of the distinct box of each holding.
        rank: (n,) rank of each holding.
        shared: result of `find_shared` for these holdings.
        chunk_group: (c,) row of the distinct box of each chunk, ascending.
        chunk_bytes: (c,) bytes of each chunk.
        nodes: (world size,) node number of each rank.
        cell_bytes: bytes of a cell. Chunks of one set and one cell have one writer.

    Returns:
        (c,) row of the chosen holding of each chunk, 0 to n - 1.

    >>> group, rank = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0])
    >>> chunk_group, chunk_bytes = np.array([0, 0, 1, 2]), np.array([4, 4, 6, 3])
    >>> from shardproof.planning.writers import find_shared
    >>> shared = find_shared(group, rank, 2)
    >>> rank[choose_writers(group, rank, shared, chunk_group, chunk_bytes, np.array([0, 1]))].tolist()
    [0, 1, 1, 0]
    """
    boxes = int(group.max(initial=-1)) + 1
    holding = np.empty(boxes, np.int64)
    holding[group] = np.arange(len(group))
    chosen = holding[chunk_group]
    at = np.full(boxes, -1, np.int64)  # row of each box among those that several ranks hold
    at[shared.box] = np.arange(len(shared.box))
    several = np.flatnonzero(at[chunk_group] >= 0)
    if len(several) == 0:
        return chosen
    alone = np.ones(len(chosen), np.bool_)
    alone[several] = False
    loads = _sums(rank[chosen[alone]], chunk_bytes[alone], len(nodes))
    holder = rank[shared.rows]
    lines = several[stable_order(shared.set[at[chunk_group[several]]])]
    begins = np.flatnonzero(np.diff(shared.set[at[chunk_group[lines]]], prepend=-1))
    sets = []
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(lines)], strict=True):
        chunks = lines[begin:end]
        first = at[chunk_group[chunks[0]]]
        ranks = holder[shared.starts[first] : shared.starts[first + 1]]
        sets.append(_Set.of(chunks, chunk_bytes, ranks, nodes))
    for line, place in zip(sets, _places(sets, loads, len(nodes), nodes, cell_bytes), strict=True):
        chosen[line.chunks] = shared.rows[shared.starts[at[chunk_group[line.chunks]]] + place]
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    """The chunks that the same ranks hold, in the order of the line, and those ranks by node."""

    chunks: _Ints
    """(c,) rows of the chunks, ascending."""
    byte_count: _Ints
    """(c,) bytes of each."""
    order: _Ints
    """(k,) position of each entry of `ranks` among the holders by rank."""
    ranks: _Ints
    """(k,) the holders, sorted by node, then by rank."""
    node_starts: _Ints
    """(j,) where the ranks of each node begin in `ranks`."""

    @staticmethod
    def of(chunks: _Ints, chunk_bytes: _Ints, ranks: _Ints, nodes: _Ints) -> _Set:
        order = np.argsort(nodes[ranks], kind="stable")
        starts = np.flatnonzero(np.diff(nodes[ranks[order]], prepend=nodes.min() - 1))
        return _Set(chunks, chunk_bytes[chunks], order, ranks[order], starts)


def _places(sets: list[_Set], loads: _Floats, world_size: int, nodes: _Ints, cell_bytes: int) -> list[_Ints]:
    """For each set: (c,) position of each chunk's writer among the holders by rank."""
    _, node_of = np.unique(nodes, return_inverse=True)
    node_loads = _sums(node_of, loads, world_size)
    held_by = [node_of[line.ranks[line.node_starts]] for line in sets]
    turns = sorted(range(len(sets)), key=lambda at: len(sets[at].ranks))
    shares = [np.zeros(len(line.ranks)) for line in sets]

    def add(at: int, share: _Floats) -> None:
        loads[sets[at].ranks] += share
        node_loads[held_by[at]] += np.add.reduceat(share, sets[at].node_starts)

    def pour(at: int) -> _Floats:
        add(at, -shares[at])
        return _divide(sets[at], loads, node_loads[held_by[at]])

    crossing = np.bincount(np.concatenate(held_by)).max() > 1
    for _ in range(_ROUNDS if crossing else 0):
        moved = 0.0
        for at in turns:
            share = pour(at)
            add(at, share)
            moved = max(moved, float(np.abs(share - shares[at]).max()))
            shares[at] = share
        if moved <= cell_bytes:
            break
    places = [np.zeros(0, np.int64)] * len(sets)
    for at in turns:
        line, share = sets[at], pour(at)
        middle = np.cumsum(line.byte_count) - line.byte_count / 2
        cell = (np.floor(middle / cell_bytes) + 0.5) * cell_bytes
        place = np.minimum(np.searchsorted(np.cumsum(share), cell, "right"), len(line.ranks) - 1)
        shares[at] = _sums(place, line.byte_count, len(line.ranks))
        add(at, shares[at])
        places[at] = line.order[place]
    return places


def _sums(at: _Ints, values: _Ints | _Floats, length: int) -> _Floats:
    """(length,) sum of the values of each index in `at`."""
    return np.bincount(at, weights=values, minlength=length).astype(np.float64)


def _divide(line: _Set, loads: _Floats, node_loads: _Floats) -> _Floats:
    """(k,) bytes of the share of each holder of a set: over nodes first, then over ranks."""
    total = np.array([float(line.byte_count.sum())])
    shares = _filled(node_loads, np.zeros(1, np.int64), total)
    if len(line.node_starts) == len(line.ranks):
        return shares
    return _filled(loads[line.ranks], line.node_starts, shares)


def _filled(loads: _Floats, starts: _Ints, totals: _Floats) -> _Floats:
    """Water-filling: how much each load gets, such that those of a segment that get any end at one level.

    Args:
        loads: (k,) loads before.
        starts: (s,) where each segment begins.
        totals: (s,) amount to divide in each segment.

    Returns:
        (k,) amount that each gets.

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
    # To reach a load, water has to fill all lower ones of its segment.
    wet = ascending * within - before <= totals[segment]
    deepest = np.add.reduceat(wet, starts, dtype=np.int64)
    last = starts + deepest - 1
    levels = (totals + before[last] + ascending[last]) / deepest
    return np.maximum(levels[segment] - loads, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class SharedBoxes:
    """The distinct boxes that two ranks or more hold: m boxes, h holdings."""

    box: _Ints
    """(m,) row of the distinct box, ascending."""
    rows: _Ints
    """(h,) row of the holding, sorted by box, then by rank. A rank that holds a box twice counts once."""
    starts: _Ints
    """(m + 1,) row pointers into `rows`."""
    set: _Ints
    """(m,) number of the box's set, from 0 on. Boxes have one number if the same ranks hold them."""


def find_shared(group: _Ints, rank: _Ints, world_size: int) -> SharedBoxes:
    """Finds the boxes that several ranks hold, and which of them have the same holders.

    Args:
        group: (n,) row of the distinct box of each holding.
        rank: (n,) rank of each holding.
        world_size: number of ranks.

    >>> shared = find_shared(np.array([0, 0, 1, 2, 2, 3, 3]), np.array([1, 0, 0, 0, 1, 1, 2]), 3)
    >>> shared.box.tolist(), shared.rows.tolist(), shared.starts.tolist(), shared.set.tolist()
    ([0, 2, 3], [1, 0, 3, 4, 5, 6], [0, 2, 4, 6], [0, 0, 1])
    """
    none = np.zeros(0, np.int64)
    boxes = int(group.max(initial=-1)) + 1
    if len(group) == boxes:  # nothing is held twice
        return SharedBoxes(none, none, np.zeros(1, np.int64), none)
    holders = np.bincount(group, minlength=boxes)
    rows = np.flatnonzero(holders[group] > 1)
    key = group[rows] * world_size + rank[rows]
    order = stable_order(key)
    rows, key = rows[order], key[order]
    again = np.flatnonzero(key[1:] == key[:-1]) + 1
    if len(again):
        rows = np.delete(rows, again)
        holders = np.bincount(group[rows], minlength=boxes)
        rows = rows[holders[group[rows]] > 1]
    box = np.flatnonzero(holders > 1) if len(rows) else none
    starts = row_pointers(holders[box])
    return SharedBoxes(box, rows, starts, _sets(rank[rows], starts))


def _sets(ranks: _Ints, starts: _Ints) -> _Ints:
    """(m,) number of each box's set, in the order of the first box of each set.

    Boxes whose sums of 64-bit hashes of their holders are equal are compared with the first box of that sum.
    A box with other holders but an equal sum gets a number of its own: correct, but a set more.

    Args:
        ranks: (h,) holders of one box after the other.
        starts: (m + 1,) row pointers into `ranks`.
    """
    if len(starts) == 1:
        return np.zeros(0, np.int64)
    sums = np.add.reduceat(_hashes(ranks), starts[:-1])
    _, first, number = np.unique(sums, return_index=True, return_inverse=True)
    first = _verified(ranks, starts, first[number.reshape(-1)])
    is_first = first == np.arange(len(first))
    number_of: _Ints = np.cumsum(is_first) - 1
    return number_of[first]


def _hashes(ranks: _Ints) -> NDArray[np.uint64]:
    """A hash of each rank: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = (ranks + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _verified(ranks: _Ints, starts: _Ints, first: _Ints) -> _Ints:
    """(m,) the entry of `first` where that box has the same holders; else the box itself."""
    counts = np.diff(starts)
    same = counts == counts[first]
    expected = consecutive(starts[first], counts)
    differs = ranks != ranks[np.minimum(expected, len(ranks) - 1)]
    same &= np.add.reduceat(differs, starts[:-1], dtype=np.int64) == 0
    return np.where(same, first, np.arange(len(first)))
