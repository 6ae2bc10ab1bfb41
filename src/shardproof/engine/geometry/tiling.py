"""Proves that boxes cover tensors exactly once, or finds the fault. Finds distinct boxes.

Note: Why corners prove a tiling
--------------------------------
Let H(x) be 1 where no coordinate of x is negative, and 0 elsewhere. The indicator function of a box is the
sum of sign(c) H(x - c) over its 2**d corners c. A corner takes the low or the high (exclusive) border along
each dimension; its sign is -1 for an odd number of high ones. Add the corners of all boxes of a tensor, and
subtract those of the tensor itself. Cancel opposite signs at equal points. Let p be the lexicographically
smallest point left over. No other point left over is at most p in every coordinate. So at p only the terms at
p count: the number of boxes that contain p, less 1, is the sum of the signs left at p. Therefore

- the boxes cover the tensor exactly once if and only if no point is left over: n 2**d log n for n boxes;
- otherwise p is a witness: either no box contains it (a gap), or several do (an overlap).

The comparison adds up no signs. It moves each corner that is subtracted to the other side. The left side has
the boxes' even corners and the tensor's odd ones, the right side the others. Both sides have 2**(d-1) points
for each box and tensor. So in the sorted sides each tensor's points have the same positions, and p is the
smaller of the first two points that differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.geometry.boxes import INT64_MAX, Boxes, Int64s, stable_order

_MAX_CORNERS = 1 << 27
"""Maximum number of corners in one comparison, 1 GiB. Above it, `_left_over` divides the tensors. A single
tensor above it (a few boxes of many dimensions) is an error."""
_MAX_LARGE_CORNERS = 1 << 22
"""The same limit if int64 cannot count the points, so that each corner is a Python integer."""


@dataclass(frozen=True, slots=True)
class TilingFault:
    """A region where the boxes of a tensor do not cover it exactly once."""

    tensor: int
    """Row of the tensor."""
    kind: Literal["gap", "overlap", "out of bounds"]
    offsets: tuple[int, ...]
    """Offsets of the region: no box covers it, several boxes share it, or it is out of bounds."""
    sizes: tuple[int, ...]
    """Sizes of the region."""
    boxes: tuple[int, ...]
    """Rows of the boxes at fault, ascending; none for a gap."""


def tiling_faults(shapes: Int64s, tensor: Int64s, boxes: Boxes) -> list[TilingFault]:
    """Proves that the boxes of each tensor cover it exactly once, or finds where they do not.

    Empty boxes are ignored, so a tensor without elements needs no boxes. A scalar needs exactly one. The time
    is in n 2**d log n (note "Why corners prove a tiling"), where d counts only dimensions along which some
    box does not span its tensor.

    Args:
        shapes: (t, d) int64, shapes of the tensors.
        tensor: (n,) int64, the row of `shapes` that each box belongs to, in any order.
        boxes: n boxes.

    Returns:
        At most one fault per tensor, sorted by tensor. An empty list is the proof.

    Raises:
        ValueError: the arguments have different sizes, or the boxes of one tensor have more than 2**27
            corners (2**22 if it has more points than int64 can count).

    >>> shapes = np.array([[4, 4], [2, 2]])
    >>> boxes = Boxes.of(((0, 0), (4, 2)), ((0, 2), (3, 2)), ((0, 0), (2, 2)))
    >>> tiling_faults(shapes, np.array([0, 0, 1]), boxes)
    [TilingFault(tensor=0, kind='gap', offsets=(3, 2), sizes=(1, 2), boxes=())]
    """
    _check_arguments(shapes, tensor, boxes)
    rows = np.flatnonzero(boxes.nonempty())
    outside = rows[~boxes.inside(shapes[tensor])[rows]]
    wrong, where = np.unique(tensor[outside], return_index=True)
    faults = [
        TilingFault(t, "out of bounds", *boxes.pair(row), (row,))
        for t, row in zip(wrong.tolist(), outside[where].tolist(), strict=True)
    ]

    proved = np.all(shapes > 0, axis=1)
    proved[wrong] = False
    tensors = np.flatnonzero(proved)
    if len(rows) == len(boxes) and proved.all():
        points = _left_over(shapes, tensor, boxes)
    else:
        number = np.cumsum(proved) - 1  # row of each tensor in `tensors`
        rows = rows[proved[tensor[rows]]]
        points = _left_over(shapes[tensors], number[tensor[rows]], boxes.take(rows))
    if points:
        order = rows[np.argsort(tensor[rows], kind="stable")]
        begins = np.searchsorted(tensor[order], tensors[[t for t, _ in points]], "left")
        ends = np.searchsorted(tensor[order], tensors[[t for t, _ in points]], "right")
        for (t, point), begin, end in zip(points, begins, ends, strict=True):
            faults.append(_fault_at(point, int(tensors[t]), shapes[tensors[t]], order[begin:end], boxes))
    return sorted(faults, key=lambda fault: fault.tensor)


def _check_arguments(shapes: Int64s, tensor: Int64s, boxes: Boxes) -> None:
    if shapes.ndim != 2 or shapes.shape[1] != boxes.ndim:
        raise ValueError(
            f"boxes of {boxes.ndim} dimensions need shapes of (tensors, {boxes.ndim}), found {shapes.shape}"
        )
    if tensor.shape != (len(boxes),):
        raise ValueError(f"{len(boxes)} boxes need as many tensor rows, found shape {tensor.shape}")
    if len(tensor) and not 0 <= tensor.min() <= tensor.max() < len(shapes):
        raise ValueError(
            f"boxes refer to tensor rows {tensor.min()} to {tensor.max()} of {len(shapes)} tensors"
        )


def _left_over(shapes: Int64s, tensor: Int64s, boxes: Boxes) -> list[tuple[int, Int64s]]:
    """For each tensor that is not tiled, its row and the smallest point left over.

    No box and no tensor is empty, and every box lies within its tensor.
    """
    # A dimension that every box spans adds nothing to the proof. If there is no other, all boxes equal their
    # tensor (scalars too), and the code below treats each as a box of one element in a line of one element.
    split = [k for k in range(boxes.ndim) if (boxes.sizes[:, k] != shapes[tensor, k]).any()]
    lengths = shapes[:, split] if split else np.ones((len(shapes), 1), np.int64)

    # A corner is the number of its point among all points of all tensors. So it sorts by tensor, then
    # lexicographically. If int64 cannot count the points, the corners are Python integers. The test uses
    # floating point, with a margin larger than its error.
    fits = bool((lengths + 1.0).prod(axis=1).sum() < 2.0**62)
    corners = (len(boxes) + len(shapes)) << lengths.shape[1]
    if corners > (_MAX_CORNERS if fits else _MAX_LARGE_CORNERS):
        return _left_over_in_parts(shapes, tensor, boxes)
    dtype: Any = np.int64 if fits else object
    bases = np.append(np.zeros(1, dtype), (lengths.astype(dtype) + 1).prod(axis=1).cumsum())
    strides = np.ones(lengths.shape, dtype)
    for k in reversed(range(lengths.shape[1] - 1)):
        strides[:, k] = strides[:, k + 1] * (lengths[:, k + 1].astype(dtype) + 1)

    first = bases[tensor]
    spans = [] if split else [np.ones(len(boxes), dtype)]
    for k, axis in enumerate(split):
        first += boxes.offsets[:, axis] * strides[tensor, k]
        spans.append(boxes.sizes[:, axis] * strides[tensor, k])
    left, right = _corners(first, spans)
    tensors_even, tensors_odd = _corners(bases[:-1], list((lengths * strides).T))
    left, right = np.concatenate([left, tensors_odd]), np.concatenate([right, tensors_even])
    left.sort()
    right.sort()

    differ = np.flatnonzero(left != right)
    witnesses = np.minimum(left[differ], right[differ])
    found, firsts = np.unique(np.searchsorted(bases, witnesses, "right") - 1, return_index=True)
    points = []
    for t, witness in zip(found.tolist(), witnesses[firsts], strict=True):
        point = np.zeros(boxes.ndim, np.int64)
        rest = witness - bases[t]
        for k, axis in enumerate(split):
            point[axis], rest = divmod(rest, strides[t, k])
        points.append((t, point))
    return points


def _left_over_in_parts(shapes: Int64s, tensor: Int64s, boxes: Boxes) -> list[tuple[int, Int64s]]:
    """The result of `_left_over`, computed for each half of the tensors."""
    half = len(shapes) // 2
    if half == 0:
        raise ValueError(
            f"{len(boxes)} boxes of one tensor of shape {shapes[0].tolist()} have too many corners to check"
        )
    low, high = tensor < half, tensor >= half
    points = _left_over(shapes[:half], tensor[low], boxes.take(low))
    more = _left_over(shapes[half:], tensor[high] - half, boxes.take(high))
    return points + [(half + t, point) for t, point in more]


def _corners(first: NDArray[Any], spans: list[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Corners with an even and with an odd number of high borders.

    `first` is the (n,) lowest corner of each box. For each dimension, `spans` has the (n,) distance from the
    low border to the high one.

    >>> even, odd = _corners(np.array([0]), [np.array([10]), np.array([1])])
    >>> even.tolist(), odd.tolist()
    ([0, 11], [10, 1])
    """
    even, odd = first[None], first[None][:0]
    for span in spans:
        even, odd = np.concatenate([even, odd + span]), np.concatenate([odd, even + span])
    return even.ravel(), odd.ravel()


