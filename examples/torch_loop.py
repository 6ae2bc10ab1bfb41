"""Trains, and resumes if started again: torchrun --nproc-per-node 2 examples/torch_loop.py RUN."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardproof as sp

dist.init_process_group("gloo")
rank, ranks, batch = dist.get_rank(), dist.get_world_size(), 12
torch.manual_seed(0)
inputs, targets = torch.randn(96, 16), torch.randn(96, 1)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
torch.manual_seed(1 + rank)  # each rank drops other units

progress = {"samples": 0}  # of all ranks, so it is valid on any number of ranks
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "progress": progress}
state["rng"] = sp.RandomState()
checkpointer = sp.Checkpointer(sys.argv[1], keep=sp.KeepLatest(3))
step = checkpointer.restore(state) or 0
while step < int(os.environ.get("STEPS", "20")):
    epoch, position = divmod(progress["samples"], len(inputs))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
    mine = order[position : position + batch][rank::ranks]  # this rank's share of the batch
    nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    step, progress["samples"] = step + 1, progress["samples"] + batch
    checkpointer.save(step, state)
checkpointer.wait()
dist.destroy_process_group()
