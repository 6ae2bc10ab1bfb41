"""Index maps, compared with arrays of the global number of each local element."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.geometry import Boxes, IndexMap, compose, flat_shard
from tests.unit.engine.geometry import reference

NOWHERE = -1


def numbered(shape):
    return np.arange(prod(shape)).reshape(shape)


def mapping(one):
    """The global row-major number of each local element."""
    place = np.full(one.local_shape, NOWHERE)
    for row in range(len(one.local)):
        ours = reference.slices(one.local, row)
        assert (place[ours] == NOWHERE).all()
        place[ours] = numbered(one.global_shape)[reference.slices(one.placed, row)]
    return place


@st.composite
def index_maps(draw, local_shape, global_shape):
    """Tiles of the local array, some left out, each moved to anywhere in the global one where it fits."""
    tiles = draw(reference.tilings(local_shape, max_cuts=5))
    fits = (tiles.sizes <= np.array(global_shape, np.int64)).all(axis=1)
    tiles = tiles.take(
        fits & np.array(draw(st.lists(st.booleans(), min_size=len(tiles), max_size=len(tiles))))
    )
    offsets = [
        [draw(st.integers(0, length - size)) for length, size in zip(global_shape, sizes, strict=True)]
        for sizes in tiles.sizes.tolist()
    ]
    placed = np.array(offsets, np.int64).reshape(len(tiles), len(local_shape))
    return IndexMap(local_shape, global_shape, tiles, placed)


def same_ndim_shapes(count):
    sizes = st.integers(0, 5)
    return st.integers(0, 4).flatmap(lambda d: st.tuples(*[st.tuples(*[sizes] * d)] * count))


@given(st.data(), same_ndim_shapes(3))
def test_compose_follows_every_element(data, shapes):
    near, middle, far = shapes
    inner, outer = data.draw(index_maps(near, middle)), data.draw(index_maps(middle, far))
    through = np.append(mapping(outer).ravel(), NOWHERE)  # from nowhere to nowhere
    both = compose(outer, inner)
    assert (both.local_shape, both.global_shape) == (near, far)
    np.testing.assert_array_equal(mapping(both), through[mapping(inner)])


@given(st.data(), same_ndim_shapes(2))
def test_composing_with_the_whole_changes_nothing(data, shapes):
    one = data.draw(index_maps(*shapes))
    for same in (
        compose(one, IndexMap.whole(one.local_shape)),
        compose(IndexMap.whole(one.global_shape), one),
    ):
        np.testing.assert_array_equal(mapping(same), mapping(one))


@given(st.data(), same_ndim_shapes(2))
def test_flat_shard_finds_every_element_in_the_buffer(data, shapes):
    one = data.draw(index_maps(*shapes))
    total = prod(one.local_shape)
    start, stop = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    place = mapping(one).ravel()[start:stop]
    boxes, starts, strides = flat_shard(one, start, stop)
    assert strides.shape == boxes.sizes.shape
    found = np.full(stop - start, NOWHERE)
    buffer = np.arange(stop - start)
    for row in range(len(boxes)):
        in_bytes = [stride * buffer.itemsize for stride in strides[row].tolist()]
        view = np.ndarray(boxes.pair(row)[1], buffer.dtype, buffer, starts[row] * buffer.itemsize, in_bytes)
        assert (found[view] == NOWHERE).all()
        found[view] = numbered(one.global_shape)[reference.slices(boxes, row)]
    np.testing.assert_array_equal(found, place)


def test_flat_range_of_a_tensor_parallel_shard_of_a_fused_weight():
    # [gate; up] of 8 rows each, 3 columns; rank 1 of 2 holds rows 4 to 8 of both.
    fused = IndexMap(
        (8, 3), (16, 3), Boxes.of(((0, 0), (4, 3)), ((4, 0), (4, 3))), np.array([[4, 0], [12, 0]])
    )
    boxes, starts, strides = flat_shard(fused, 10, 17)
    assert [boxes.pair(row) for row in range(len(boxes))] == [
        ((7, 1), (1, 2)),
        ((12, 0), (1, 3)),
        ((13, 0), (1, 2)),
    ]
    assert starts.tolist() == [0, 2, 5]
    assert strides.tolist() == [[3, 1]] * 3


def test_empty_index_maps_of_very_large_shapes():
    shape = (0, 2**40, 2**40)
    boxes, starts, strides = flat_shard(IndexMap.whole(shape), 0, 0)
    assert (len(boxes), starts.shape, strides.shape) == (0, (0,), (0, 3))


def test_index_maps_that_do_not_fit_are_refused():
    whole = Boxes.whole((2,))
    with pytest.raises(ValueError, match="local shape"):
        IndexMap((1,), (4,), whole, np.array([[0]]))
    with pytest.raises(ValueError, match="global shape"):
        IndexMap((2,), (4,), whole, np.array([[3]]))
    with pytest.raises(ValueError, match="one number of dimensions"):
        IndexMap((2,), (4, 1), whole, np.array([[0]]))
    with pytest.raises(ValueError, match="one shape"):
        IndexMap((2,), (4,), whole, np.array([[0], [2]]))
    with pytest.raises(ValueError, match="cannot compose index maps"):
        compose(IndexMap.whole((3,)), IndexMap.whole((2,)))