def _fault_at(point: Int64s, tensor: int, shape: Int64s, rows: Int64s, boxes: Boxes) -> TilingFault:
    """The fault at a point that the boxes of these rows, all of one tensor, do not cover exactly once."""
    own = boxes.take(rows)
    holds = ((own.offsets <= point) & (point < own.ends)).all(axis=1)
    if holds.any():
        low, high = own.offsets[holds].max(axis=0), own.ends[holds].min(axis=0)
        kind: Literal["gap", "overlap"] = "overlap"
    else:
        # The gap grows along one dimension after the other up to the nearest box in its way.
        low, high = point, point + 1
        kind = "gap"
        for k in reversed(range(len(shape))):
            in_the_way = (own.offsets < high) & (low < own.ends)
            in_the_way[:, k] = own.offsets[:, k] > point[k]
            borders = own.offsets[in_the_way.all(axis=1), k]
            high[k] = borders.min(initial=shape[k])
    return TilingFault(
        tensor, kind, tuple(low.tolist()), tuple((high - low).tolist()), tuple(rows[holds].tolist())
    )


def deduplicate(tensor: Int64s, boxes: Boxes) -> tuple[Int64s, Int64s]:
    """Finds the distinct boxes of many tensors, sorted by tensor, then offsets, then sizes.

    Args:
        tensor: (n,) int64, the tensor that each box belongs to.
        boxes: n boxes.

    Returns:
        (m,) first row of each distinct (tensor, box); (n,) for each row the position of its distinct box.

    >>> rows, inverse = deduplicate(np.array([1, 0, 1]), Boxes.of(((0,), (4,)), ((0,), (4,)), ((0,), (4,))))
    >>> rows.tolist(), inverse.tolist()
    ([1, 0], [1, 0, 1])
    """
    n = len(boxes)
    if tensor.shape != (n,):
        raise ValueError(f"{n} boxes need as many tensor rows, found shape {tensor.shape}")
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
    """Packs columns into as few int64 keys as their ranges allow, in the same lexicographic order.

    >>> _packed([np.array([5, 6]), np.array([-1, 1])])[0].tolist()
    [0, 5]
    """
    keys: list[Int64s] = []
    room = 0  # distinct values of the next column that fit into the last key
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
