"""The load hooks of modules that are sharded or wrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import shardproof as sp
from tests.harness import process_group, run_ranks, world_size
from tests.unit.engine.state.test_load_hooks import Inverse, Renamed


class Net(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = Inverse(value)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x * self.scale.w)


def _refreshed(folder: str) -> None:
    with process_group():
        source = Net(4.0)
        sp.save(f"{folder}/c", {"model": fully_shard(source)})
        target = fully_shard(Net(1.0))
        sp.load(f"{folder}/c", {"model": target})
        inverse = target.scale.inv
        assert inverse.to_local().tolist() == [0.25] * (4 // world_size())
        assert torch.equal(target.last.weight.full_tensor(), source.last.weight.full_tensor())
        target(torch.ones(2, 4)).sum().backward()

        replicated = nn.parallel.DistributedDataParallel(Net(1.0))
        sp.load(f"{folder}/c", {"model": replicated})
        assert replicated.module.scale.inv.tolist() == [0.25] * 4


def _whole_tensors(folder: str) -> None:
    with process_group():
        sp.save(f"{folder}/c", {"model": {"gamma": torch.ones(3)}})
        target = fully_shard(nn.Sequential(Renamed()))
        with pytest.raises(sp.KeyMismatchError, match="nothing was changed"):
            sp.load(f"{folder}/c", {"model": target[0]})


def _flat(folder: str) -> None:
    with process_group():
        sp.save(f"{folder}/c", {"model": Net(4.0)})
        calls: list[Any] = []
        inner = Net(1.0)
        inner.scale._load_state_dict_post_hooks.clear()
        handle = inner.scale.register_load_state_dict_post_hook(lambda module, keys: calls.append(keys))
        target = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
        with pytest.raises(
            sp.ShardproofError, match=r"scale'.*Inverse has hooks of load_state_dict"
        ) as caught:
            sp.load(f"{folder}/c", {"model": target})
        assert "remove the hooks, and call them yourself" in str(caught.value)
        handle.remove()
        saving = inner.scale.register_state_dict_post_hook(lambda *_: None)
        with pytest.raises(sp.ShardproofError, match="Inverse has hooks of state_dict"):
            sp.save(f"{folder}/d", {"model": target})
        saving.remove()
        sp.load(f"{folder}/c", {"model": target})
        with FullyShardedDataParallel.summon_full_params(target):
            assert inner.scale.w.tolist() == [4.0] * 4
        assert calls == []


class Stage(nn.Module):
    """The layer of one pipeline stage. A hook of its root reads the older name of this layer."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = f"layer{stage}"
        self.add_module(self.stage, nn.Linear(2, 2, bias=False))
        self.register_load_state_dict_pre_hook(_read_older_name)


def _read_older_name(module: Stage, state: dict[str, Any], prefix: str, *_: Any) -> None:
    older = f"{prefix}old_{module.stage}"
    if older in state:
        state[f"{prefix}{module.stage}.weight"] = state.pop(older)


def _stages(folder: str) -> None:
    """Each rank's hook gets the keys of the other stage, which do not belong to its module."""
    with process_group():
        rank = torch.distributed.get_rank()
        torch.manual_seed(rank)
        saved = Stage(rank)
        weight = saved.get_submodule(saved.stage).weight
        states = {"own": saved, "older": {f"old_layer{rank}": weight}}
        for name, state in states.items():
            sp.save(f"{folder}/{name}", {"model": state})
            loaded = Stage(rank)
            sp.load(f"{folder}/{name}", {"model": loaded})
            assert torch.equal(loaded.get_submodule(loaded.stage).weight, weight), name

        sp.save(f"{folder}/stray", {"model": {f"layer{rank}.weight": weight, "layer2.weight": torch.ones(2)}})
        with pytest.raises(sp.KeyMismatchError, match="strict=False ignores these keys") as caught:
            sp.load(f"{folder}/stray", {"model": Stage(rank)})
        assert caught.value.details["unexpected"] == ["model.layer2.weight"]
        sp.load(f"{folder}/stray", {"model": Stage(rank)}, strict=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [_refreshed, _whole_tensors, _flat, _stages])
def test_load_hooks_of_sharded_modules(ranks: Any, tmp_path: Path) -> None:
    for outcome in run_ranks(2, ranks, str(tmp_path), timeout=240):
        assert outcome.value is None
