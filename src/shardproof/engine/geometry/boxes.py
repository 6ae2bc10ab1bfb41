"""Boxes as columns: many half-open intervals in an index space, how they are cut, and where they overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]

INT64_MAX = int(np.iinfo(np.int64).max)

_MAX_SHOWN = 4
"""Maximum number of boxes in a repr."""

_FANOUT = 4
"""Children of a node in the tree of bounding boxes."""

_FEW_BOXES = 16
_FEW_PAIRS = 1 << 14
"""Up to this many boxes on one side, or pairs, testing all pairs is faster than building a tree."""

_BATCH_PAIRS = 1 << 15
"""Pairs in one batch, which bounds the memory of a search."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Boxes:
    """``n`` boxes of ``d`` dimensions: box ``i`` is ``offsets[i] <= index < offsets[i] + sizes[i]``.

    A box with a size of 0 is empty: it contains no element. A box of no dimensions contains exactly one
    element, that of a scalar.

    Args:
        offsets: (n, d) int64, first index of each box, in elements.
        sizes: (n, d) int64, elements along each dimension, not negative.

    Raises:
        ValueError: the columns are not two (n, d) int64 arrays, or a size is negative.

    >>> boxes = Boxes.of(((0, 0), (2, 4)), ((2, 0), (1, 4)))
    >>> boxes
    Boxes([0:2, 0:4] [2:3, 0:4])
    >>> len(boxes), boxes.ndim, boxes.volumes().tolist(), boxes.ends.tolist()
    (2, 2, [8, 4], [[2, 4], [3, 4]])
    """

    offsets: Int64s
    sizes: Int64s

    def __post_init__(self) -> None:
        offsets, sizes = self.offsets, self.sizes
        if offsets.ndim != 2 or offsets.shape != sizes.shape:
            raise ValueError(
                f"boxes need offsets and sizes of one shape (n, d), found {offsets.shape} and {sizes.shape}"
            )
        if offsets.dtype != np.int64 or sizes.dtype != np.int64:
            raise ValueError(f"boxes need int64 columns, found {offsets.dtype} and {sizes.dtype}")
        if sizes.size and sizes.min() < 0:
            row = int(np.argmax((sizes < 0).any(axis=1)))
            raise ValueError(f"box {row} has a negative size: {sizes[row].tolist()}")

    @staticmethod
    def empty(ndim: int) -> Boxes:
        """Zero boxes of `ndim` dimensions.

        >>> len(Boxes.empty(3)), Boxes.empty(3).ndim
        (0, 3)
        """
        return Boxes(np.zeros((0, ndim), np.int64), np.zeros((0, ndim), np.int64))

    @staticmethod
    def whole(shape: Sequence[int]) -> Boxes:
        """One box that covers a tensor of this shape.

        >>> Boxes.whole((3, 4))
        Boxes([0:3, 0:4])
        """
        return Boxes.of(((0,) * len(shape), shape))

    @staticmethod
    def of(*pairs: tuple[Sequence[int], Sequence[int]]) -> Boxes:
        """Boxes from pairs of offsets and sizes. There is at least one pair, and all have one length.

        >>> Boxes.of(((1,), (2,)), ((5,), (0,)))
        Boxes([1:3] [5:5])
        """
        if not pairs:
            raise ValueError("Boxes.of needs at least one box to know the dimensions; use Boxes.empty(ndim)")
        if len({len(side) for pair in pairs for side in pair}) > 1:
            raise ValueError(f"boxes need offsets and sizes of one length, found {pairs}")
        columns = np.array(pairs, np.int64)
        return Boxes(columns[:, 0].copy(), columns[:, 1].copy())

    @staticmethod
    def concatenate(parts: Sequence[Boxes]) -> Boxes:
        """All boxes of the parts, in order. There is at least one part; all have the same dimensions.

        >>> Boxes.concatenate([Boxes.whole((2,)), Boxes.empty(1), Boxes.of(((2,), (3,)))])
        Boxes([0:2] [2:5])
        """
        return Boxes(
            np.concatenate([part.offsets for part in parts]), np.concatenate([part.sizes for part in parts])
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def __repr__(self) -> str:
        shown = zip(self.offsets[:_MAX_SHOWN].tolist(), self.sizes[:_MAX_SHOWN].tolist(), strict=True)
        texts = [
            "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True)) + "]"
            for offsets, sizes in shown
        ]
        if len(self) > _MAX_SHOWN:
            texts.append(f"and {len(self) - _MAX_SHOWN} more")
        return f"Boxes({' '.join(texts)})" if texts else f"Boxes(none of {self.ndim} dimensions)"

    @property
    def ndim(self) -> int:
        """Dimensions of each box."""
        return int(self.offsets.shape[1])

    @property
    def ends(self) -> Int64s:
        """(n, d) index after the last one of each box."""
        return self.offsets + self.sizes

    def volumes(self) -> Int64s:
        """(n,) number of elements of each box.

        Raises:
            OverflowError: a box has 2**63 - 1 elements or more.

        >>> Boxes.of(((0, 0), (2, 3)), ((0, 0), (0, 3))).volumes().tolist()
        [6, 0]
        """
        volumes = suffix_volumes(self.sizes)[:, 0]
        if len(volumes) and volumes.max() == INT64_MAX:
            row = int(volumes.argmax())
            raise OverflowError(
                f"box {row} of sizes {self.sizes[row].tolist()} has too many elements to count"
            )
        return volumes

    def nonempty(self) -> NDArray[np.bool_]:
        """(n,) True for each box that contains at least one element.

        >>> Boxes.of(((0,), (2,)), ((4,), (0,))).nonempty().tolist()
        [True, False]
        """
        nonempty: NDArray[np.bool_] = np.all(self.sizes > 0, axis=1)
        return nonempty

    def inside(self, shapes: Sequence[int] | Int64s) -> NDArray[np.bool_]:
        """(n,) True for each box that lies within a tensor of this shape, or box ``i`` within ``shapes[i]``.

        No sum can overflow, so columns from an untrusted file are allowed.

        >>> Boxes.of(((0,), (2,)), ((4,), (2,)), ((-1,), (1,))).inside((5,)).tolist()
        [True, False, False]
        """
        room = np.asarray(shapes, np.int64) - self.sizes
        inside: NDArray[np.bool_] = np.all((self.offsets >= 0) & (self.offsets <= room), axis=1)
        return inside

    def take(self, rows: Int64s | NDArray[np.bool_] | slice) -> Boxes:
        """The boxes of these rows: indices in any order, a mask, or a slice.

        >>> Boxes.of(((0,), (2,)), ((2,), (3,))).take(np.array([1, 1, 0]))
        Boxes([2:5] [2:5] [0:2])
        """
        return Boxes(self.offsets[rows], self.sizes[rows])

    def pair(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of one box, as tuples.

        >>> Boxes.of(((0, 2), (3, 4))).pair(0)
        ((0, 2), (3, 4))
        """
        return tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist())


def suffix_volumes(sizes: Int64s) -> Int64s:
    """(n, d + 1): column ``k`` is the product of ``sizes[:, k:]``, or `INT64_MAX` where that is larger.

    >>> suffix_volumes(np.array([[2, 3, 4]])).tolist()
    [[24, 12, 4, 1]]
    """
    n, d = sizes.shape
    volumes = np.ones((n, d + 1), np.int64)
    if n and prod(max(size, 1) for size in sizes.max(axis=0).tolist()) < INT64_MAX:  # every suffix fits
        for k in reversed(range(d)):
            np.multiply(sizes[:, k], volumes[:, k + 1], out=volumes[:, k])
        return volumes
    for k in reversed(range(d)):
        size, rest = sizes[:, k], volumes[:, k + 1]
        fits = rest <= INT64_MAX // np.maximum(size, 1)
        volumes[:, k] = np.where(fits, size * np.where(fits, rest, 0), INT64_MAX)
    return volumes


def row_major_strides(shape: Sequence[int]) -> list[int]:
    """Elements between neighbours along each dimension of a dense row-major array.

    The strides of an array without elements are 1, which cannot overflow.

    >>> row_major_strides((2, 3, 4))
    [12, 4, 1]
    """
    strides = [1] * len(shape)
    if 0 in shape:
        return strides
    for k in reversed(range(len(shape) - 1)):
        strides[k] = strides[k + 1] * shape[k + 1]
    return strides


def stable_order(keys: Int64s) -> Int64s:
    """The order that sorts `keys`, equal to ``np.argsort(keys, kind="stable")``.

    numpy sorts integers with vector instructions, but not their row numbers. So if a key and a row number fit
    into 63 bits, this function sorts both as one integer, which is several times faster.

    Args:
        keys: (n,) int64.

    >>> stable_order(np.array([7, -1, 7, 0])).tolist()
    [1, 3, 0, 2]
    """
    n = len(keys)
    if n == 0 or bool((keys[1:] >= keys[:-1]).all()):
        return np.arange(n)
    low, high = int(keys.min()), int(keys.max())
    bits = (n - 1).bit_length()
    if high - low > INT64_MAX >> bits:
        return np.argsort(keys, kind="stable")
    packed = keys - low
    packed <<= bits
    packed |= np.arange(n)
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def cut(boxes: Boxes, max_elements: int | Int64s) -> tuple[Boxes, Int64s]:
    """Cuts every box into pieces of at most `max_elements`, each contiguous in its box's row-major order.

    The function cuts a box along dimension 0 into blocks of as many whole rows as fit. If one row does not
    fit, it cuts each row along dimension 1 in the same way, and so on. Each piece of a box thus has one index
    along the first dimensions, a block of indices along the next, and all indices along the others.

    Args:
        boxes: n boxes.
        max_elements: limit for all boxes, or (n,) limits; at least 1.

    Returns:
        The pieces, and (m,) int64, the row of each piece's box. Pieces are in the order of the boxes and,
        within a box, in the row-major order of its elements. An empty box has no pieces.

    Raises:
        ValueError: a limit is below 1.
        OverflowError: a box has 2**63 - 1 elements or more.

    >>> pieces, parent = cut(Boxes.of(((0, 0), (3, 4)), ((9, 9), (1, 2))), 8)
    >>> pieces, parent.tolist()
    (Boxes([0:2, 0:4] [2:3, 0:4] [9:10, 9:11]), [0, 0, 1])
    >>> cut(Boxes.whole((2, 5)), 3)[0]
    Boxes([0:1, 0:3] [0:1, 3:5] [1:2, 0:3] [1:2, 3:5])
    """
    n, d = len(boxes), boxes.ndim
    limits = np.broadcast_to(np.asarray(max_elements, np.int64), (n,))
    if n and limits.min() < 1:
        raise ValueError(f"pieces need room for at least 1 element, found a limit of {limits.min()}")
    volumes, every = boxes.volumes(), np.arange(n)
    if ((volumes > 0) & (volumes <= limits)).all():
        return boxes, every

    # For each box: the dimension that is cut into blocks, indices per block, blocks, pieces.
    row_volumes = suffix_volumes(boxes.sizes)[:, 1:]
    axis = np.argmax(row_volumes <= limits[:, None], axis=1)
    along = boxes.sizes[every, axis]
    block = np.clip(limits // np.maximum(row_volumes[every, axis], 1), 1, np.maximum(along, 1))
    blocks = -(-along // block)
    before = np.where(np.arange(d) < axis[:, None], boxes.sizes, 1)
    pieces = np.where(volumes > 0, blocks * before.prod(axis=1), 0)

    # For each piece: its box, and its start in the box, computed from its number among the box's pieces.
    parent = np.repeat(every, pieces)
    number = np.arange(len(parent)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    number, position = np.divmod(number, blocks[parent])
    axis, block = axis[parent], block[parent]
    position *= block
    offsets, sizes = boxes.offsets[parent], boxes.sizes[parent]
    for k in reversed(range(d)):
        inside = axis == k
        offsets[:, k] += np.where(inside, position, 0)
        sizes[:, k] = np.where(inside, np.minimum(block, sizes[:, k] - position), sizes[:, k])
        outside = np.flatnonzero(axis > k)
        if len(outside):
            number[outside], index = np.divmod(number[outside], sizes[outside, k])
            offsets[outside, k] += index
            sizes[outside, k] = 1
    return Boxes(offsets, sizes), parent


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
