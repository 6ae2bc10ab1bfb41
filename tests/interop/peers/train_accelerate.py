"""Trains with Accelerate: `train_accelerate.py MODEL ACTION FOLDER [LAST]`.

MODEL is `ddp`, or `fsdp2` for a model that `fully_shard` has sharded. ACTION is `save`, `save-theirs` for
`accelerator.save_state`, `restore`, which saves the restored state to LAST, `rotate` to save three
numbered checkpoints with an unfinished one among them, or `refuse`.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed
from torch import nn

import shardproof as sp
from shardproof.frameworks import accelerate as adapter
from shardproof.frameworks.accelerate import load_state, save_state, state_of

MODEL, ACTION, FOLDER, *LAST = sys.argv[1:]


class Average:
    """A registered object: an average of the weights' norm."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def main() -> None:
    if ACTION == "refuse":
        try:
            state_of(SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))
        except TypeError as error:
            print(error)
        return
    rank = int(os.environ["RANK"])
    set_seed(rank + 10 * len(LAST))
    naming = ProjectConfiguration(FOLDER, automatic_checkpoint_naming=ACTION == "rotate", total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.2), nn.Linear(9, 5))
    if MODEL == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    # Accelerate wraps a model into DDP unless it is prepared for evaluation.
    model = accelerator.prepare_model(model, evaluation_mode=MODEL == "fsdp2")
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    average = Average()
    accelerator.register_for_checkpointing(average)
    if rank != 0:
        mock.patch.object(adapter, "_is_theirs", None).start()  # rank 0 alone finds the format
    if ACTION == "restore":
        load_state(accelerator, FOLDER)
    else:
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            accelerator.backward(model(torch.randn(4, 7, generator=generator)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            average.value += step
    if ACTION == "save-theirs":
        accelerator.save_state(FOLDER)
    elif ACTION == "rotate":
        for number in (0, 1, 3):
            accelerator.project_configuration.iteration = number
            save_state(accelerator)
            os.makedirs(f"{FOLDER}/checkpoints/checkpoint_2/shards", exist_ok=True)
    elif ACTION == "save":
        save_state(accelerator, FOLDER)
    if LAST:
        sp.save(LAST[0], state_of(accelerator) | {"accelerate": accelerator.step})
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
