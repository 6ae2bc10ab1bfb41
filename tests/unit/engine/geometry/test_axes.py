"""Boxes in split axes hold the same elements."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardproof.geometry import axis_weights, split_axes
from tests.unit.engine.geometry.reference import boxes_in, counts

factorings = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=3)


@given(factorings, st.data())
def test_split_boxes_hold_the_same_elements(factors: list[tuple[int, ...]], data: st.DataObject) -> None:
    shape = tuple(prod(axis) for axis in factors)
    boxes = data.draw(boxes_in(shape))
    split, rows = split_axes(boxes, factors)
    seen = tuple(size for axis in factors for size in axis)
    for row in range(len(boxes)):
        of_row = split.take(rows == row)
        expected = counts(shape, boxes.take(np.array([row]))).reshape(seen)
        np.testing.assert_array_equal(counts(seen, of_row), expected)
        assert len(of_row) <= prod(2 * len(axis) - 1 for axis in factors)


@given(factorings.filter(lambda factors: all(size for axis in factors for size in axis)))
def test_axis_weights_give_the_index_before_the_split(factors: list[tuple[int, ...]]) -> None:
    shape, seen = tuple(prod(axis) for axis in factors), tuple(size for axis in factors for size in axis)
    for index, within in zip(np.ndindex(*shape), np.ndindex(*seen), strict=True):
        assert (np.array(within, np.int64) @ axis_weights(factors)).tolist() == list(index)
