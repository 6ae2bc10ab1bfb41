"""A trained model and its AdamW, from any parallel layout into any other, through the modules' own state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardproof as sp
from tests.distributed.layouts import Meshes, meetings_of_first_ranks
from tests.harness import process_group, rank, run_ranks, world_size


class Block(nn.Module):
    """Widths that no number of ranks divides, and a norm smaller than most."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def _model() -> Block:
    torch.manual_seed(7)
    return Block()


def plain(n: int, meshes: Meshes) -> Block:
    return _model()


def fsdp(n: int, meshes: Meshes) -> Block:
    model = _model()
    fully_shard(model, mesh=meshes.flat[n])
    return model


def hsdp(n: int, meshes: Meshes) -> Block:
    model = _model()
    fully_shard(model, mesh=meshes.grid[n])
    return model


def tensor_parallel(n: int, meshes: Meshes) -> Block:
    model = _model()
    parallelize_module(model, meshes.flat[n], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def fsdp_over_tensor_parallel(n: int, meshes: Meshes) -> Block:
    model, mesh = _model(), meshes.grid[n]
    parallelize_module(model, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh["a"])
    return model


CASES: list[tuple[Callable[[int, Meshes], Block], int]] = [
    (plain, 1),
    (plain, 4),
    (fsdp, 2),
    (fsdp, 3),
    (fsdp, 4),
    (hsdp, 4),
    (tensor_parallel, 2),
    (fsdp_over_tensor_parallel, 4),
]


def _build(make: Callable[[int, Meshes], Block], n: int, meshes: Meshes, *, train: bool) -> dict[str, Any]:
    """Model and optimizer; trained for three steps whose gradients depend on values, not on the layout."""
    model = make(n, meshes)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    if train:
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = (parameter * 3 + 0.5).detach()
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _everything(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full copies of every parameter and every optimizer slot, gathered by torch."""
    found = {}
    for name, parameter in state["model"].named_parameters():
        found[name] = _full(parameter.detach()).clone()
        for slot, value in state["optimizer"].state[parameter].items():
            found[f"{name}.{slot}"] = _full(value).clone()
    return found


def save_and_load(folder: str, every: int) -> list[str]:
    """Saves every layout, and loads every n-th pair."""
    problems = []
    with process_group(), meetings_of_first_ranks() as meetings:
        meshes = Meshes(world_size())
        reference = _everything(_build(plain, 1, meshes, train=True)) if rank() == 0 else {}
        for number, (make, n) in enumerate(CASES):
            if rank() < n:
                state = _build(make, n, meshes, train=True)
                sp.save(f"{folder}/{number}", state, rendezvous=meetings[n])
        torch.distributed.barrier()
        for column, (make, n) in enumerate(CASES):
            if rank() >= n:
                continue
            for number, (source, m) in enumerate(CASES):
                if (number + column) % every:
                    continue
                state = _build(make, n, meshes, train=False)
                sp.load(f"{folder}/{number}", state, rendezvous=meetings[n])
                found = _everything(state)
                if rank() == 0:
                    assert found.keys() == reference.keys()
                    problems += [
                        f"{source.__name__} on {m} to {make.__name__} on {n}: {key}"
                        for key, value in found.items()
                        if not torch.equal(value, reference[key])
                    ]
    return problems


@pytest.mark.timeout(120)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_trained_model_and_optimizer_between_all_layouts(every: int, tmp_path: Path) -> None:
    outcomes = run_ranks(4, save_and_load, str(tmp_path), every, timeout=110)
    assert [outcome.value for outcome in outcomes] == [[]] * 4
