import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.geometry import Boxes, intersect, overlapping_pairs
from tests.unit.engine.geometry import reference


def common(shape, a, i, b, j):
    return sorted(set(reference.elements(shape, a, i)) & set(reference.elements(shape, b, j)))


@given(st.data())
def test_intersect_holds_the_common_elements(data):
    shape = data.draw(reference.shapes)
    a, b = data.draw(reference.boxes_in(shape)), data.draw(reference.boxes_in(shape))
    rows = slice(0, min(len(a), len(b)))
    both = intersect(a.take(rows), b.take(rows))
    for row in range(len(both)):
        expected = common(shape, a, row, b, row)
        assert both.volumes()[row] == len(expected)
        assert not expected or reference.elements(shape, both, row) == expected


def test_intersect_with_one_box_for_all():
    rows = Boxes.of(((0, 0), (1, 4)), ((1, 0), (1, 4)))
    column = Boxes.of(((0, 2), (4, 1)))
    assert intersect(rows, column).offsets.tolist() == [[0, 2], [1, 2]]
    assert intersect(column, rows).sizes.tolist() == [[1, 1], [1, 1]]


@given(st.data())
def test_overlapping_pairs_match_trying_all(data):
    shape = data.draw(reference.shapes)
    a, b = data.draw(reference.boxes_in(shape)), data.draw(reference.boxes_in(shape))
    found = list(zip(*(rows.tolist() for rows in overlapping_pairs(a, b)), strict=True))
    assert found == [(i, j) for i in range(len(a)) for j in range(len(b)) if common(shape, a, i, b, j)]


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "m"), [(400, 500), (3000, 20), (20, 3000), (5, 9000), (17, 1025)])
def test_overlapping_pairs_of_many_match_trying_all(ndim, n, m):
    rng = np.random.default_rng(ndim * n + m)
    longest = {1: 30, 2: 60, 3: 250, 4: 500}[ndim]
    a, b = (
        Boxes(rng.integers(-500, 500, (count, ndim)), rng.integers(0, longest, (count, ndim)))
        for count in (n, m)
    )
    meet = (a.offsets[:, None] < b.ends[None]) & (b.offsets[None] < a.ends[:, None])
    meet = meet.all(axis=2) & a.nonempty()[:, None] & b.nonempty()[None]
    found = overlapping_pairs(a, b)
    assert len(found[0]) > 0
    for rows, expected in zip(found, np.nonzero(meet), strict=True):
        np.testing.assert_array_equal(rows, expected)


def test_overlapping_pairs_of_equal_boxes_are_all_pairs():
    boxes = Boxes(np.zeros((300, 2), np.int64), np.ones((300, 2), np.int64))
    assert len(overlapping_pairs(boxes, boxes)[0]) == 300 * 300


def test_overlapping_pairs_near_the_largest_integers():
    far = 2**62
    a = Boxes(np.array([[far + 2 * i, -far] for i in range(200)]), np.full((200, 2), 2))
    b = Boxes(np.array([[far + 4 * i, -far] for i in range(200)]), np.full((200, 2), 4))
    i, j = overlapping_pairs(a, b)
    assert i.tolist() == list(range(200))
    assert j.tolist() == [row // 2 for row in range(200)]


def test_overlapping_pairs_of_nothing_and_of_scalars():
    for a, b in ((Boxes.empty(2), Boxes.whole((1, 1))), (Boxes.whole((1, 0)), Boxes.whole((1, 1)))):
        for pair in ((a, b), (b, a)):
            assert [rows.tolist() for rows in overlapping_pairs(*pair)] == [[], []]
    scalars = Boxes.of(((), ()), ((), ()))
    assert [rows.tolist() for rows in overlapping_pairs(scalars, scalars)] == [[0, 0, 1, 1], [0, 1, 0, 1]]
    with pytest.raises(ValueError, match="1 and of 2 dimensions"):
        overlapping_pairs(Boxes.empty(1), Boxes.empty(2))


def test_overlapping_pairs_of_grids_are_found_without_trying_all():
    side = 300
    corners = np.indices((side, side)).reshape(2, -1).T.astype(np.int64)
    a = Boxes(corners * 6, np.full_like(corners, 6))
    b = Boxes(corners[::-1] * 6 + 3, np.full_like(corners, 6))
    i, j = overlapping_pairs(a, b)  # 8.1 thousand million pairs to try
    assert len(i) == (2 * side - 1) ** 2
    assert (intersect(a.take(i), b.take(j)).volumes() == 9).all()
