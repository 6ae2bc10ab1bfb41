import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.geometry import Boxes, TilingFault, tiling, tiling_faults
from shardproof.engine.geometry.boxes import INT64_MAX
from tests.unit.engine.geometry import reference


def faults_of(shape, boxes):
    return tiling_faults(np.array([shape], np.int64), np.zeros(len(boxes), np.int64), boxes)


def assert_faults_are_true(shapes, tensor, boxes):
    """Exactly the tensors that are not covered once have a fault: the first that counting finds."""
    faults = {fault.tensor: fault for fault in tiling_faults(np.array(shapes, np.int64), tensor, boxes)}
    assert list(faults) == sorted(faults)
    for t, shape in enumerate(shapes):
        rows = np.flatnonzero(tensor == t)
        own = boxes.take(rows)
        outside = rows[own.nonempty() & ~own.inside(shape)]
        if len(outside):
            row = int(outside[0])
            assert faults.get(t) == TilingFault(t, "out of bounds", *boxes.pair(row), (row,))
            continue
        held = reference.counts(shape, own.take(own.nonempty()))
        if (held == 1).all():
            assert t not in faults
        else:
            assert_fault_is_first(faults[t], shape, rows, own, held)


def assert_fault_is_first(fault, shape, rows, own, held):
    place = Boxes.of((fault.offsets, fault.sizes))
    assert place.nonempty().all()
    assert place.inside(shape).all()
    point = np.argwhere(held != 1)[0]
    if held[tuple(point)] == 0:
        assert (fault.kind, fault.boxes) == ("gap", ())
        assert fault.offsets == tuple(point)
        assert (held[reference.slices(place, 0)] == 0).all()
        for k in range(len(shape)):  # it ends only at a box or at the tensor's border
            longer = Boxes(place.offsets, place.sizes + (np.arange(len(shape)) == k))
            assert not longer.inside(shape).all() or held[reference.slices(longer, 0)].any()
    else:
        holds = ((own.offsets <= point) & (point < own.ends)).all(axis=1)
        assert (fault.kind, fault.boxes) == ("overlap", tuple(rows[holds]))
        assert ((place.offsets <= point) & (point < place.ends)).all()
        assert (held[reference.slices(place, 0)] >= len(fault.boxes)).all()
        assert (place.offsets == own.offsets[holds].max(axis=0)).all()
        assert (place.ends == own.ends[holds].min(axis=0)).all()


@given(st.data())
def test_a_tiling_has_no_faults(data):
    shape = data.draw(reference.shapes)
    assert faults_of(shape, data.draw(reference.tilings(shape))) == []


@given(st.data())
def test_faults_of_mutated_tilings_match_counting(data):
    ndim = data.draw(st.integers(0, 4))
    shapes = data.draw(st.lists(st.tuples(*[st.integers(0, 4)] * ndim), min_size=1, max_size=4))
    parts = [
        data.draw(reference.tilings(shape).flatmap(lambda b, s=shape: reference.mutated(s, b)))
        for shape in shapes
    ]
    boxes = Boxes.concatenate(parts)
    tensor = np.repeat(np.arange(len(shapes)), [len(part) for part in parts])
    order = np.array(data.draw(st.permutations(range(len(boxes)))), np.int64)
    assert_faults_are_true(shapes, tensor[order], boxes.take(order))


@given(st.data())
def test_faults_of_any_boxes_match_counting(data):
    shape = data.draw(reference.shapes)
    boxes = data.draw(reference.boxes_in(shape))
    assert_faults_are_true([shape], np.zeros(len(boxes), np.int64), boxes)


