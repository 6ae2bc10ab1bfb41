"""A state dict that DCP saved on some ranks fills fresh sharded optimizers on other ranks, with options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardproof as sp
from tests.harness import process_group, rendezvous, run_ranks, world_size


def _sharded(seed: int, lr: float) -> tuple[Any, Any]:
    """A model whose bias is smaller than the number of ranks, and AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "weight_decay": 0.5},
    ]
    return model, torch.optim.AdamW(groups, lr=lr, foreach=False)


def _whole(model: Any, optimizer: Any) -> dict[str, list[Any]]:
    items = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        items |= {f"{name}.{slot}": item for slot, item in optimizer.state[parameter].items()}
    whole = {key: item.full_tensor() if hasattr(item, "full_tensor") else item for key, item in items.items()}
    return {key: item.tolist() for key, item in whole.items()}


def _save(path: str) -> tuple[dict[str, list[Any]], list[float]]:
    with process_group():
        model, optimizer = _sharded(seed=1, lr=0.25)
        model(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
        return _whole(model, optimizer), [group["weight_decay"] for group in optimizer.param_groups]


def _load(path: str) -> tuple[dict[str, list[Any]], list[float], list[float]]:
    with process_group():
        model, optimizer = _sharded(seed=2, lr=9.0)
        sp.load(path, {"model": model, "optim": optimizer}, rendezvous=rendezvous(deadline=60.0))
        return (
            _whole(model, optimizer),
            [group["weight_decay"] for group in optimizer.param_groups],
            [group["lr"] for group in optimizer.param_groups],
        )


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_dcp_fills_fresh_sharded_optimizers(before: int, after: int, tmp_path: Path) -> None:
    expected, decays = run_ranks(before, _save, str(tmp_path / "dcp"))[0].value
    for outcome in run_ranks(after, _load, str(tmp_path / "dcp")):
        found, found_decays, rates = outcome.value
        assert found == expected
        assert found_decays == decays and rates == [0.25, 0.25]
