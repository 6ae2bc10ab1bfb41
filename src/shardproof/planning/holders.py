"""Boxes that several ranks hold, and which of them the same ranks hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.geometry import stable_order

__all__ = ["Shared", "find_shared"]

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The distinct boxes that two ranks or more hold: m boxes, h holdings."""

    box: _Ints
    """(m,) row of the distinct box, ascending."""
    rows: _Ints
    """(h,) row of the holding, by box, then by rank; one for each rank, should a rank hold a box twice."""
    starts: _Ints
    """(m + 1,) row pointers into `rows`."""
    set: _Ints
    """(m,) a number from 0 on, the same for boxes that the same ranks hold and for no others."""


def find_shared(group: _Ints, rank: _Ints, world_size: int) -> Shared:
    """Finds the boxes that several ranks hold.

    Args:
        group: (n,) for each holding, the row of its distinct box.
        rank: (n,) for each holding, the rank.
        world_size: number of ranks.

    >>> shared = find_shared(np.array([0, 0, 1, 2, 2, 3, 3]), np.array([1, 0, 0, 0, 1, 1, 2]), 3)
    >>> shared.box.tolist(), shared.rows.tolist(), shared.starts.tolist(), shared.set.tolist()
    ([0, 2, 3], [1, 0, 3, 4, 5, 6], [0, 2, 4, 6], [0, 0, 1])
    """
    none = np.zeros(0, np.int64)
    boxes = int(group.max(initial=-1)) + 1
    if len(group) == boxes:  # nothing is held twice
        return Shared(none, none, np.zeros(1, np.int64), none)
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
    starts = np.append(0, np.cumsum(holders[box]))
    return Shared(box, rows, starts, _sets(rank[rows], starts))


def _sets(ranks: _Ints, starts: _Ints) -> _Ints:
    """A number for each box, the same for boxes with the same holders, in the order of first boxes.

    Holders are compared by a sum of 64-bit hashes, and then with those of the first box of that sum. A box
    whose sum is another set's by chance, which is next to impossible, gets a number of its own.

    Args:
        ranks: (h,) the holders of one box after the other.
        starts: (m + 1,) where each box begins in it.
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
    """(m,) `first`, the box with the same holders as each; the box itself where that turns out wrong."""
    counts = np.diff(starts)
    same = counts == counts[first]
    within = np.arange(len(ranks)) - np.repeat(starts[:-1], counts)
    expected = np.repeat(starts[:-1][first], counts) + within
    differs = ranks != ranks[np.minimum(expected, len(ranks) - 1)]
    same &= np.add.reduceat(differs, starts[:-1], dtype=np.int64) == 0
    return np.where(same, first, np.arange(len(first)))
