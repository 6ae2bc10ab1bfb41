"""Ranks that gather slots one by one, as they come, must all have them in one order after a load.

Processes that a launcher starts differ in the seed of the hashes of strings, so their sets differ in order.
The ranks of other tests are forked from one process and share its seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import shardproof as sp
from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer
from shardproof.state import slots_of

SEEDS = range(1, 5)
STATES = (
    "a fresh optimizer",
    "an optimizer that has stepped",
    "fresh, on the device",
    "fresh, half on the CPU",
    "stepped, on the CPU",
    "distributed",
)


def trees() -> dict[str, dict[str, object]]:
    """A model and its optimizer, by what is left of how they came to be."""
    made: dict[str, dict[str, object]] = {}
    for state in STATES:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer: torch.optim.Optimizer
        if state == "distributed":
            optimizer = DistributedOptimizer(model, torch.optim.AdamW, amsgrad=True)
        elif "optimizer" in state:
            optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
        else:
            fraction = {"fresh, on the device": 0.0, "fresh, half on the CPU": 0.5}.get(state, 1.0)
            optimizer = HybridDeviceOptimizer(
                model.parameters(), torch.optim.AdamW, cpu_fraction=fraction, amsgrad=True
            )
        if "stepped" in state:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        made[state] = {"model": model, "optimizer": optimizer}
    return made


def orders(folder: str) -> dict[str, list[list[str]]]:
    """The slots of each parameter, after a load."""
    found = {}
    for state, tree in trees().items():
        optimizer = tree["optimizer"]
        kind = type(optimizer).__name__
        sp.load(f"{folder}/{kind}", tree)
        assert isinstance(optimizer, torch.optim.Optimizer)
        if kind == "DistributedOptimizer":
            found[state] = [list(slots.tensors) for slots in slots_of(optimizer)]
        else:
            found[state] = [list(slots) for slots in optimizer.state.values()]
    return found


def test_slots_have_one_order_whatever_the_seed_of_hashes(tmp_path: Path) -> None:
    for tree in trees().values():
        model, optimizer = tree["model"], tree["optimizer"]
        assert isinstance(model, torch.nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        sp.save(tmp_path / type(optimizer).__name__, tree, overwrite=True)
    command = [sys.executable, "-m", "tests.unit.state.test_state_slot_order", str(tmp_path)]
    running = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)}
        )
        for seed in SEEDS
    ]
    try:
        said = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait(10)
    assert said == [said[0]] * len(SEEDS)
    hybrid = [said[0][state] for state in STATES if ", " in state]
    assert hybrid == [hybrid[0]] * 3  # and whatever was there before
    assert all(set(slots) >= {"step", "exp_avg", "max_exp_avg_sq"} for slots in said[0]["distributed"])


if __name__ == "__main__":
    json.dump(orders(sys.argv[1]), sys.stdout)
