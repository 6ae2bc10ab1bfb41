import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.geometry import Boxes, cut
from tests.unit.engine.geometry import reference


def pieces_of(offsets, sizes, limit):
    """The definition, box by box: whole rows where one fits, else each row by itself."""
    if 0 in sizes:
        return []
    if not sizes:
        return [((), ())]
    row = int(np.prod(sizes[1:], dtype=np.int64))
    pieces = []
    if row <= limit:
        for low in range(0, sizes[0], limit // row):
            count = min(limit // row, sizes[0] - low)
            pieces.append(((offsets[0] + low, *offsets[1:]), (count, *sizes[1:])))
    else:
        for index in range(sizes[0]):
            for inner_offsets, inner_sizes in pieces_of(offsets[1:], sizes[1:], limit):
                pieces.append(((offsets[0] + index, *inner_offsets), (1, *inner_sizes)))
    return pieces


@given(st.data())
def test_cut_matches_its_definition(data):
    shape = data.draw(reference.shapes)
    boxes = data.draw(reference.boxes_in(shape))
    limits = np.array(
        data.draw(st.lists(st.integers(1, 40), min_size=len(boxes), max_size=len(boxes))), np.int64
    )
    pieces, parent = cut(boxes, limits)
    expected = [
        (piece, row) for row in range(len(boxes)) for piece in pieces_of(*boxes.pair(row), int(limits[row]))
    ]
    assert [(pieces.pair(k), int(parent[k])) for k in range(len(pieces))] == expected


@given(st.data())
def test_pieces_in_order_are_the_dense_elements_of_their_box(data):
    shape = data.draw(reference.filled_shapes)
    boxes = data.draw(reference.boxes_in(shape))
    limit = data.draw(st.integers(1, 40))
    pieces, parent = cut(boxes, limit)
    assert (pieces.volumes() <= limit).all()
    for row in range(len(boxes)):
        joined = [
            element
            for k in np.flatnonzero(parent == row)
            for element in reference.elements(shape, pieces, int(k))
        ]
        assert joined == reference.elements(shape, boxes, row)


def test_cut_of_scalars_and_of_nothing():
    pieces, parent = cut(Boxes.of(((), ()), ((), ())), 1)
    assert (len(pieces), parent.tolist()) == (2, [0, 1])
    pieces, parent = cut(Boxes.empty(2), 5)
    assert (len(pieces), pieces.ndim, parent.tolist()) == (0, 2, [])
    assert len(cut(Boxes.whole((2**40, 0, 2**40)), 1)[0]) == 0


def test_cut_of_very_long_boxes():
    pieces, _ = cut(Boxes.whole((2**60, 2)), 2**60)
    assert pieces.offsets.tolist() == [[0, 0], [2**59, 0]]
    pieces, _ = cut(Boxes.whole((2, 2**60)), 2**59 + 1)
    assert pieces.sizes.tolist() == [[1, 2**59 + 1], [1, 2**59 - 1]] * 2
    with pytest.raises(OverflowError, match="too many elements"):
        cut(Boxes.whole((2**40, 2**40)), 2**62)


@pytest.mark.parametrize("limit", [0, -1, np.array([3, 0])])
def test_cut_to_nothing_is_refused(limit):
    with pytest.raises(ValueError, match="at least 1 element"):
        cut(Boxes.of(((0,), (1,)), ((0,), (1,))), limit)
