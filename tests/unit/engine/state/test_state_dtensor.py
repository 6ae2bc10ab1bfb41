"""The arithmetic of DTensor layouts against what torch puts on each rank, rank by rank in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardproof.engine.state.dtensor import LocalBoxesCache, _are_alike, local_segments, order_of_sharding
from shardproof.engine.state.optimizer.slots import SlotLayouts, StoredSlot
from shardproof.errors import StructureError
from shardproof.state import collect
from tests.unit.engine.state.fake_checkpoint import FakeCheckpoint


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def every_rank(mesh_shape: Sequence[int], tree: Callable[[DeviceMesh], Any]) -> list[Any]:
    """What each rank collects from its tree."""
    world_size = 1
    for size in mesh_shape:
        world_size *= size
    collected = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            ranks = torch.arange(world_size).reshape(*mesh_shape)
            # A thread for each rank, because torch caches layouts per thread.
            with ThreadPoolExecutor(1) as thread:
                collected.append(
                    thread.submit(
                        lambda: collect(tree(DeviceMesh("cpu", ranks)), rank=rank, world_size=world_size)  # noqa: B023
                    ).result()
                )
    return collected


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(tuple(shape))


LAYOUTS: list[tuple[Sequence[int], Sequence[int], list[Any]]] = [
    ((3,), (7, 2), [Replicate()]),
    ((3,), (7, 2), [Shard(0)]),
    ((3,), (2, 7), [Shard(1)]),
    ((3,), (2, 7), [Shard(-1)]),
    ((5,), (2, 3), [Shard(0)]),
    ((4,), (0, 3), [Shard(0)]),
    ((4,), (), [Replicate()]),
    ((2, 2), (5, 5), [Shard(0), Shard(0)]),
    ((2, 3), (5, 5), [Shard(0), Shard(1)]),
    ((3, 2), (5, 5), [Shard(1), Replicate()]),
    ((2, 3), (7, 4), [Replicate(), Shard(0)]),
    ((2, 2, 2), (9, 4, 3), [Shard(0), Shard(1), Shard(0)]),
    ((4,), (9, 2), [_StridedShard(0, split_factor=2)]),
    ((3,), (11,), [_StridedShard(0, split_factor=3)]),
    ((2, 2), (9, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((4, 2), (16, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((4, 2), (9, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2), (3, 10), [_StridedShard(1, split_factor=2), Shard(1)]),
    ((2, 2, 2), (16, 3), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2, 2), (16, 3), [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]),
]


@pytest.mark.parametrize(("mesh_shape", "shape", "placements"), LAYOUTS, ids=str)
def test_pieces_hold_what_distribute_tensor_puts_there(
    mesh_shape: Sequence[int], shape: Sequence[int], placements: list[Any]
) -> None:
    full = numbered(shape)
    checkpoint = FakeCheckpoint(
        every_rank(
            mesh_shape,
            lambda mesh: {"x": distribute_tensor(full, mesh, placements, src_data_rank=None)},
        )
    )
    assert torch.equal(checkpoint.full["x"], full)
    copies = 1
    for size, placement in zip(mesh_shape, placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    assert (checkpoint.holders("x") == copies).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize("tp_dim", [0, 1])
def test_pieces_hold_what_fsdp_over_tensor_parallel_puts_there(rows: int, dp: int, tp_dim: int) -> None:
    full = numbered((rows, 6))
    tp = 2

    def tree(mesh: DeviceMesh) -> Any:
        mesh = DeviceMesh("cpu", torch.arange(dp * tp).reshape(dp, tp), mesh_dim_names=("dp", "tp"))
        module = torch.nn.Module()
        weight = distribute_tensor(full, mesh["tp"], [Shard(tp_dim)], src_data_rank=None)
        module.weight = torch.nn.Parameter(weight)
        fully_shard(module, mesh=mesh["dp"])
        return {"m": module, "o": torch.optim.AdamW(module.parameters())}

    checkpoint = FakeCheckpoint(every_rank((dp, tp), tree))
    assert torch.equal(checkpoint.full["m.weight"], full)
    assert (checkpoint.holders("m.weight") == 1).all()


@given(
    size=st.integers(0, 40),
    mesh_shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_sharding_of_one_dimension_cuts_as_chunk_does(
    size: int, mesh_shape: list[int], data: st.DataObject
) -> None:
    splits = [data.draw(st.sampled_from([0, 0, 2, 3, 4])) for _ in mesh_shape]
    sharding = tuple((mesh_dim, 0, split) for mesh_dim, split in enumerate(splits))
    for coordinate in torch.cartesian_prod(*[torch.arange(n) for n in mesh_shape]).reshape(
        -1, len(mesh_shape)
    ):
        at = tuple(coordinate.tolist())
        expected = torch.arange(size)
        for mesh_dim, split in enumerate(splits):
            parts = chunks(expected, split or 1)
            expected = torch.cat([chunks(part, mesh_shape[mesh_dim])[at[mesh_dim]] for part in parts])
        segments = local_segments((size,), tuple(mesh_shape), at, sharding, False)
        assert segments is not None
        held = [row for start, count in segments[0] for row in range(start, start + count)]
        assert held == expected.tolist()


def chunks(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    found = list(torch.chunk(tensor, count))
    return found + [tensor[:0]] * (count - len(found))


def test_the_order_of_sharding_is_read_from_split_factors() -> None:
    assert order_of_sharding((2, 3), ((0, 0, 0), (1, 0, 0))) == [(0, 0, 0), (1, 0, 0)]
    assert order_of_sharding((2, 3), ((0, 0, 3), (1, 0, 0))) == [(1, 0, 0), (0, 0, 0)]
    assert order_of_sharding((2, 3), ((0, 0, 2), (1, 0, 0))) is None
    assert order_of_sharding((2, 3), ((0, 0, 3), (1, 1, 0))) is None
    three = order_of_sharding((2, 3, 4), ((0, 0, 4), (1, 0, 0), (2, 0, 0)))
    assert three is None
    assert order_of_sharding((2, 3, 4), ((0, 0, 12), (1, 0, 0), (2, 0, 0))) == [
        (1, 0, 0),
        (2, 0, 0),
        (0, 0, 0),
    ]


def test_fsdp_over_tensor_parallel_is_placed_right_where_shapes_are_ambiguous() -> None:
    # (3, 4) ranks, 27 rows: rank (2, 2) holds one row in both readings, but a different one in each.
    assert local_segments((27,), (3, 4), (2, 2), ((0, 0, 4), (1, 0, 0))) == (((20, 1),),)
    assert local_segments((27,), (3, 4), (2, 2), ((0, 0, 4), (1, 0, 0)), False) == (((26, 1),),)
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    full = numbered((27, 2))
    checkpoint = FakeCheckpoint(every_rank((3, 4), lambda mesh: {"x": fsdp_over_tp(full, mesh)}))
    assert torch.equal(checkpoint.full["x"], full)
    with pytest.raises(StructureError, match="two layouts"):
        every_rank((3, 4), lambda mesh: {"x": distribute_tensor(full, mesh, placements, src_data_rank=None)})


def fsdp_over_tp(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    dp, tp = mesh.shape
    mesh = DeviceMesh("cpu", torch.arange(dp * tp).reshape(dp, tp), mesh_dim_names=("dp", "tp"))
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["dp"])
    return module.weight


def test_an_ambiguous_layout_is_refused() -> None:
    placements = [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]
    with pytest.raises(StructureError, match="two layouts"):
        every_rank(
            (2, 2, 2),
            lambda mesh: {"x": distribute_tensor(numbered((17, 3)), mesh, placements, src_data_rank=None)},
        )


@pytest.mark.parametrize(
    "among",
    [
        ("flat", "turned", "shorter", "rows first", "columns first"),
        ("flat", "turned"),
        ("flat", "shorter"),
        ("rows first", "columns first"),
        ("rows first", "rows only"),
    ],
    ids=", ".join,
)
def test_layouts_of_one_walk_are_distinguished(among: tuple[str, ...]) -> None:
    """DTensors that differ only in the mesh, the placements or a shape."""

    def tree(mesh: DeviceMesh) -> dict[str, Any]:
        ranks = torch.arange(4)
        flat, turned, square = (
            DeviceMesh("cpu", mapped) for mapped in (ranks, ranks.flip(0), ranks.reshape(2, 2))
        )
        layouts = {
            "flat": (8, flat, [Shard(0)]),
            "turned": (8, turned, [Shard(0)]),
            "shorter": (7, flat, [Shard(0)]),
            "rows first": (8, square, [Shard(0), Shard(1)]),
            "columns first": (8, square, [Shard(1), Shard(0)]),
            "rows only": (8, square, [Shard(0), Replicate()]),
        }
        return {
            name: distribute_tensor(numbered((rows, 8)), where, placements, src_data_rank=None)
            for name, (rows, where, placements) in layouts.items()
            if name in among
        }

    for collected in every_rank((4,), tree):
        shapes = {entry.key: entry.shape for entry in collected.tensors}
        assert shapes == {name: (7 if name == "shorter" else 8, 8) for name in among}
        for entry in collected.tensors:
            (piece,) = entry.pieces
            box = [slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True)]
            assert torch.equal(piece.view, numbered(entry.shape)[tuple(box)])


class _Rows(int):
    """Stands for a placement."""


class _Strided(int):
    """Stands for a placement of another type that compares equal."""


@pytest.mark.parametrize("placed", [_Strided(0), _Rows(1)])
def test_placements_of_another_type_are_not_alike(placed: Any) -> None:
    """A shard and a strided shard were equal in some versions of torch."""
    mesh = object()
    for other, alike in ((_Rows(0), True), (placed, False)):
        assert _are_alike([mesh, mesh], [(_Rows(0),), (other,)], [None, None]) is alike
        cache = LocalBoxesCache()
        assert (cache._cache_of(mesh, (_Rows(0),), None) is cache._cache_of(mesh, (other,), None)) is alike


class Order(NamedTuple):
    """Torch's record of the order of sharding. Versions of torch without it accept the attribute."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


