"""Tensor subclasses that wrap other tensors are stored as their inner tensors, in any layout."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardproof.engine.planning.merge import merge
from shardproof.engine.planning.structure import Structure
from shardproof.errors import PlainDataError, StructureError
from shardproof.state import OptimizerState, bind, collect
from tests.unit.engine.state.fake_checkpoint import FakeCheckpoint, saved
from tests.unit.engine.state.test_state_dtensor import as_rank, every_rank
from tests.unit.engine.state.test_state_training import Loader


class Blocks(torch.Tensor):
    """Codes of the tensor's shape, one scale for each `block` elements, and a table that all ranks have."""

    __shardproof_parts__ = {"codes": "grid", "scale": "blocks", "table": "whole"}  # noqa: RUF012

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, mode: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, mode: Any) -> None:
        self.codes, self.scale, self.table, self.mode = codes, scale, table, mode

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], [self.mode, self.codes.shape]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        assert context[1] == inner["codes"].shape
        return cls(inner["codes"], inner["scale"], inner["table"], context[0])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            own = args[0]
            return cls(own.codes, own.scale, own.table, own.mode)
        raise NotImplementedError(function)


def blocks(shape: Sequence[int], block: int, first: int = 0, mode: Any = "dynamic") -> Blocks:
    """Numbered codes and scales. `first` is the number of the first element in the whole tensor."""
    count = int(torch.Size(shape).numel())
    codes = (torch.arange(count) + first).to(torch.int32).view(tuple(shape))
    return Blocks(codes, torch.arange(count // block) + float(first // block), torch.ones(3), mode)


def zeros(shape: Sequence[int], block: int, mode: Any = "dynamic") -> Blocks:
    made = blocks(shape, block, mode=mode)
    for part in (made.codes, made.scale, made.table):
        part.zero_()
    return made


def parts_equal(found: Any, expected: Any) -> bool:
    return all(
        torch.equal(getattr(found, name), getattr(expected, name)) for name in ("codes", "scale", "table")
    )


def sharded(mesh: DeviceMesh, shape: tuple[int, ...], block: int, placements: list[Any]) -> DTensor:
    """The shard of `blocks(shape, block)` on this rank: scales of the blocks of its elements."""
    whole = torch.arange(int(torch.Size(shape).numel())).view(shape).to(torch.int32)
    local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    scale = (local.flatten()[::block] // block).float()
    wrapper = Blocks(local, scale, torch.ones(3), "dynamic")
    return DTensor.from_local(
        wrapper, mesh, placements, run_check=False, shape=torch.Size(shape), stride=whole.stride()
    )


LAYOUTS: list[tuple[Sequence[int], tuple[int, ...], int, list[Any]]] = [
    ((2,), (6, 8), 4, [Shard(0)]),  # blocks of a row
    ((4,), (6, 8), 4, [Shard(0)]),  # uneven rows
    ((2,), (6, 8), 4, [Shard(1)]),
    ((2, 2), (6, 8), 4, [Shard(0), Shard(1)]),
    ((2, 2), (6, 8), 4, [Replicate(), Shard(0)]),
    ((2,), (8, 3), 6, [Shard(0)]),  # blocks of several rows
    ((4,), (8, 3), 6, [Shard(0)]),
    ((2,), (24,), 4, [Shard(0)]),
]


@pytest.mark.parametrize(("mesh", "shape", "block", "placements"), LAYOUTS)
def test_the_shards_of_all_ranks_make_the_whole_tensor(
    mesh: Sequence[int], shape: tuple[int, ...], block: int, placements: list[Any]
) -> None:
    """The shards load into one process, and its checkpoint loads into the shards."""
    ranks = every_rank(mesh, lambda mesh: {"w": sharded(mesh, shape, block, placements)})
    whole = blocks(shape, block)
    target = zeros(shape, block)
    FakeCheckpoint(ranks).load({"w": target})
    assert parts_equal(target, whole)

    checkpoint = saved({"w": whole})
    for rank in range(len(ranks)):
        with as_rank(rank, len(ranks)):
            device_mesh = DeviceMesh("cpu", torch.arange(len(ranks)).reshape(*mesh))
            expected = sharded(device_mesh, shape, block, placements)
            filled = sharded(device_mesh, shape, block, placements)
            for part in (filled.to_local().codes, filled.to_local().scale):  # type: ignore[attr-defined]
                part.zero_()
            checkpoint.load({"w": filled}, rank=rank, world_size=len(ranks))
            assert parts_equal(filled.to_local(), expected.to_local())


@pytest.mark.parametrize(("shape", "dim"), [((6, 12), 1), ((9, 4), 0)])
def test_a_shard_that_cuts_a_block_is_refused(shape: tuple[int, ...], dim: int) -> None:
    """Rank 0 of 2 has rows of 6 elements with blocks of 4, or 20 elements with blocks of 6."""
    checkpoint = saved({"o": _momentum(blocks(shape, 4 if dim else 6))})
    with as_rank(0, 2):
        mesh = DeviceMesh("cpu", torch.arange(2))
        parameter = distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)], src_data_rank=None)
        target = OptimizerState(torch.optim.SGD([parameter], lr=0.1), names={"w": parameter})
        with pytest.raises(StructureError, match="the shard of this rank .* cuts a block"):
            checkpoint.bind({"o": target}, world_size=2)


def _momentum(value: torch.Tensor, parameter: torch.Tensor | None = None) -> OptimizerState:
    parameter = torch.zeros(value.shape) if parameter is None else parameter
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["momentum_buffer"] = value
    return OptimizerState(optimizer, names={"w": parameter})


