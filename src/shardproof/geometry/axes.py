"""Axes seen as several: a dimension of 12 as 3 rows of 4."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shardproof.geometry.boxes import Boxes, Int64s

__all__ = ["axis_weights", "split_axes"]


def split_axes(boxes: Boxes, factors: Sequence[Sequence[int]]) -> tuple[Boxes, Int64s]:
    """Boxes in the axes as seen. One that cuts rows of an axis seen as several becomes several.

    Args:
        boxes: in the axes themselves.
        factors: for each axis the sizes of those as which it is seen, slowest first.

    Returns:
        The boxes, and for each the row of the box that it is part of.

    >>> boxes, rows = split_axes(Boxes.of(((2, 0), (9, 2))), ((3, 4), (2,)))
    >>> boxes, rows.tolist()
    (Boxes([0:1, 2:4, 0:2] [1:2, 0:4, 0:2] [2:3, 0:3, 0:2]), [0, 0, 0])
    """
    source = np.arange(len(boxes))
    axis = 0
    for sizes in factors:
        for place in range(len(sizes) - 1):
            boxes, rows = _split(boxes, axis, prod(sizes[place + 1 :]))
            source = source[rows]
            axis += 1
        axis += 1
    return boxes, source


def _split(boxes: Boxes, axis: int, length: int) -> tuple[Boxes, Int64s]:
    """Boxes of which one axis is seen as rows: the end of a row, whole rows, and a row's beginning."""
    start, stop = boxes.offsets[:, axis], boxes.ends[:, axis]
    row = start // max(length, 1)
    column = start - row * length
    has_head = (column > 0) | (stop < (row + 1) * length)
    head = np.minimum(stop, (row + 1) * length) - start
    full, last = row + has_head, stop // max(length, 1)
    ones, zeros = np.ones_like(row), np.zeros_like(row)
    parts = (
        (has_head, row, ones, column, head),
        (last > full, full, last - full, zeros, zeros + length),
        (last >= full, last, ones, zeros, stop - last * length),
    )
    rows = [np.flatnonzero(there & (sizes > 0)) for there, _, _, _, sizes in parts]
    source = np.concatenate(rows)

    def column_of(place: int) -> Int64s:
        return np.concatenate([part[place][at] for part, at in zip(parts, rows, strict=True)])

    offsets = np.insert(boxes.offsets[source], axis, column_of(1), axis=1)
    sizes = np.insert(boxes.sizes[source], axis, column_of(2), axis=1)
    offsets[:, axis + 1], sizes[:, axis + 1] = column_of(3), column_of(4)
    in_order = np.argsort(source, kind="stable")
    return Boxes(offsets[in_order], sizes[in_order]), source[in_order]


def axis_weights(factors: Sequence[Sequence[int]]) -> Int64s:
    """(axes as seen, axes) int64: an index in the axes as seen, times this, is the index in the axes.

    >>> (np.array([2, 1, 1]) @ axis_weights(((3, 4), (2,)))).tolist()
    [9, 1]
    """
    weights = np.zeros((sum(map(len, factors)), len(factors)), np.int64)
    row = 0
    for axis, sizes in enumerate(factors):
        for place in range(len(sizes)):
            weights[row, axis] = prod(sizes[place + 1 :])
            row += 1
    return weights
