"""Maps a local index space into a global one by translating boxes, and splits axes into factors.

Ranges of a tensor's row-major elements are converted to boxes, and boxes to ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shardproof.engine.geometry.boxes import (
    INT64_MAX,
    Boxes,
    Int64s,
    intersect,
    overlapping_pairs,
    row_major_strides,
)


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


@dataclass(frozen=True, slots=True, eq=False)
class IndexMap:
    """The position of a local array's elements in a global array: each local box is translated.

    Local elements outside all boxes are padding and have no position. No element may be in two boxes.

    Args:
        local_shape: shape of the local array.
        global_shape: shape of the global array, with the same number of dimensions.
        local: n boxes of the local array.
        offsets: (n, d) int64, global offsets of each local box.

    Raises:
        ValueError: a box does not lie within its array.

    Rank 1 of 2 holds rows 2 and 3 of a gate and of an up projection, fused to one weight of 8 rows:

    >>> fused = IndexMap((4,), (8,), Boxes.of(((0,), (2,)), ((2,), (2,))), np.array([[2], [6]]))
    >>> fused.placed
    Boxes([2:4] [6:8])
    """

    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    local: Boxes
    offsets: Int64s

    def __post_init__(self) -> None:
        if not self.local.ndim == len(self.local_shape) == len(self.global_shape):
            raise ValueError(
                f"an index map needs one number of dimensions: local shape {self.local_shape}, global shape "
                f"{self.global_shape}, boxes of {self.local.ndim} dimensions"
            )
        for name, boxes, shape in (
            ("local", self.local, self.local_shape),
            ("global", self.placed, self.global_shape),
        ):
            outside = ~boxes.inside(shape)
            if outside.any():
                raise ValueError(f"{boxes.take(outside)} are not within the {name} shape {shape}")

    @staticmethod
    def whole(shape: Sequence[int]) -> IndexMap:
        """The identity of an array.

        >>> IndexMap.whole((2, 3)).placed
        Boxes([0:2, 0:3])
        """
        return IndexMap(tuple(shape), tuple(shape), Boxes.whole(shape), np.zeros((1, len(shape)), np.int64))

    @property
    def placed(self) -> Boxes:
        """The boxes in the global array."""
        return Boxes(self.offsets, self.local.sizes)


def compose(outer: IndexMap, inner: IndexMap) -> IndexMap:
    """Maps the local array of `inner` into the global array of `outer`.

    Args:
        outer: index map whose local array is the global array of `inner`.
        inner: index map. Its elements outside all boxes of `outer` are padding in the result.

    Raises:
        ValueError: the shapes of the array between the two maps differ.

    >>> fused = IndexMap((4,), (8,), Boxes.of(((0,), (2,)), ((2,), (2,))), np.array([[2], [6]]))
    >>> middle = IndexMap((2,), (4,), Boxes.whole((2,)), np.array([[1]]))
    >>> both = compose(fused, middle)
    >>> both.local, both.placed
    (Boxes([0:1] [1:2]), Boxes([3:4] [6:7]))
    """
    if inner.global_shape != outer.local_shape:
        raise ValueError(
            f"cannot compose index maps: the inner one maps into shape {inner.global_shape}, the outer one "
            f"maps from shape {outer.local_shape}"
        )
    i, o = overlapping_pairs(inner.placed, outer.local)
    between = intersect(inner.placed.take(i), outer.local.take(o))
    local = Boxes(between.offsets - inner.offsets[i] + inner.local.offsets[i], between.sizes)
    offsets = between.offsets - outer.local.offsets[o] + outer.offsets[o]
    return IndexMap(inner.local_shape, outer.global_shape, local, offsets)


def flat_shard(index_map: IndexMap, start: int, stop: int) -> tuple[Boxes, Int64s, Int64s]:
    """Describes a 1-D buffer that contains a range of the row-major elements of a local array.

    Args:
        index_map: map from the local array to the global one; `IndexMap.whole` if they are the same.
        start: first element of the local array in the buffer.
        stop: element after the last.

    Returns:
        k boxes of the global array; (k,) int64, the position in the buffer of each box's first element; and
        (k, d) int64, the strides of each box in the buffer, in elements.

    Raises:
        ValueError: the range does not lie within the local array.

    The local array is columns 4 to 8 of a (2, 8) weight. The buffer contains all but its first two elements:

    >>> columns = IndexMap((2, 4), (2, 8), Boxes.whole((2, 4)), np.array([[0, 4]]))
    >>> boxes, starts, strides = flat_shard(columns, 2, 8)
    >>> boxes, starts.tolist(), strides.tolist()
    (Boxes([0:1, 6:8] [1:2, 4:8]), [0, 2], [[4, 1], [4, 1]])
    """
    ranges, _ = flat_range_boxes(index_map.local_shape, start, stop)
    r, e = overlapping_pairs(ranges, index_map.local)
    local = intersect(ranges.take(r), index_map.local.take(e))
    strides = np.array(row_major_strides(index_map.local_shape), np.int64)
    boxes = Boxes(local.offsets - index_map.local.offsets[e] + index_map.offsets[e], local.sizes)
    return boxes, local.offsets @ strides - start, np.tile(strides, (len(boxes), 1))


def split_axes(boxes: Boxes, factors: Sequence[Sequence[int]]) -> tuple[Boxes, Int64s]:
    """Converts boxes to an array whose axes are split, for example an axis of 12 rows into 3 groups of 4.

    A box that does not consist of whole groups becomes several boxes.

    Args:
        boxes: boxes in the original axes.
        factors: for each axis the sizes of its factors, slowest first.

    Returns:
        The boxes in the split axes, and the row of the original box of each.

    >>> boxes, rows = split_axes(Boxes.of(((2, 0), (9, 2))), ((3, 4), (2,)))
    >>> boxes, rows.tolist()
    (Boxes([0:1, 2:4, 0:2] [1:2, 0:4, 0:2] [2:3, 0:3, 0:2]), [0, 0, 0])
    """
    source = np.arange(len(boxes))
    axis = 0
    for sizes in factors:
        for position in range(len(sizes) - 1):
            boxes, rows = _split(boxes, axis, prod(sizes[position + 1 :]))
            source = source[rows]
            axis += 1
        axis += 1
    return boxes, source


def _split(boxes: Boxes, axis: int, length: int) -> tuple[Boxes, Int64s]:
    """Splits one axis into rows. A box becomes the end of a row, whole rows, and the start of a row."""
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
    rows = [np.flatnonzero(exists & (sizes > 0)) for exists, _, _, _, sizes in parts]
    source = np.concatenate(rows)

    def column_of(position: int) -> Int64s:
        return np.concatenate([part[position][at] for part, at in zip(parts, rows, strict=True)])

    offsets = np.insert(boxes.offsets[source], axis, column_of(1), axis=1)
    sizes = np.insert(boxes.sizes[source], axis, column_of(2), axis=1)
    offsets[:, axis + 1], sizes[:, axis + 1] = column_of(3), column_of(4)
    in_order = np.argsort(source, kind="stable")
    return Boxes(offsets[in_order], sizes[in_order]), source[in_order]


def axis_weights(factors: Sequence[Sequence[int]]) -> Int64s:
    """(split axes, axes) int64: an index in the split axes, times this matrix, is the original index.

    >>> (np.array([2, 1, 1]) @ axis_weights(((3, 4), (2,)))).tolist()
    [9, 1]
    """
    weights = np.zeros((sum(map(len, factors)), len(factors)), np.int64)
    row = 0
    for axis, sizes in enumerate(factors):
        for position in range(len(sizes)):
            weights[row, axis] = prod(sizes[position + 1 :])
            row += 1
    return weights
