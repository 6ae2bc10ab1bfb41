"""After a load, all ranks have the slots of a parameter in one order, and can gather them in turn.

Processes that a launcher starts differ in the seed of string hashes, so the order of their sets differs.
The ranks of other tests are forked from one process and share its seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import shardproof as sp
from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer
from shardproof.state import slots_of

SEEDS = (1, 2)
"""Of other processes. This one has a seed of its own."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), amsgrad=True)


def hybrid(model: nn.Module, fraction: float) -> torch.optim.Optimizer:
    return HybridDeviceOptimizer(model.parameters(), torch.optim.AdamW, cpu_fraction=fraction, amsgrad=True)


def distributed(model: nn.Module) -> torch.optim.Optimizer:
    return DistributedOptimizer(model, torch.optim.AdamW, amsgrad=True)


TARGETS: list[tuple[Callable[[nn.Module], torch.optim.Optimizer], bool]] = [
    (adamw, False),
    (adamw, True),
    (partial(hybrid, fraction=0.0), False),
    (partial(hybrid, fraction=0.5), False),
    (partial(hybrid, fraction=1.0), True),
    (distributed, False),
]
"""Factories of optimizers, and whether each optimizer steps before it is loaded."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def targets() -> Iterator[tuple[bool, nn.Module, torch.optim.Optimizer]]:
    for make, has_stepped in TARGETS:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        yield has_stepped, model, make(model)


def orders(folder: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The class of each target, and the slots of each of its parameters after a load."""
    for has_stepped, model, optimizer in targets():
        if has_stepped:
            step(model, optimizer)
        kind = type(optimizer).__name__
        sp.load(f"{folder}/{kind}", {"model": model, "optimizer": optimizer})
        if isinstance(optimizer, DistributedOptimizer):
            yield kind, [list(slots.tensors) for slots in slots_of(optimizer)]
        else:
            yield kind, [list(slots) for slots in optimizer.state.values()]


def test_slots_have_the_same_order_for_every_hash_seed(tmp_path: Path) -> None:
    for _, model, optimizer in targets():
        step(model, optimizer)
        tree = {"model": model, "optimizer": optimizer}
        sp.save(tmp_path / type(optimizer).__name__, tree, overwrite=True)
    command = [sys.executable, "-m", "tests.unit.engine.state.test_state_slot_order", str(tmp_path)]
    running = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)}
        )
        for seed in SEEDS
    ]
    try:
        orders_by_seed = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait(10)
    here = [list(order) for order in orders(str(tmp_path))]
    assert orders_by_seed == [here] * len(SEEDS)
    of_hybrid = [slots for kind, slots in orders_by_seed[0] if kind == "HybridDeviceOptimizer"]
    assert of_hybrid == [of_hybrid[0]] * 3  # whether the optimizer stepped before the load or not
    (of_distributed,) = [slots for kind, slots in orders_by_seed[0] if kind == "DistributedOptimizer"]
    assert all(set(slots) >= {"step", "exp_avg", "max_exp_avg_sq"} for slots in of_distributed)


if __name__ == "__main__":
    json.dump(list(orders(sys.argv[1])), sys.stdout)
