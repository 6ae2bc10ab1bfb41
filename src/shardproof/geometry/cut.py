"""Cuts boxes into pieces of bounded size."""

from __future__ import annotations

import numpy as np

from shardproof.geometry.boxes import Boxes, Int64s, suffix_volumes

__all__ = ["cut"]


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
