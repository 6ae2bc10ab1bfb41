"""FSDP1: flat parameters and their optimizer state, on other ranks, in other wrappings, to and from FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardproof as sp
from shardproof.errors import ShardproofError
from tests.distributed.layouts import Meshes, meetings_of_first_ranks
from tests.harness import process_group, rank, run_ranks, world_size


class Block(nn.Module):
    """A layer that shares its weight with another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 3, bias=False)
        self.tied = nn.Linear(7, 3)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.tied(x)


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied weight and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.block = Block()
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.norm(self.first(x))))


def _model(seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net()
    model.norm.running_mean.fill_(seed + 1.5)  # type: ignore[union-attr]
    return model


def plain(seed: int, n: int, meshes: Meshes) -> nn.Module:
    return _model(seed)


def fsdp2(seed: int, n: int, meshes: Meshes) -> nn.Module:
    model = _model(seed)
    fully_shard(model, mesh=meshes.flat[n])
    return model


def fsdp1(use_orig_params: bool, **options: Any) -> Callable[[int, int, Meshes], nn.Module]:
    is_hybrid = options.get("sharding_strategy") in HYBRID

    def build(seed: int, n: int, meshes: Meshes) -> nn.Module:
        ranks: dict[str, Any] = {"process_group": meshes.flat[n].get_group()}
        return FullyShardedDataParallel(
            _model(seed),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
            **({"device_mesh": meshes.grid[n]} if is_hybrid else ranks),
            **options,
        )

    return build


HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
BLOCKS = ModuleWrapPolicy({Block})
BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Layout: TypeAlias = "tuple[Callable[[int, int, Meshes], nn.Module], int]"
"""How to build a model, and on how many ranks."""
SOURCES: dict[str, Layout] = {
    "orig": (fsdp1(True), 3),
    "flat": (fsdp1(False), 3),
    "orig, wrapped": (fsdp1(True, auto_wrap_policy=BLOCKS), 2),
    "flat, wrapped": (fsdp1(False, auto_wrap_policy=BLOCKS), 4),
    "not sharded": (fsdp1(True, sharding_strategy=ShardingStrategy.NO_SHARD), 2),
    "FSDP2": (fsdp2, 4),
}
TARGETS: dict[str, Layout] = {
    "orig": (fsdp1(True), 2),
    "flat": (fsdp1(False, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), 4),
    "flat, wrapped": (fsdp1(False, auto_wrap_policy=BLOCKS), 3),
    "orig, wrapped": (fsdp1(True, auto_wrap_policy=BLOCKS), 4),
    "plain": (plain, 1),
    "FSDP2": (fsdp2, 3),
}
STRATEGIES: dict[str, Layout] = {
    f"{strategy.name}, {'orig' if orig else 'flat'}": (fsdp1(orig, sharding_strategy=strategy), 4)
    for strategy in ShardingStrategy
    for orig in (True, False)
} | {
    f"mixed precision, {'orig' if orig else 'flat'}": (
        fsdp1(orig, mixed_precision=BFLOAT16, auto_wrap_policy=BLOCKS),
        3,
    )
    for orig in (True, False)
}
STRATEGY_TARGETS: dict[str, Layout] = {
    "hybrid, flat": (fsdp1(False, sharding_strategy=ShardingStrategy.HYBRID_SHARD), 4),
    "mixed precision, orig": (fsdp1(True, mixed_precision=BFLOAT16, auto_wrap_policy=BLOCKS), 2),
    "plain": (plain, 1),
    "FSDP2": (fsdp2, 3),
}


def _state(build: Callable[[int, int, Meshes], nn.Module], seed: int, n: int, meshes: Meshes) -> Any:
    model = build(seed, n, meshes)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))}


def _step(state: Any, times: int) -> None:
    """Optimizer steps whose gradients depend on values, not on the layout."""
    for _ in range(times):
        for parameter in state["model"].parameters():
            if parameter.numel():
                parameter.grad = (parameter * 3 + 0.5).detach()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("", "_fsdp_wrapped_module"))