@given(st.data(), st.sampled_from([1, 2**20, 2**40]))
def test_very_large_tensors_have_the_faults_of_small_ones(data, scale):
    """At the largest scale, numbers of corners in two or more dimensions exceed int64."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tiles = data.draw(reference.tilings(tuple(shape)))
    boxes = data.draw(reference.mutated(tuple(shape), tiles))
    scaled = [
        TilingFault(
            fault.tensor,
            fault.kind,
            tuple(scale * offset for offset in fault.offsets),
            tuple(scale * size for size in fault.sizes),
            fault.boxes,
        )
        for fault in faults_of(shape, boxes)
    ]
    large = Boxes(boxes.offsets * scale, boxes.sizes * scale)
    assert faults_of([scale * size for size in shape], large) == scaled


def test_tensors_at_the_limit_of_int64():
    shape = (INT64_MAX, INT64_MAX)
    below = Boxes.of(((0, 0), (INT64_MAX - 1, INT64_MAX)))
    last = Boxes.of(((INT64_MAX - 1, 0), (1, INT64_MAX - 7)))
    assert faults_of(shape, Boxes.whole(shape)) == []
    assert faults_of(shape, Boxes.concatenate([last, below])) == [
        TilingFault(0, "gap", (INT64_MAX - 1, INT64_MAX - 7), (1, 7), ())
    ]
    hostile = Boxes.of(((INT64_MAX, INT64_MAX), (INT64_MAX, INT64_MAX)))
    assert faults_of(shape, hostile) == [
        TilingFault(0, "out of bounds", (INT64_MAX, INT64_MAX), (INT64_MAX, INT64_MAX), (0,))
    ]


def test_a_scalar_needs_exactly_one_box():
    assert faults_of((), Boxes.whole(())) == []
    assert faults_of((), Boxes.empty(0)) == [TilingFault(0, "gap", (), (), ())]
    assert faults_of((), Boxes.of(((), ()), ((), ()))) == [TilingFault(0, "overlap", (), (), (0, 1))]


def test_a_tensor_without_elements_needs_no_box():
    assert faults_of((3, 0), Boxes.empty(2)) == []
    assert faults_of((3, 0), Boxes.of(((0, 0), (3, 0)), ((9, 9), (0, 5)))) == []
    assert faults_of((3, 0), Boxes.of(((0, 0), (3, 1)))) == [
        TilingFault(0, "out of bounds", (0, 0), (3, 1), (0,))
    ]
    assert tiling_faults(np.zeros((0, 2), np.int64), np.zeros(0, np.int64), Boxes.empty(2)) == []


def test_a_gap_and_an_overlap_of_equal_volume_do_not_cancel():
    boxes = Boxes.of(((0, 0), (2, 2)), ((2, 2), (2, 2)), ((0, 2), (2, 2)), ((2, 2), (2, 2)))
    assert faults_of((4, 4), boxes) == [TilingFault(0, "gap", (2, 0), (2, 2), ())]


def test_replicas_are_an_overlap_that_names_them_all():
    assert faults_of((4,), Boxes.of(*[((0,), (4,))] * 3)) == [
        TilingFault(0, "overlap", (0,), (4,), (0, 1, 2))
    ]


def test_dimensions_of_one_element_cost_nothing():
    shape = (*[1] * 60, 3)
    boxes = Boxes.of(((0,) * 61, (*[1] * 60, 2)), ((*[0] * 60, 2), (1,) * 61))
    assert faults_of(shape, boxes) == []
    assert faults_of(shape, boxes.take(np.array([0])))[0].offsets == (*[0] * 60, 2)


def test_boxes_with_too_many_corners_are_refused():
    # 40 dimensions, each cut in two by one box in the way of the others: 2**40 corners a box.
    sizes = np.full((40, 40), 2) - np.eye(40, dtype=np.int64)
    with pytest.raises(ValueError, match="too many corners"):
        faults_of((2,) * 40, Boxes(np.zeros_like(sizes), sizes))


def test_tensors_checked_in_parts_have_the_same_faults(monkeypatch):
    rng = np.random.default_rng(1)
    tensor = np.repeat(np.arange(40), 16)
    boxes = Boxes.concatenate([grid(2**40, 4)] * 40)
    kept = rng.random(len(boxes)) > 0.03
    tensor, boxes = tensor[kept], boxes.take(kept)
    shapes = np.full((40, 2), 2**40)
    whole = tiling_faults(shapes, tensor, boxes)
    assert 0 < len(whole) < 40
    monkeypatch.setattr(tiling, "_MAX_LARGE_CORNERS", 200)
    assert tiling_faults(shapes, tensor, boxes) == whole
    shapes, boxes = shapes // 2**30, Boxes(boxes.offsets // 2**30, boxes.sizes // 2**30)
    monkeypatch.setattr(tiling, "_MAX_CORNERS", 100)
    assert [fault.tensor for fault in tiling_faults(shapes, tensor, boxes)] == [f.tensor for f in whole]


def test_arguments_that_do_not_fit_are_refused():
    shapes, boxes = np.array([[2]]), Boxes.whole((2,))
    with pytest.raises(ValueError, match="boxes of 1 dimensions need shapes"):
        tiling_faults(np.array([[2, 2]]), np.array([0]), boxes)
    with pytest.raises(ValueError, match="as many tensor rows"):
        tiling_faults(shapes, np.array([0, 0]), boxes)
    for stray in (-1, 1):
        with pytest.raises(ValueError, match=f"refer to tensor rows {stray} to {stray} of 1 tensors"):
            tiling_faults(shapes, np.array([stray]), boxes)


def grid(length, parts):
    corners = np.indices((parts, parts)).reshape(2, -1).T * (length // parts)
    return Boxes(corners.astype(np.int64), np.full(corners.shape, length // parts))


@pytest.mark.parametrize(("tensors", "parts"), [(1, 1000), (500, 64)])
def test_millions_of_boxes_are_proved_in_little_memory(tensors, parts):
    length = parts * 128
    tensor = np.repeat(np.arange(tensors), parts * parts)
    boxes = Boxes.concatenate([grid(length, parts)] * tensors)
    order = np.random.default_rng(0).permutation(len(boxes))
    tensor, boxes = tensor[order], boxes.take(order)
    shapes = np.full((tensors, 2), length)
    tracemalloc.start()
    assert tiling_faults(shapes, tensor, boxes) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 512 * 2**20
    found = tiling_faults(shapes, tensor[1:], boxes.take(slice(1, None)))
    assert found == [TilingFault(int(tensor[0]), "gap", *boxes.pair(0), ())]
