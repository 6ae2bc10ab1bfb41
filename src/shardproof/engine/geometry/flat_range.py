"""Converts ranges of a tensor's row-major elements to boxes, and boxes to ranges."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shardproof.engine.geometry.boxes import INT64_MAX, Boxes, Int64s, row_major_strides


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Boxes, Int64s]:
    """Describes a range of a tensor's row-major elements by boxes.

    From the start of the range the boxes grow: part of a row, rows up to the end of a matrix, and so on. They
    grow up to the outermost dimension that the range crosses, and then shrink again. Each dimension but the
    outermost has at most two boxes, so n dimensions have at most 2 n - 1.

    Args:
        shape: shape of the tensor.
        start: first element.
        stop: element after the last.

    Returns:
        The boxes in row-major order, each contiguous in the range; and (k,) int64, the first element of each,
        counted from the start of the range. That is its position in a buffer that contains the range.

    Raises:
        ValueError: the range does not lie within the tensor.

    >>> flat_range_boxes((3, 4), 2, 11)
    (Boxes([0:1, 2:4] [1:2, 0:4] [2:3, 0:3]), array([0, 2, 6]))
    """
    pairs, starts = flat_range_pairs(shape, start, stop)
    boxes = Boxes.of(*pairs) if pairs else Boxes.empty(len(shape))
    return boxes, np.array(starts, np.int64)


def flat_range_pairs(
    shape: Sequence[int], start: int, stop: int
) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
    """The boxes of `flat_range_boxes` as offsets and sizes: faster for a few boxes.

    >>> flat_range_pairs((3, 4), 2, 9)
    ([([0, 2], [1, 2]), ([1, 0], [1, 4]), ([2, 0], [1, 1])], [0, 2, 6])
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(
            f"[{start}, {stop}) is not a range of the {prod(shape)} elements of shape {tuple(shape)}"
        )
    if start == stop:
        return [], []
    if not shape:
        return [([], [])], [0]
    strides = row_major_strides(shape)
    pairs: list[tuple[list[int], list[int]]] = []
    starts: list[int] = []
    position = start
    while position < stop:
        # The outermost dimension along which the rest of the range contains at least one whole index.
        axis = next(
            k for k, stride in enumerate(strides) if position % stride == 0 and position + stride <= stop
        )
        offsets = [position // stride % size for stride, size in zip(strides, shape, strict=True)]
        count = min((stop - position) // strides[axis], shape[axis] - offsets[axis])
        pairs.append((offsets, [1] * axis + [count] + list(shape[axis + 1 :])))
        starts.append(position - start)
        position += count * strides[axis]
    return pairs, starts


def flat_range_of(shape: Sequence[int], boxes: Boxes) -> tuple[int, int]:
    """Finds the range of row-major elements that boxes form together: the inverse of `flat_range_boxes`.

    Args:
        shape: shape of the tensor.
        boxes: boxes in any order. Empty boxes are ignored. If all are empty, the range is (0, 0).

    Returns:
        The first element, and the element after the last.

    Raises:
        ValueError: a box is not within the tensor, or the boxes are not one contiguous range of it.

    >>> flat_range_of((3, 4), Boxes.of(((0, 2), (1, 2)), ((1, 0), (2, 4))))
    (2, 12)
    """
    if boxes.ndim != len(shape):
        raise ValueError(f"boxes of {boxes.ndim} dimensions cannot lie in shape {tuple(shape)}")
    boxes = boxes.take(boxes.nonempty())
    outside = ~boxes.inside(shape)
    if outside.any():
        raise ValueError(f"{boxes.take(outside)} are not within shape {tuple(shape)}")
    if not len(boxes):
        return 0, 0
    # A tensor may have more elements than int64 can count; Python's integers have no limit.
    strides = np.array(row_major_strides(shape), np.int64 if prod(shape) <= INT64_MAX else object)
    firsts = (boxes.offsets * strides).sum(axis=1)
    stops = firsts + ((boxes.sizes - 1) * strides).sum(axis=1) + 1
    cuts_rows = stops - firsts != (boxes.sizes.astype(strides.dtype)).prod(axis=1)
    if cuts_rows.any():
        raise ValueError(f"{boxes.take(cuts_rows)} are not contiguous in row-major shape {tuple(shape)}")
    order = np.argsort(firsts)
    firsts, stops = firsts[order], stops[order]
    apart = np.flatnonzero(firsts[1:] != stops[:-1])
    if len(apart):
        neighbours = boxes.take(order[apart[0] : apart[0] + 2])
        raise ValueError(f"{neighbours} do not follow each other in row-major shape {tuple(shape)}")
    return int(firsts[0]), int(stops[-1])
