"""Trains with Fabric: `train_fabric.py STRATEGY ACTION FOLDER [LAST]`.

STRATEGY is `ddp` or `fsdp2`. ACTION is `save`, `save-theirs` for `fabric.save`, `save-wrapped`, which saves
Fabric's objects with `shardproof.save`, or `restore`, which saves the restored state to LAST.
`restore-wrapped` loads into Fabric's objects with `shardproof.load`.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn

import shardproof as sp
from shardproof.frameworks import fabric as adapter
from shardproof.frameworks.fabric import load, save, unwrapped

STRATEGY, ACTION, FOLDER, *LAST = sys.argv[1:]


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    strategy: Any = "ddp"
    if STRATEGY == "fsdp2":
        strategy = ModelParallelStrategy(sharded, data_parallel_size=world_size, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(fabric.global_rank + 10 * len(LAST))
    model = fabric.setup_module(nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.2), nn.Linear(9, 5)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if ACTION != "save-theirs":
        state["rng"] = sp.RandomState()
    if fabric.global_rank != 0:
        mock.patch.object(adapter, "_is_theirs", None).start()  # rank 0 alone finds the format
    if ACTION == "restore-wrapped":
        sp.load(FOLDER, state | {"optimizer": sp.OptimizerState(optimizer, model)})
        sp.save(LAST[0], state | {"step": 3})
    elif ACTION == "restore":
        old = {name: item for name, item in state.items() if name != "rng"}
        load(fabric, FOLDER, old if os.path.isfile(FOLDER) else state)
        state |= old if os.path.isfile(FOLDER) else {}
        assert state["step"] == 3
        sp.save(LAST[0], unwrapped(state))
    else:
        for step in range(3):
            fabric.backward(model(torch.randn(4, 7)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["step"] = step + 1
        if ACTION == "save":
            save(fabric, FOLDER, state)
        elif ACTION == "save-wrapped":
            sp.save(FOLDER, state)
            sp.save(f"{FOLDER}-named", state | {"optimizer": sp.OptimizerState(optimizer, model)})
        else:
            fabric.save(FOLDER, state)
    fabric.barrier()


if __name__ == "__main__":
    main()
