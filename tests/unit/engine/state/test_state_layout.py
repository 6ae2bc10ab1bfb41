"""Layout against a slow reference that places each element of a local tensor by itself."""

from __future__ import annotations

import copy
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardproof.engine.state import LOCAL
from shardproof.engine.state.layout import Layout, declare, declared, local_layout
from shardproof.engine.state.local_shards import LocalShards
from shardproof.engine.state.tensors import empty_like_layout
from shardproof.errors import StructureError
from shardproof.geometry import Boxes, IndexMap
from shardproof.state import collect
from tests.unit.engine.state.test_state_dtensor import as_rank

Segment = tuple[int, int, int]
"""Local start, global start, size along one axis."""
NOWHERE = -1


@st.composite
def axis_of(draw: st.DrawFn, target: int) -> tuple[int, list[Segment]]:
    """A local axis in a global one of `target` elements: segments in any order, some left out, padded."""
    cuts = sorted({0, target, *draw(st.lists(st.integers(0, target), max_size=2))})
    spans = draw(st.permutations([(a, b - a) for a, b in pairwise(cuts)]))
    local, segments = 0, []
    for start, size in spans:
        if draw(st.booleans()) or not segments:
            local += draw(st.integers(0, 1))
            segments.append((local, start, size))
            local += size
    return local + draw(st.integers(0, 1)), segments


def index_map_of(axes: list[tuple[int, list[Segment]]], target: tuple[int, ...]) -> IndexMap:
    picked = list(product(*(segments for _, segments in axes)))
    n, d = len(picked), len(target)
    columns = np.array(picked, np.int64).reshape(n, d, 3)
    return IndexMap(
        tuple(size for size, _ in axes),
        target,
        Boxes(columns[:, :, 0].copy(), columns[:, :, 2].copy()),
        columns[:, :, 1].copy(),
    )


def place_along(axis: tuple[int, list[Segment]], index: int) -> int:
    return next((g + index - at for at, g, size in axis[1] if at <= index < at + size), NOWHERE)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, np.ndarray]:
    """A layout, and for each element of the local tensor its row-major number in the model's tensor."""
    grouped = draw(st.lists(st.integers(1, 2), min_size=0, max_size=3))
    lead = draw(st.integers(0, 1))
    seen_target = tuple(draw(st.integers(1, 4)) for _ in range(lead + sum(grouped)))
    seen = [
        (1, [(0, draw(st.integers(0, size - 1)), 1)]) if row < lead else draw(axis_of(size))
        for row, size in enumerate(seen_target)
    ]
    order = draw(st.permutations(range(len(seen))))
    factors, row = [], lead
    for count in grouped:
        factors.append(tuple(size for size, _ in seen[row : row + count]))
        row += count
    layout = Layout.of(index_map_of(seen, seen_target), factors=factors, order=order, lead=lead)
    shape = tuple(seen_target[axis] for axis in order)
    numbers = np.arange(prod(shape)).reshape(shape)
    truth = np.full([prod(axis) for axis in factors], NOWHERE)
    for index in np.ndindex(*truth.shape):
        within = [0] * lead
        for position, sizes in zip(index, factors, strict=True):
            digits = []
            for size in reversed(sizes):
                digits.insert(0, position % size)
                position //= size
            within += digits
        placed = [place_along(axis, at) for axis, at in zip(seen, within, strict=True)]
        if NOWHERE not in placed:
            truth[index] = numbers[tuple(placed[axis] for axis in order)]
    for _ in range(draw(st.integers(0, 2))):
        inner = [draw(axis_of(size)) if size else (0, []) for size in truth.shape]
        layout = layout.part(index_map_of(inner, truth.shape))
        part = np.full([size for size, _ in inner], NOWHERE)
        for index in np.ndindex(*part.shape):
            placed = [place_along(axis, at) for axis, at in zip(inner, index, strict=True)]
            if NOWHERE not in placed:
                part[index] = truth[tuple(placed)]
        truth = part
    assert layout.local_shape == truth.shape and layout.shape == shape
    return layout, truth


def filled(sharded: LocalShards) -> np.ndarray:
    """The model's tensor, filled from the pieces; asserts that no element is filled twice."""
    whole = torch.full(sharded.shape, NOWHERE)
    for view, offsets in sharded.pieces:
        box = tuple(slice(o, o + s) for o, s in zip(offsets, view.shape, strict=True))
        assert (whole[box] == NOWHERE).all()
        whole[box] = view
    return whole.numpy()