def test_a_rank_with_an_empty_shard_may_have_a_plain_tensor() -> None:
    """Optimizers of torchao make plain state without elements there."""
    shape = (6, 8)

    def momentum(mesh: DeviceMesh) -> Any:
        parameter = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None)
        if parameter.to_local().numel():
            return {"o": _momentum(sharded(mesh, shape, 4, [Shard(0)]), parameter)}
        return {"o": _momentum(torch.zeros_like(parameter), parameter)}

    ranks = every_rank((4,), momentum)
    assert [entry.key for entry in ranks[3].tensors] == ["o.w.momentum_buffer"]
    merged, _ = merge([Structure.of(collected) for collected in ranks])
    assert merged.keys == [f"o.w.momentum_buffer.{part}" for part in ("codes", "scale", "table")]

    checkpoint = saved({"o": _momentum(blocks(shape, 4))})
    with as_rank(3, 4):
        mesh = DeviceMesh("cpu", torch.arange(4))
        checkpoint.load(momentum(mesh), rank=3, world_size=4)
        parameter = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        checkpoint.load({"o": OptimizerState(optimizer, names={"w": parameter})}, rank=3, world_size=4)
        assert optimizer.state[parameter]["momentum_buffer"].to_local().shape == (0, 8)


def test_a_tensor_that_is_a_subclass_on_some_ranks_only_is_refused() -> None:
    trees = [{"w": blocks((2, 4), 4)}, {"w": torch.ones(2, 4)}]
    ranks = [collect(tree, rank=rank, world_size=2) for rank, tree in enumerate(trees)]
    with pytest.raises(StructureError, match="plain tensor on rank 1, and a tensor subclass on rank 0"):
        merge([Structure.of(collected) for collected in ranks])


def test_an_inner_tensor_without_a_declared_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Blocks, "__shardproof_parts__")
    with pytest.raises(StructureError, match=r"its part 'scale' of shape \[6\].*Declare it in the class"):
        every_rank((2,), lambda mesh: {"w": sharded(mesh, (6, 8), 4, [Shard(0)])})
    source, target = blocks((6, 8), 4), zeros((6, 8), 4)
    saved({"w": source}).load({"w": target})  # without shards no declaration is needed
    assert parts_equal(target, source)


def test_parameters_and_slots_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new optimizer gets slots of the stored class."""

    def made(fill: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        model.weight = nn.Parameter(fill((4, 4), 4), requires_grad=False)
        model.bias = nn.Parameter(torch.zeros(4, 4))
        return model, torch.optim.SGD([model.bias], lr=0.1)

    model, optimizer = made(blocks)
    optimizer.state[model.bias]["momentum_buffer"] = blocks((4, 4), 2, first=8)  # type: ignore[index]
    checkpoint = saved({"m": model, "o": optimizer})
    assert {"m.weight.codes", "m.weight.scale", "o.bias.momentum_buffer.codes"} < set(checkpoint.full)
    model2, optimizer2 = made(zeros)
    checkpoint.load({"m": model2, "o": optimizer2})
    assert parts_equal(model2.weight, model.weight)
    slot = optimizer2.state[model2.bias]["momentum_buffer"]  # type: ignore[index]
    assert parts_equal(slot, blocks((4, 4), 2, first=8)) and slot.mode == "dynamic"

    subclass = checkpoint.objects["o.bias.momentum_buffer.@subclass"]
    monkeypatch.setitem(subclass, "class", "elsewhere.Unknown")
    model2, optimizer2 = made(zeros)
    with pytest.raises(StructureError, match=r"elsewhere\.Unknown, which this program has not imported"):
        checkpoint.bind({"m": model2, "o": optimizer2})


def test_a_mismatch_names_what_differs() -> None:
    checkpoint = saved({"w": blocks((4, 4), 4), "plain": torch.ones(4, 4)})
    for target, expected in (
        (blocks((4, 4), 4, mode="static"), "context ['static', '@shape'], found context ['dynamic'"),
        (blocks((4, 4), 2), "'scale': {'blocks': 2}"),
        (torch.ones(4, 4), "4 keys below it (w.@subclass, w.codes, w.scale)"),
    ):
        (mismatch,) = checkpoint.bind({"w": target}, selected=lambda key: key.startswith("w")).mismatched
        assert expected in str(mismatch)
    quantised = {name: blocks((4, 4), 4) for name in ("plain", "other")}
    binding = checkpoint.bind(quantised, selected=lambda key: not key.startswith("w"))
    assert "load first, and quantise the tensor then" in str(binding.mismatched[0])
    assert binding.missing == ["other.@subclass"]


def test_a_subclass_is_loaded_whole_or_not_at_all() -> None:
    checkpoint = saved({"w": blocks((4, 4), 4)})
    with pytest.raises(StructureError, match="select 3 of the 4 keys of a tensor subclass"):
        checkpoint.bind({"w": blocks((4, 4), 4)}, selected=lambda key: not key.endswith("scale"))
    assert bind({"w": blocks((4, 4), 4)}, checkpoint.catalogue, selected=lambda key: False).tensors == []


def test_a_context_that_is_no_plain_data_is_refused_by_name() -> None:
    class Mode(enum.Enum):
        STATIC = 1

    with pytest.raises(PlainDataError, match=r"the context of .*Blocks is no plain data: .*Mode is not"):
        collect({"w": blocks((4, 4), 4, mode=Mode.STATIC)})


def test_a_subclass_in_the_state_of_an_object_is_refused() -> None:
    """A load could not restore it."""
    with pytest.raises(StructureError, match="a Blocks in the state of an object cannot be restored"):
        collect({"o": Loader({"weight": blocks((4, 4), 4)})})
