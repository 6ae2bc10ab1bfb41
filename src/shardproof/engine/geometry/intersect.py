"""Intersects boxes row by row, and finds all pairs of boxes that share an element."""

from __future__ import annotations

import numpy as np

from shardproof.engine.geometry.boxes import Boxes, Int64s

_FANOUT = 4
"""Children of a node in the tree of bounding boxes."""
_FEW_BOXES = 16
_FEW_PAIRS = 1 << 14
"""Up to this many boxes on one side, or pairs, testing all pairs is faster than building a tree."""
_BATCH_PAIRS = 1 << 15
"""Pairs in one batch, which bounds the memory of a search."""


def intersect(a: Boxes, b: Boxes) -> Boxes:
    """Intersects boxes row by row. Boxes without a common element give a size of 0.

    Args:
        a: n boxes, or one for all of `b`.
        b: n boxes, or one for all of `a`.

    >>> intersect(Boxes.of(((0, 0), (4, 4)), ((0, 0), (2, 2))), Boxes.of(((2, 1), (4, 2))))
    Boxes([2:4, 1:3] [2:2, 1:2])
    """
    offsets = np.maximum(a.offsets, b.offsets)
    return Boxes(offsets, np.maximum(np.minimum(a.ends, b.ends) - offsets, 0))


def overlapping_pairs(a: Boxes, b: Boxes) -> tuple[Int64s, Int64s]:
    """Finds all pairs of a box of `a` and a box of `b` that share at least one element.

    The function packs the boxes of `b` into a tree of bounding boxes (sort-tile-recursive packing;
    Leutenegger, Lopez and Edgington, 1997). Batches of boxes of `a` descend the tree level by level. If each
    box overlaps few others, as in tilings, this takes n log n.

    To search several tensors at once, add a dimension to the boxes: the tensor's number, of size 1.

    Args:
        a: boxes of d dimensions.
        b: boxes of d dimensions.

    Returns:
        Rows of `a` and rows of `b`, each (k,) int64, sorted by row of `a`, then of `b`.

    >>> wanted = Boxes.of(((1,), (4,)))
    >>> stored = Boxes.of(((0,), (2,)), ((2,), (2,)), ((4,), (2,)), ((6,), (2,)))
    >>> [rows.tolist() for rows in overlapping_pairs(wanted, stored)]
    [[0, 0, 0], [0, 1, 2]]
    """
    if a.ndim != b.ndim:
        raise ValueError(f"boxes of {a.ndim} and of {b.ndim} dimensions cannot overlap")
    rows_a, rows_b = np.flatnonzero(a.nonempty()), np.flatnonzero(b.nonempty())
    starts, ends = a.offsets[rows_a], a.ends[rows_a]
    order, levels = _tree(b.take(rows_b), len(rows_a))
    rows_b = rows_b[order]
    found_a, found_b = [], []
    top = len(levels[0][0])
    step = max(1, _BATCH_PAIRS // max(top, 1))
    for begin in range(0, len(rows_a), step):
        batch = np.arange(begin, min(begin + step, len(rows_a)))
        query, node = np.repeat(batch, top), np.tile(np.arange(top), len(batch))
        for depth, (low, high) in enumerate(levels):
            if depth:
                query = np.repeat(query, _FANOUT)
                node = (node[:, None] * _FANOUT + np.arange(_FANOUT)).ravel()
                query, node = query[node < len(low)], node[node < len(low)]
            for k in range(a.ndim):
                meet = (starts[query, k] < high[node, k]) & (low[node, k] < ends[query, k])
                query, node = query[meet], node[meet]
        hit_a, hit_b = rows_a[query], rows_b[node]
        sorting = np.lexsort((hit_b, hit_a))
        found_a.append(hit_a[sorting])
        found_b.append(hit_b[sorting])
    if not found_a:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(found_a), np.concatenate(found_b)


def _tree(boxes: Boxes, queries: int) -> tuple[Int64s, list[tuple[Int64s, Int64s]]]:
    """Packs boxes into a tree. Returns their order, and each level's low and high corners, root first.

    Node ``i`` of a level bounds `_FANOUT` nodes of the next level, from ``i * _FANOUT`` on. The last level is
    the boxes themselves. For few boxes or queries it is the only level.
    """
    n = len(boxes)
    if min(n, queries) <= _FEW_BOXES or n * queries <= _FEW_PAIRS:
        return np.arange(n), [(boxes.offsets, boxes.ends)]
    order = _tiled_order(boxes)
    low, high = boxes.offsets[order], boxes.ends[order]
    levels = [(low, high)]
    while len(low) > _FANOUT:
        firsts = np.arange(0, len(low), _FANOUT)
        low, high = np.minimum.reduceat(low, firsts), np.maximum.reduceat(high, firsts)
        levels.append((low, high))
    return order, levels[::-1]


def _tiled_order(boxes: Boxes) -> Int64s:
    """Orders boxes such that neighbours in the order are neighbours in space.

    The function sorts the boxes by their centres along dimension 0 and splits them into slabs of equal count.
    It sorts and splits each slab along dimension 1, and so on.
    """
    n, d = len(boxes), boxes.ndim
    centres = boxes.offsets + boxes.sizes // 2
    slab = np.zeros(n, np.int64)  # slab of each box
    order = np.arange(n)
    for k in range(d):
        order = np.lexsort((centres[:, k], slab))
        # The remaining dimensions divide the boxes evenly, down to one parent of leaves.
        splits = max(1, round((n / _FANOUT / (slab.max(initial=0) + 1)) ** (1 / (d - k))))
        counts = np.bincount(slab)
        within = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
        slab[order] = slab[order] * splits + within * splits // np.repeat(counts, counts)
    return order
