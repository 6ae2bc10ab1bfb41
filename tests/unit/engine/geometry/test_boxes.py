import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.geometry.boxes import INT64_MAX, row_major_strides, suffix_volumes
from shardproof.geometry import Boxes
from tests.unit.engine.geometry import reference


@given(st.data())
def test_volumes_and_membership_match_counting(data):
    shape = data.draw(reference.shapes)
    boxes = data.draw(reference.boxes_in(shape))
    counted = [len(reference.elements(shape, boxes, row)) for row in range(len(boxes))]
    assert boxes.volumes().tolist() == counted
    assert boxes.nonempty().tolist() == [count > 0 for count in counted]
    assert boxes.inside(shape).all()
    assert (boxes.ends == boxes.offsets + boxes.sizes).all()


def test_scalars_hold_one_element():
    scalars = Boxes.of(((), ()), ((), ()))
    assert (len(scalars), scalars.ndim, scalars.volumes().tolist()) == (2, 0, [1, 1])
    assert scalars.inside(()).all()
    assert scalars.pair(1) == ((), ())
    assert repr(Boxes.whole(())) == "Boxes([])"


def test_repr_is_short():
    assert repr(Boxes.empty(2)) == "Boxes(none of 2 dimensions)"
    assert repr(Boxes.of(*[((i,), (1,)) for i in range(6)])) == "Boxes([0:1] [1:2] [2:3] [3:4] and 2 more)"


def test_take_by_rows_mask_and_slice():
    boxes = Boxes.of(((0,), (1,)), ((1,), (2,)), ((3,), (3,)))
    for rows in (np.array([1, 2]), np.array([False, True, True]), slice(1, None)):
        assert boxes.take(rows).offsets.tolist() == [[1], [3]]


def test_inside_does_not_overflow():
    boxes = Boxes.of(((INT64_MAX,), (INT64_MAX,)), ((-INT64_MAX,), (INT64_MAX,)), ((0,), (INT64_MAX,)))
    assert boxes.inside((INT64_MAX,)).tolist() == [False, False, True]
    assert boxes.inside((3,)).tolist() == [False, False, False]


def test_inside_accepts_one_shape_for_each_box():
    boxes = Boxes.of(((0, 0), (2, 2)), ((0, 0), (2, 2)))
    assert boxes.inside(np.array([[2, 2], [2, 1]])).tolist() == [True, False]


def test_volumes_that_do_not_fit_are_refused():
    assert Boxes.whole((2**40, 2**22)).volumes().tolist() == [2**62]
    assert Boxes.whole((2**40, 2**40, 0)).volumes().tolist() == [0]
    with pytest.raises(OverflowError, match="box 1 of sizes"):
        Boxes.of(((0, 0), (1, 1)), ((0, 0), (2**40, 2**40))).volumes()


def test_suffix_volumes_are_capped_at_the_largest_integer():
    volumes = suffix_volumes(np.array([[2**40, 2**40, 1], [0, 2**62, 4], [2**62, 0, 2]]))
    assert volumes.tolist() == [[INT64_MAX, 2**40, 1, 1], [0, INT64_MAX, 4, 1], [0, 0, 2, 1]]


def test_strides_without_elements_cannot_overflow():
    assert row_major_strides(()) == []
    assert row_major_strides((0, 2**40, 2**40)) == [1, 1, 1]


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        (np.zeros(2, np.int64), np.zeros(2, np.int64), "one shape"),
        (np.zeros((2, 1), np.int64), np.zeros((1, 1), np.int64), "one shape"),
        (np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int64), "int64 columns"),
        (np.zeros((1, 1), np.int64), np.zeros((1, 1)), "int64 columns"),
        (np.zeros((2, 2), np.int64), np.array([[1, 1], [2, -1]]), r"box 1 has a negative size: \[2, -1\]"),
    ],
)
def test_columns_that_are_no_boxes_are_refused(offsets, sizes, message):
    with pytest.raises(ValueError, match=message):
        Boxes(offsets, sizes)


def test_boxes_of_nothing_or_of_mixed_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"Boxes\.empty"):
        Boxes.of()
    with pytest.raises(ValueError, match="one length"):
        Boxes.of(((0,), (1,)), ((0, 0), (1, 1)))


def test_suffix_volumes_are_capped_behind_a_size_of_zero():
    sizes = np.array([[0, 2**40, 2**40], [0, 3, 4]])
    assert suffix_volumes(sizes).tolist() == [[0, INT64_MAX, 2**40, 1], [0, 12, 4, 1]]