def test_shards_in_another_order_than_the_mesh_are_refused() -> None:
    with as_rank(1, 4):
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        usual, other = (
            distribute_tensor(numbered((8, 2)), mesh, [Shard(0), Shard(0)], src_data_rank=None)
            for _ in range(2)
        )
        other._spec.shard_order = (Order(0, (1, 0)),)
        usual._spec.shard_order = (Order(0, (0, 1)),)
        assert len(collect({"usual": usual}).tensors) == 1
        for tree in ({"other": other}, {"usual": usual, "other": other}):
            with pytest.raises(StructureError, match=r"other: .* another order .* Replicate\(\)"):
                collect(tree)


def test_large_dimensions_cost_nothing() -> None:
    size = 2**40
    segments = local_segments((size,), (1000, 8), (999, 7), ((0, 0, 8), (1, 0, 0)))
    assert segments is not None and segments[0][0][1] == -(-(2**37) // 1000) - (1000 * 137438954 - 2**37)


def test_partial_sums_are_refused() -> None:
    with as_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(StructureError, match="redistribute"):
            collect({"x": partial})


def test_a_local_tensor_that_contradicts_its_placements_is_refused() -> None:
    with as_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        odd = DTensor.from_local(
            torch.ones(1, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
        )
        with pytest.raises(StructureError, match="LocalShards"):
            collect({"x": odd})


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    with as_rank(2, 3):
        mesh = DeviceMesh("cpu", [0, 1])
        outside = DTensor.from_local(
            torch.ones(0), mesh, [Shard(0)], run_check=False, shape=torch.Size((4,)), stride=(1,)
        )
        (entry,) = collect({"x": outside}).tensors
        assert (entry.shape, entry.pieces) == ((4,), ())


def test_tied_empty_shards_are_collected_as_tied() -> None:
    full = numbered((1, 2))

    def tree(mesh: DeviceMesh) -> Any:
        weight = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        return {"a": weight, "b": weight, "c": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}

    for collected in every_rank((2,), tree):
        assert [entry.alias_of for entry in collected.tensors] == [None, "a", None]


def test_optimizer_state_is_made_with_the_parameters_layout() -> None:
    full = numbered((5, 3))

    def tree(mesh: DeviceMesh) -> Any:
        module = torch.nn.Linear(3, 5, bias=False)
        module.weight = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
        return {"m": module, "o": torch.optim.AdamW(module.parameters())}

    source = torch.nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint = FakeCheckpoint([collect({"m": source, "o": optimizer})])
    average = optimizer.state[source.weight]["exp_avg"]
    for rank, rows in enumerate([slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)]):
        with as_rank(rank, 4):
            with ThreadPoolExecutor(1) as thread:
                target = thread.submit(tree, DeviceMesh("cpu", [0, 1, 2, 3])).result()
                thread.submit(checkpoint.load, target).result()
            state = target["o"].state[target["m"].weight]
            assert isinstance(state["exp_avg"], DTensor)
            assert state["exp_avg"].placements == (Shard(0),)
            assert torch.equal(state["exp_avg"].to_local(), average[rows])
            assert type(state["step"]) is torch.Tensor and state["step"].item() == 1


def test_a_rank_outside_of_the_mesh_loads_state_that_it_did_not_have() -> None:
    source = torch.nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint = FakeCheckpoint([collect({"m": source, "o": optimizer})])

    def load_twice(mesh: DeviceMesh) -> None:
        outside = DTensor.from_local(
            torch.ones(0), mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1)
        )
        module = torch.nn.Linear(3, 4, bias=False)
        module.weight = torch.nn.Parameter(outside)
        target = torch.optim.AdamW(module.parameters())
        for _ in range(2):
            checkpoint.load({"m": module, "o": target})
            state = target.state[module.weight]
            assert state["exp_avg"].shape == (4, 3) and state["exp_avg"].placements == (Shard(0),)
            assert state["exp_avg"].to_local().shape == (0,) and state["step"].item() == 1

    with as_rank(2, 3), ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: load_twice(DeviceMesh("cpu", [0, 1]))).result()


