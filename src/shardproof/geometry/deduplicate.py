"""Finding equal boxes: replicas are equal boxes by that fact alone."""

from __future__ import annotations

import numpy as np

from shardproof.geometry.boxes import INT64_MAX, Boxes, Int64s
from shardproof.geometry.ordering import stable_order

__all__ = ["deduplicate"]


def deduplicate(tensor: Int64s, boxes: Boxes) -> tuple[Int64s, Int64s]:
    """Finds the distinct boxes of many tensors, as ``np.unique`` would, sorted by tensor, offsets, sizes.

    Args:
        tensor: (n,) int64, the tensor that each box belongs to.
        boxes: n boxes.

    Returns:
        (m,) the first row of each distinct (tensor, box), and (n,) for each row which of these it equals.

    >>> rows, inverse = deduplicate(np.array([1, 0, 1]), Boxes.of(((0,), (4,)), ((0,), (4,)), ((0,), (4,))))
    >>> rows.tolist(), inverse.tolist()
    ([1, 0], [1, 0, 1])
    """
    n = len(boxes)
    if tensor.shape != (n,):
        raise ValueError(f"{n} boxes need as many tensors, found an array of shape {tensor.shape}")
    if n == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    keys = _packed([tensor, *boxes.offsets.T, *boxes.sizes.T])
    if len(keys) == 1 and bool((keys[0][1:] > keys[0][:-1]).all()):
        return np.arange(n), np.arange(n)
    order = stable_order(keys[0]) if len(keys) == 1 else np.lexsort(keys[::-1])
    begins = np.zeros(n, np.bool_)
    begins[0] = True
    for key in keys:
        in_order = key[order]
        begins[1:] |= in_order[1:] != in_order[:-1]
    inverse = np.empty(n, np.int64)
    inverse[order] = np.cumsum(begins) - 1
    return order[begins], inverse


def _packed(columns: list[Int64s]) -> list[Int64s]:
    """Columns of the same lexicographic order, packed into as few int64 keys as their ranges allow.

    >>> _packed([np.array([5, 6]), np.array([-1, 1])])[0].tolist()
    [0, 5]
    """
    keys: list[Int64s] = []
    room = 0  # distinct values of one more column that the last key can take
    for column in columns:
        low, high = int(column.min()), int(column.max())
        extent = high - low + 1
        if extent > INT64_MAX:
            keys.append(column)
            room = 1
        elif extent > room:
            keys.append(column - low)
            room = INT64_MAX // extent
        elif extent > 1:
            keys[-1] *= extent
            keys[-1] += column
            keys[-1] -= low
            room //= extent
    return keys
