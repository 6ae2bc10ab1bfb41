"""Trains with Ray Train, and resumes if started again: python examples/ray_loop.py RUN WORKERS STEPS."""

import sys
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardproof as sp
from shardproof.frameworks.ray_train import report, restore


def train(config: dict[str, int]) -> None:
    workers = init_device_mesh("cpu", (get_context().get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
    fully_shard(model, mesh=workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": sp.RandomState()}
    begun = restore(state) or 0  # the newest reported checkpoint, if there is one
    for step in range(begun + 1, config["steps"] + 1):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report({"step": step, "loss": loss.item(), "resumed_from": begun}, state, step=step)


run = Path(sys.argv[1]).absolute()
trainer = TorchTrainer(
    train,
    train_loop_config={"steps": int(sys.argv[3])},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=int(sys.argv[2])),
    run_config=RunConfig(run.name, str(run.parent), failure_config=FailureConfig(max_failures=2)),
)
print("reported", trainer.fit().metrics)
