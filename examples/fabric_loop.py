"""Trains, and resumes if started again: torchrun --nproc-per-node 2 examples/fabric_loop.py RUN."""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn

import shardproof as sp
from shardproof.frameworks.fabric import unwrapped

fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
fabric.launch()
fabric.seed_everything(1)
model = fabric.setup_module(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1)))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8)
state = unwrapped({"model": model, "optimizer": optimizer, "schedule": schedule, "rng": sp.RandomState()})

checkpointer = sp.Checkpointer(sys.argv[1], keep=sp.KeepLatest(2))
first = checkpointer.restore(state) or 0
for step in range(first + 1, int(os.environ.get("STEPS", "24")) + 1):
    torch.manual_seed(step * fabric.world_size + fabric.global_rank)  # this step's data and dropout
    inputs = torch.randn(8, 16)
    fabric.backward(nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 4 == 0:
        checkpointer.save(step, state)
checkpointer.wait()
