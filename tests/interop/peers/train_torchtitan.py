"""Trains with torchtitan's checkpoint manager, optimizers and scheduler: FSDP2 and AdamW on every rank.

`train_torchtitan.py MODE PATH ASYNC_MODE` has three modes:

- `torch` saves step 2 with torch's DCP;
- `killed` saves steps 1 to 3 with shardproof, and ends itself with SIGKILL after the last call;
- `resumed` loads the newest step with shardproof, gives the state, and trains until step 5.

The first two write the state after each step, every tensor whole, to PATH/expected-STEP.pt.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torchtitan.components.checkpointer.dcp as titan
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
from tiny_model import TinyModel
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

from shardproof.frameworks import dcp

IMPORT = "import torch.distributed.checkpoint as dcp\n"


class Data:
    """The place in the data, which a data loader would have."""

    place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Trainer:
    """The objects that torchtitan's trainer gives to its checkpoint manager, and a step of training."""

    def __init__(self, path: str, async_mode: str) -> None:
        torch.manual_seed(0)
        self.model = TinyModel()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size(),)))
        config = default_adamw(lr=0.01)
        config.implementation = "foreach"
        self.optimizers = OptimizersContainer(config, model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=10)
        self.data = Data()
        self.step = self.ntokens_seen = 0
        self.checkpointer = titan.CheckpointManager.Config(
            enable=True,
            interval=1,
            async_mode=async_mode,
            keep_latest_k=2,
            last_save_model_only=False,
        ).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=path,
        )
        # torchtitan's own stager needs an accelerator.
        self.checkpointer.stager = DefaultStager(StagingOptions(False, False, True, False))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self) -> None:
        """Takes a step."""
        self.step += 1
        self.ntokens_seen += 12
        tokens = (torch.arange(12).reshape(2, 6) * (self.data.place + 3)) % 11
        self.data.place += 1
        torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten()).backward()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.schedulers.step()

    def state(self) -> dict[str, Any]:
        """The whole state. All ranks call this."""
        tree = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "others": {
                "scheduler": self.schedulers.state_dict(),
                "lr": [scheduler.get_last_lr() for scheduler in self.schedulers],
                "trainer": self.state_dict(),
                "data": self.data.state_dict(),
            },
        }
        return {
            part: {
                key: value.full_tensor() if isinstance(value, DTensor) else value
                for key, value in values.items()
            }
            for part, values in tree.items()
        }


def main() -> None:
    mode, path, async_mode = sys.argv[1:]
    with open(titan.__file__) as source:
        assert source.read().count(IMPORT) == 1
    if mode != "torch":
        titan.dcp = dcp  # what the changed import binds
    join_ranks()
    trainer = Trainer(path, async_mode)
    result = Result()
    if mode == "resumed":
        assert trainer.checkpointer.load()
        result.facts["step"] = trainer.step
        result.add_tree(trainer.state())
    steps = {"torch": 2, "killed": 3, "resumed": 5}[mode]
    while trainer.step < steps:
        trainer.train()
        expected = trainer.state()
        if mode != "resumed" and rank() == 0:
            torch.save(expected, f"{path}/expected-{trainer.step}.pt")
        trainer.checkpointer.save(trainer.step, last_step=mode != "killed" and trainer.step == steps)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.checkpointer.maybe_wait_for_saving()
    trainer.checkpointer.close()
    leave_ranks(result)


if __name__ == "__main__":
    main()