def test_state_of_another_shape_is_replicated_on_the_mesh() -> None:
    full = numbered((4, 3))
    source = torch.nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    optimizer.state[source.weight] = {"row": torch.arange(4.0)}
    checkpoint = FakeCheckpoint([collect({"m": source, "o": optimizer})])
    with as_rank(1, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        module = torch.nn.Linear(3, 4, bias=False)
        module.weight = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
        target = torch.optim.SGD(module.parameters(), lr=0.1)
        checkpoint.load({"m": module, "o": target})
        row = target.state[module.weight]["row"]
        assert row.placements == (Replicate(),) and torch.equal(row.to_local(), torch.arange(4.0))


@pytest.mark.parametrize("shape", [(4,), (8, 4)], ids=str)
def test_a_plain_slot_of_another_shape_is_refused_where_the_parameter_is_sharded(shape: Any) -> None:
    """Each rank may hold a value of its own: a sum of its rows, or the error of a compressed gradient."""

    def tree(mesh: DeviceMesh, placement: Any, slot: torch.Tensor) -> Any:
        module = torch.nn.Linear(4, 8, bias=False)
        weight = distribute_tensor(numbered((8, 4)), mesh, [placement], src_data_rank=None)
        module.weight = torch.nn.Parameter(weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.state[module.weight] = {"slot": slot, "step": torch.tensor(1.0)}
        return {"m": module, "o": optimizer}

    slot = numbered(shape)
    for rank in range(2):
        with as_rank(rank, 2):
            mesh = DeviceMesh("cpu", [0, 1])
            with pytest.raises(StructureError, match=r"o\.weight\.slot: .*Replicate\(\)"):
                collect(tree(mesh, Shard(0), slot))
    for ranks, placement in ((2, Replicate()), (1, Shard(0))):
        collected = every_rank((ranks,), lambda mesh, placement=placement: tree(mesh, placement, slot))
        assert torch.equal(FakeCheckpoint(collected).full["o.weight.slot"], slot)
    collected = every_rank(
        (2,), lambda mesh: tree(mesh, Shard(0), distribute_tensor(slot, mesh, [Shard(0)], src_data_rank=None))
    )
    assert torch.equal(FakeCheckpoint(collected).full["o.weight.slot"], slot)


def test_objects_keep_the_layout_of_their_tensors() -> None:
    full = numbered((4, 3))

    class Averages:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def state_dict(self) -> Any:
            return {"ema": self.tensor}

        def load_state_dict(self, state: Any) -> None:
            self.tensor = state["ema"]

    checkpoint = FakeCheckpoint(
        every_rank(
            (2,), lambda mesh: {"x": Averages(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))}
        )
    )
    with as_rank(1, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        target = Averages(distribute_tensor(full * 0, mesh, [Shard(1)], src_data_rank=None))
        checkpoint.load({"x": target})
        assert target.tensor.placements == (Shard(1),)
        assert torch.equal(target.tensor.to_local(), full[:, 2:])


def test_a_scalar_slot_is_saved_and_loaded_in_any_layout() -> None:
    """Slots with a shape are refused where the local tensor contradicts the placements."""
    layouts = SlotLayouts({}, {})
    with as_rank(0, 2):
        mesh = DeviceMesh("cpu", torch.arange(2))
        local = torch.ones(3, 2)
        parameter = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
        )
        assert layouts.of_slots(parameter).sharded(torch.tensor(7.0), "step") is None
        assert layouts.of_slots(parameter).stored(torch.float32, (), "step") == StoredSlot(torch.float32, ())
        with pytest.raises(StructureError):
            layouts.of_slots(parameter).sharded(local, "exp_avg")
        with pytest.raises(StructureError):
            layouts.of_slots(parameter).stored(torch.float32, (4, 2), "exp_avg")