def expected(shape: tuple[int, ...], truth: np.ndarray, start: int, stop: int) -> np.ndarray:
    whole = np.full(prod(shape), NOWHERE)
    for number, place in enumerate(truth.ravel().tolist()):
        if place != NOWHERE and start <= number < stop:
            whole[place] = number
    return whole.reshape(shape)


@given(layouts(), st.booleans())
def test_pieces_of_a_local_tensor_are_where_its_elements_are(
    drawn: tuple[Layout, np.ndarray], transposed: bool
) -> None:
    layout, truth = drawn
    local = torch.arange(truth.size).reshape(truth.shape)
    if transposed:  # the same values in another order of memory, not at the storage's beginning
        memory = torch.zeros(truth.size + 3, dtype=torch.int64)[3:].view(truth.shape[::-1])
        local = memory.permute(list(reversed(range(truth.ndim)))).copy_(local)
    sharded = layout.pieces(local)
    np.testing.assert_array_equal(filled(sharded), expected(layout.shape, truth, 0, truth.size))
    for view, _ in sharded.pieces:
        view.fill_(-7)
    np.testing.assert_array_equal(local.numpy() == -7, truth != NOWHERE)


@given(layouts(), st.data())
def test_pieces_of_a_range_are_where_its_elements_are(
    drawn: tuple[Layout, np.ndarray], data: st.DataObject
) -> None:
    layout, truth = drawn
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, truth.size)] * 2)))
    step = data.draw(st.integers(1, 2))
    buffer = torch.zeros((stop - start) * step + 2, dtype=torch.int64)[2::step][: stop - start]
    buffer.copy_(torch.arange(start, stop))
    sharded = layout.range(buffer, start, stop)
    np.testing.assert_array_equal(filled(sharded), expected(layout.shape, truth, start, stop))
    for view, _ in sharded.pieces:
        view.fill_(-7)
    np.testing.assert_array_equal(buffer.numpy() == -7, truth.ravel()[start:stop] != NOWHERE)


@given(layouts())
def test_a_whole_layout_moves_no_element(drawn: tuple[Layout, np.ndarray]) -> None:
    layout, truth = drawn
    moves_nothing = layout.shape == truth.shape and (truth.ravel() == np.arange(truth.size)).all()
    if layout.is_whole:
        assert moves_nothing
    assert Layout.whole(truth.shape).is_whole


def test_empty_local_tensor_has_shape_and_dtype() -> None:
    nothing = IndexMap((0, 3), (4, 3), Boxes.empty(2), np.zeros((0, 2), np.int64))
    layout = Layout.whole((4, 3)).expert(1, 2).part(nothing)
    sharded = layout.pieces(torch.zeros(0, 3, dtype=torch.bfloat16))
    assert (sharded.shape, sharded.dtype, sharded.pieces) == ((2, 4, 3), torch.bfloat16, [])
    assert layout.range(torch.zeros(0, dtype=torch.float64), 0, 0).dtype == torch.float64


def test_scalars_are_one_for_each_expert() -> None:
    step = torch.tensor(3.0)
    assert Layout.whole((2,)).scalar(step).shape == ()
    own = Layout.whole((2,)).expert(3, 5).scalar(step)
    assert (own.shape, [(view.tolist(), at) for view, at in own.pieces]) == ((5,), [([3.0], (3,))])
    places = IndexMap((2, 4), (5, 4), Boxes.whole((2, 4)), np.array([[1, 0]]))
    shared = Layout.of(places, experts=True).scalar(step)
    assert [(view.tolist(), at) for view, at in shared.pieces] == [([3.0, 3.0], (1,))]
    shared.pieces[0][0][:1] = 4.0
    assert step == 4.0


def test_declarations_outlive_copies_and_new_memory() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    layout = Layout.whole((2, 3)).expert(0, 4)
    declare(model[0], "weight", layout)
    again = copy.deepcopy(model).to_empty(device="cpu")
    assert list(declared(again.named_modules())) == ["0.weight"]
    assert declared(again.named_modules())["0.weight"].shape == (4, 2, 3)


