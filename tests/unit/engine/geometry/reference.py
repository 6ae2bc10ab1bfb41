"""A slow reference: boxes as dense arrays of counts, and strategies that draw boxes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from shardproof.geometry import Boxes

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
"""Shapes of 0 to 4 dimensions, with sizes of 0."""
filled_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
"""Shapes of 0 to 4 dimensions that hold elements."""


def slices(boxes: Boxes, row: int) -> tuple[slice, ...]:
    """One box as an index into an array of its tensor's shape."""
    return tuple(slice(o, o + s) for o, s in zip(*boxes.pair(row), strict=True))


def counts(shape: tuple[int, ...], boxes: Boxes) -> np.ndarray:
    """How many boxes hold each element."""
    held = np.zeros(shape, np.int64)
    for row in range(len(boxes)):
        held[slices(boxes, row)] += 1
    return held


def elements(shape: tuple[int, ...], boxes: Boxes, row: int) -> list[int]:
    """Row-major numbers of the elements of one box, in the box's own row-major order."""
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)[slices(boxes, row)].ravel().tolist()


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], max_boxes: int = 8) -> Boxes:
    """Any boxes within a shape, empty ones among them."""
    pairs = []
    for _ in range(draw(st.integers(0, max_boxes))):
        borders = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        pairs.append(([low for low, _ in borders], [high - low for low, high in borders]))
    return Boxes.of(*pairs) if pairs else Boxes.empty(len(shape))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], max_cuts: int = 8) -> Boxes:
    """Boxes that cover a shape exactly once: the whole, cut again and again, in any order."""
    pairs = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, max_cuts)) if shape else 0):
        offsets, sizes = pairs.pop(draw(st.integers(0, len(pairs) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[axis]))  # at a border: one side is empty
        low, high = list(sizes), list(sizes)
        low[axis], high[axis] = at, sizes[axis] - at
        moved = list(offsets)
        moved[axis] += at
        pairs += [(offsets, low), (moved, high)]
    return Boxes.of(*draw(st.permutations(pairs)))


@st.composite
def mutated(draw: st.DrawFn, shape: tuple[int, ...], boxes: Boxes) -> Boxes:
    """The boxes with some dropped, repeated, shifted or resized; they may leave the shape."""
    pairs = [boxes.pair(row) for row in range(len(boxes))]
    for _ in range(draw(st.integers(0, 2))):
        if not pairs:
            break
        row = draw(st.integers(0, len(pairs) - 1))
        offsets, sizes = (list(side) for side in pairs[row])
        kind = draw(st.sampled_from(["drop", "repeat", "shift", "resize"] if shape else ["drop", "repeat"]))
        if kind == "drop":
            del pairs[row]
        elif kind == "repeat":
            pairs.append(pairs[row])
        else:
            axis = draw(st.integers(0, len(shape) - 1))
            by = draw(st.sampled_from([-1, 1]))
            if kind == "shift":
                offsets[axis] += by
            else:
                sizes[axis] = max(0, sizes[axis] + by)
            pairs[row] = (tuple(offsets), tuple(sizes))
    return Boxes.of(*pairs) if pairs else Boxes.empty(len(shape))
