from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.geometry import Boxes, cut, flat_range_boxes, flat_range_of
from tests.unit.engine.geometry import reference


def ranges(shape):
    return st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape))).map(sorted)


@given(st.data())
def test_flat_range_boxes_are_the_range_in_order(data):
    shape = data.draw(reference.shapes)
    start, stop = data.draw(ranges(shape))
    boxes, starts = flat_range_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert boxes.nonempty().all()
    joined = [element for row in range(len(boxes)) for element in reference.elements(shape, boxes, row)]
    assert joined == list(range(start, stop))
    assert starts.tolist() == [reference.elements(shape, boxes, row)[0] - start for row in range(len(boxes))]


@given(st.data())
def test_flat_range_of_undoes_flat_range_boxes(data):
    shape = data.draw(reference.shapes)
    start, stop = data.draw(ranges(shape))
    boxes, _ = flat_range_boxes(shape, start, stop)
    pieces, _ = cut(boxes, data.draw(st.integers(1, 40)))
    shuffled = pieces.take(np.array(data.draw(st.permutations(range(len(pieces)))), np.int64))
    assert flat_range_of(shape, shuffled) == ((start, stop) if start < stop else (0, 0))


@given(st.data())
def test_flat_range_of_refuses_boxes_that_are_no_range(data):
    shape = data.draw(reference.filled_shapes)
    boxes = data.draw(reference.boxes_in(shape, max_boxes=3))
    held = sorted(element for row in range(len(boxes)) for element in reference.elements(shape, boxes, row))
    runs = all(
        numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for row in range(len(boxes))
        if (numbers := reference.elements(shape, boxes, row))
    )
    if runs and (not held or held == list(range(held[0], held[0] + len(held)))):
        expected = (held[0], held[-1] + 1) if held else (0, 0)
        assert flat_range_of(shape, boxes) == expected
    else:
        with pytest.raises(ValueError, match="row-major shape"):
            flat_range_of(shape, boxes)


def test_ranges_of_scalars_and_of_no_elements():
    assert flat_range_of((), Boxes.whole(())) == (0, 1)
    boxes, starts = flat_range_boxes((), 0, 1)
    assert (len(boxes), boxes.ndim, starts.tolist()) == (1, 0, [0])
    for shape in ((), (3, 0), (2**40, 2**40, 0)):
        boxes, starts = flat_range_boxes(shape, 0, 0)
        assert (len(boxes), boxes.ndim, starts.tolist()) == (0, len(shape), [])
        assert flat_range_of(shape, boxes) == (0, 0)


def test_ranges_of_more_elements_than_int64_counts():
    shape = (2**40, 2**40)
    start, stop = 2**79 - 3, 2**79 + 2**41 + 5
    boxes, starts = flat_range_boxes(shape, start, stop)
    assert boxes.offsets.tolist() == [[2**39 - 1, 2**40 - 3], [2**39, 0], [2**39 + 2, 0]]
    assert boxes.sizes.tolist() == [[1, 3], [2, 2**40], [1, 5]]
    assert starts.tolist() == [0, 3, 3 + 2**41]
    assert flat_range_of(shape, boxes) == (start, stop)
    assert flat_range_of(shape, Boxes.whole(shape)) == (0, 2**80)
    with pytest.raises(ValueError, match="do not follow"):
        flat_range_of(shape, boxes.take(np.array([0, 2])))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_ranges_outside_the_tensor_are_refused(start, stop):
    with pytest.raises(ValueError, match=r"not a range of the 6 elements of shape \(2, 3\)"):
        flat_range_boxes((2, 3), start, stop)


def test_boxes_outside_the_tensor_are_refused():
    with pytest.raises(ValueError, match="not within shape"):
        flat_range_of((4,), Boxes.of(((3,), (2,))))
    with pytest.raises(ValueError, match="dimensions"):
        flat_range_of((4,), Boxes.whole((2, 2)))