def _shards(state: Any) -> dict[str, torch.Tensor]:
    """The elements of each parameter and slot on this rank, 1-D, as FSDP1 keeps them."""
    found = {}
    model, optimizer = state["model"], state["optimizer"]
    for prefix, part in model.named_modules():
        handle = getattr(part, "_handle", None)
        if handle is None:
            continue
        flat = handle.flat_param
        for row, name in enumerate(flat._fqns):
            clean = f"{prefix}.{name}".replace("_fsdp_wrapped_module.", "").replace(
                "_fsdp_wrapped_module", ""
            )
            info = flat._shard_param_infos[row]
            cut = slice(info.offset_in_shard, (info.offset_in_shard or 0) + (info.numel_in_shard or 0))
            real = flat._params[row] if handle._use_orig_params else flat
            for slot, value in {"": real.detach(), **optimizer.state.get(real, {})}.items():
                if value.dim():
                    own = (
                        value.flatten()
                        if handle._use_orig_params
                        else value[cut]
                        if info.in_shard
                        else value[:0]
                    )
                    found[f"{clean.strip('.')}.{slot}".strip(".")] = own.clone()
    return found


def _everything(state: Any) -> dict[str, torch.Tensor]:
    """All parameters and slots, 1-D, gathered without shardproof."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(state["model"], FullyShardedDataParallel):
        group = state["model"].process_group  # with replicas, the ranks that have one copy
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, _shards(state), group=group)
        if state["model"]._handle.uses_sharded_strategy:
            for shards in every:
                for key, value in shards.items():
                    found[key] = torch.cat([found[key], value]) if key in found else value
        else:
            found = every[0]
    else:
        for name, parameter in state["model"].named_parameters():
            for slot, value in {"": parameter.detach(), **state["optimizer"].state[parameter]}.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                if value.dim():
                    found[_clean(f"{name}.{slot}")] = whole.flatten().clone()
    for name, buffer in state["model"].named_buffers():
        found[_clean(name)] = buffer.clone().flatten()
    return found


def together(state: Any) -> list[Any]:
    """One tree, in which the optimizer finds its module."""
    return [state]


def apart(state: Any) -> list[Any]:
    """Two trees. That of the optimizer does not have its module."""
    model, optimizer = state["model"], state["optimizer"]
    return [{"model": model}, {"optimizer": sp.OptimizerState(optimizer, model)}]


def beside(state: Any) -> list[Any]:
    """One tree, and the optimizer names its module too."""
    return [state | {"optimizer": sp.OptimizerState(state["optimizer"], state["model"])}]


CASES = {
    "together": (SOURCES, TARGETS, together),
    "apart": (SOURCES, TARGETS, apart),
    "strategies": (STRATEGIES, STRATEGY_TARGETS, beside),
}


def save_and_load_pairs(case: str, folder: str, every: int) -> list[str]:
    """Saves every layout, and loads every n-th pair."""
    sources, targets, trees = CASES[case]
    problems = []
    with process_group(), meetings_of_first_ranks() as meetings:
        meshes = Meshes(world_size())
        reference = _state(plain, 0, 1, meshes)
        _step(reference, 2)
        saved = _everything(reference)
        _step(reference, 1)
        later = _everything(reference)
        for name, (build, n) in sources.items():
            if rank() < n:
                state = _state(build, 0, n, meshes)
                _step(state, 2)
                for number, tree in enumerate(trees(state)):
                    sp.save(f"{folder}/{name}-{number}", tree, rendezvous=meetings[n])
        dist.barrier()
        for column, (target, (build, n)) in enumerate(targets.items()):
            for row, name in enumerate(sources):
                if rank() >= n or (row + column) % every:
                    continue
                state = _state(build, 1, n, meshes)
                for number, tree in enumerate(trees(state)):
                    sp.load(f"{folder}/{name}-{number}", tree, rendezvous=meetings[n])
                for when, expected in (("loaded", saved), ("a step later", later)):
                    found = _everything(state)
                    assert found.keys() == expected.keys()
                    problems += [
                        f"{name} to {target}, {when}: {key}"
                        for key, value in found.items()
                        if not torch.equal(value, expected[key])
                    ]
                    _step(state, 1)
                assert state["optimizer"].param_groups[0]["lr"] == 0.1
    return problems


@pytest.mark.timeout(200)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_flat_parameters_between_all_layouts(case: str, every: int, tmp_path: Path) -> None:
    outcomes = run_ranks(4, save_and_load_pairs, case, str(tmp_path), every, timeout=190)
    assert [outcome.value for outcome in outcomes] == [[]] * 4


def save_in_training(folder: str) -> None:
    with process_group():
        model = FullyShardedDataParallel(_model(0), device_id=torch.device("cpu"), use_orig_params=True)
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
        model(torch.rand(4, 5)).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        loss = model(torch.rand(4, 5)).sum()  # FSDP1 keeps the root's parameters for the backward pass
        sp.save(f"{folder}/gathered", state)
        with pytest.raises(ShardproofError, match="before the first forward pass"):
            sp.load(f"{folder}/gathered", state)
        loss.backward()
        before = {name: tensor.clone() for name, tensor in _shards(state).items()}
        state["optimizer"].step()
        sp.load(f"{folder}/gathered", state)
        after = _shards(state)
        assert [key for key in before if not torch.equal(before[key], after[key])] == []
        model(torch.rand(4, 5)).sum().backward()
        with (
            FullyShardedDataParallel.summon_full_params(model),
            pytest.raises(ShardproofError, match="outside FullyShardedDataParallel.summon_full_params"),
        ):
            sp.save(f"{folder}/summoned", state)


def test_gathered_parameters_are_saved_from_their_shards_and_not_loaded_into(tmp_path: Path) -> None:
    for outcome in run_ranks(2, save_in_training, str(tmp_path), timeout=60):
        assert outcome.value is None


def save_state_dict(folder: str) -> None:
    with process_group():
        expected = _model(0).state_dict()
        for name, options in {
            "mesh": {"device_mesh": Meshes(world_size()).flat[world_size()]},
            "group": {},
        }.items():
            model = FullyShardedDataParallel(_model(0), device_id=torch.device("cpu"), **options)
            FullyShardedDataParallel.set_state_dict_type(
                model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
            )
            sp.save(f"{folder}/{name}", {"model": model.state_dict()})
            with sp.open(f"{folder}/{name}") as checkpoint:
                assert all(torch.equal(checkpoint[f"model.{key}"][...], expected[key]) for key in expected)
            other = FullyShardedDataParallel(_model(1), device_id=torch.device("cpu"))
            sp.load(f"{folder}/{name}", {"model": other})
            with FullyShardedDataParallel.summon_full_params(other):
                found = {
                    key.replace("_fsdp_wrapped_module.", ""): value for key, value in other.named_parameters()
                }
                assert found and [key for key in found if not torch.equal(found[key], expected[key])] == []


def test_sharded_state_dicts_are_plain_trees(tmp_path: Path) -> None:
    for outcome in run_ranks(2, save_state_dict, str(tmp_path), timeout=60):
        assert outcome.value is None


def _train(state: Any, steps: range) -> None:
    """Steps of real training. Each rank has its own data."""
    state["model"].eval()  # BatchNorm would have other buffers on each rank
    for step in steps:
        torch.manual_seed(100 * step + rank())
        state["model"](torch.rand(4, 5)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def train_through_a_save(folder: str) -> list[str]:
    problems = []
    with process_group(), meetings_of_first_ranks() as meetings:
        meshes = Meshes(world_size())
        for name, (build, n) in STRATEGIES.items():
            if rank() >= n:
                continue
            state, other = _state(build, 0, n, meshes), _state(build, 1, n, meshes)
            _train(state, range(2))
            (tree,) = beside(state)
            sp.save(f"{folder}/{name}", tree, rendezvous=meetings[n])
            (tree,) = beside(other)
            sp.load(f"{folder}/{name}", tree, rendezvous=meetings[n])
            _train(state, range(2, 4))
            _train(other, range(2, 4))
            expected, found = _everything(state), _everything(other)
            assert expected.keys() == found.keys() and len(expected) > 3
            problems += [f"{name}: {key}" for key in expected if not torch.equal(expected[key], found[key])]
    return problems


@pytest.mark.timeout(120)
def test_training_continues_as_without_a_save(tmp_path: Path) -> None:
    outcomes = run_ranks(4, train_through_a_save, str(tmp_path), timeout=110)
    assert [outcome.value for outcome in outcomes] == [[]] * 4


def name_no_module(folder: str) -> None:
    with process_group():
        meshes = Meshes(world_size())
        for original in (True, False):
            state = _state(fsdp1(original), 0, world_size(), meshes)
            model, optimizer = state["model"], state["optimizer"]
            with pytest.raises(ShardproofError, match=r"use shardproof\.OptimizerState\(optimizer, module\)"):
                sp.save(f"{folder}/alone", {"optimizer": optimizer})
            named = sp.OptimizerState(optimizer, names=dict(model.named_parameters()))
            with pytest.raises(ShardproofError, match=r"Use shardproof\.OptimizerState\(optimizer, module\)"):
                sp.save(f"{folder}/named", {"optimizer": named})
            sp.save(f"{folder}/{original}", {"optimizer": sp.OptimizerState(optimizer, model)})


def test_errors_of_an_optimizer_alone_recommend_what_works(tmp_path: Path) -> None:
    for outcome in run_ranks(2, name_no_module, str(tmp_path), timeout=60):
        assert outcome.value is None


def _of_dtype(dtype: torch.dtype, meshes: Meshes, **options: Any) -> Any:
    """A model of a dtype in FSDP1, with AdamW before its first step."""
    group = meshes.flat[world_size()].get_group()
    model = FullyShardedDataParallel(
        _model(0).to(dtype), process_group=group, device_id=torch.device("cpu"), **options
    )
    return {"model": model, "optimizer": sp.OptimizerState(torch.optim.AdamW(model.parameters()), model)}


def load_another_dtype(folder: str) -> None:
    with process_group():
        meshes, dtypes = Meshes(world_size()), (torch.float32, torch.bfloat16)
        optimizers = {
            "float32": lambda model: torch.optim.AdamW(model.parameters()),
            "bfloat16": lambda model: torch.optim.AdamW(model.parameters()),
            "bfloat16-masters": lambda model: sp.optim.HybridDeviceOptimizer(
                model.parameters(), torch.optim.AdamW, master_dtype=torch.float32
            ),
        }
        for name, make in optimizers.items():
            model = _model(0).to(getattr(torch, name.partition("-")[0]))
            state = {"model": model, "optimizer": make(model)}
            _step(state, 2)
            sp.save(f"{folder}/{name}", state)
        for (at, name), here, original in product(enumerate(optimizers), dtypes, (True, False)):
            state = _of_dtype(here, meshes, use_orig_params=original)
            sp.load(f"{folder}/{name}", state, cast=True)
            sp.save(f"{folder}/again-{at}-{here}-{original}", state)
            optimizer = state["optimizer"].optimizer
            _step({"model": state["model"], "optimizer": optimizer}, 1)
            slots = [slots[name] for slots in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            assert slots and {slot.dtype for slot in slots} == {here}, (name, here, original)


def test_slots_of_another_dtype_get_that_of_the_optimizer(tmp_path: Path) -> None:
    """So that its next step works. AdamW has no masters: stored ones become float32 weights."""
    for outcome in run_ranks(2, load_another_dtype, str(tmp_path), timeout=90):
        assert outcome.value is None
    with sp.open(tmp_path / "bfloat16-masters") as stored:
        master = stored["optimizer.first.weight.master"].read()
        assert not torch.equal(master, stored["model.first.weight"].read().float())
    for dtype, original in product((torch.float32, torch.bfloat16), (True, False)):
        with sp.open(tmp_path / f"again-2-{dtype}-{original}") as found:
            assert torch.equal(found["model.first.weight"].read(), master.to(dtype))
            assert not [record.key for record in found.tensors if record.key.endswith(".master")]