def test_wrong_sizes_and_names_are_refused() -> None:
    linear = torch.nn.Linear(3, 2)
    with pytest.raises(StructureError, match=r"no parameter or buffer 'wieght' .* \['weight', 'bias'\]"):
        declare(linear, "wieght", Layout.whole((2, 3)))
    with pytest.raises(
        StructureError, match=r"weight has shape \[2, 3\], but its declared layout has \[3, 2\]"
    ):
        declare(linear, "weight", Layout.whole((3, 2)))
    with pytest.raises(StructureError, match=r"m.weight has shape \[2, 3\], .* layout has \[4, 3\]"):
        local_layout(linear.weight, Layout.whole((4, 3)), "m.weight")
    with pytest.raises(StructureError, match=r"has shape \[1, 3\], but its layout has \[2, 3\]"):
        Layout.whole((2, 3)).pieces(torch.zeros(1, 3))
    with pytest.raises(StructureError, match=r"elements 1 to 3 has shape \[3\]"):
        Layout.whole((2, 3)).range(torch.zeros(3), 1, 3)
    with pytest.raises(StructureError, match=r"\[5, 8\) is not a range of the 6 elements"):
        Layout.whole((2, 3)).range(torch.zeros(3), 5, 8)
    with pytest.raises(ValueError, match="not an order of 2 axes"):
        Layout.of(IndexMap.whole((2, 3)), order=(0, 0))
    with pytest.raises(ValueError, match="do not make the index map's local shape"):
        Layout.of(IndexMap.whole((2, 3)), factors=((6,),))


def test_an_uneven_dtensor_is_described_by_its_own_index_map() -> None:
    """Rows 1 to 6 of 7 are on rank 1, where Shard(0) alone would place rows 4 to 7."""
    with as_rank(1, 2):
        mesh = DeviceMesh("cpu", torch.arange(2))
        local = torch.arange(10.0).reshape(5, 2)
        weight = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(7, 2), stride=(2, 1))
        with pytest.raises(StructureError, match="irregular layout"):
            collect({"w": weight})
        index_map = IndexMap((5, 2), (7, 2), Boxes.whole((5, 2)), np.array([[1, 0]]))
        setattr(weight, LOCAL, index_map)
        (entry,) = collect({"w": weight}).tensors
        assert (entry.shape, [piece.offsets for piece in entry.pieces]) == ((7, 2), [(1, 0)])
        assert entry.pieces[0].view.data_ptr() == local.data_ptr()
        layout = local_layout(weight, None, "w")
        assert [at for _, at in layout.pieces(local).pieces] == [(1, 0)]
        slot = empty_like_layout(weight, torch.float64)
        assert [piece.offsets for piece in collect({"w": slot}).tensors[0].pieces] == [(1, 0)]
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(weight)
        setattr(module.weight, LOCAL, index_map)
        rows = IndexMap(
            (7, 2), (9, 2), Boxes.of(((0, 0), (3, 2)), ((3, 0), (4, 2))), np.array([[0, 0], [5, 0]])
        )
        declare(module, "weight", Layout.of(rows))
        (entry,) = collect(module).tensors
        assert (entry.shape, [piece.offsets for piece in entry.pieces]) == ((9, 2), [(1, 0), (5, 0)])
        setattr(weight, LOCAL, IndexMap.whole((7, 2)))
        with pytest.raises(StructureError, match=r"local tensor has shape \[5, 2\] and the DTensor \[7, 2\]"):
            collect({"w": weight})


def test_a_rank_outside_the_mesh_collects_the_declared_shape_without_pieces() -> None:
    with as_rank(2, 3):
        mesh = DeviceMesh("cpu", torch.arange(2))
        weight = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(weight)
        declare(module, "weight", Layout.whole((4, 2)).expert(1, 3))
        (entry,) = collect(module).tensors
        assert (entry.dtype, entry.shape, entry.pieces) == ("float32", (3, 4, 2), ())


def test_layouts_of_the_same_part_are_cached() -> None:
    """Repeated saves compute each box once, and the caches are bounded."""
    inner, layout = IndexMap.whole((300, 3)), Layout.whole((300, 3))
    assert layout.part(inner) is layout.part(inner)
    for row in range(300):
        layout.part(IndexMap((1, 3), (300, 3), Boxes.whole((1, 3)), np.array([[row, 0]])))
        layout.range(torch.zeros(1), row, row + 1)
    for parts in (layout._parts, layout._ranges):
        assert len(parts) <= 256


def test_parameters_of_one_shape_share_a_layout() -> None:
    """Each save asks for the layout of every parameter."""
    first, second = torch.ones(2, 3), torch.zeros(2, 3)
    assert local_layout(first, None, "first") is local_layout(second, None, "second")
