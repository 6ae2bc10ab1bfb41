"""Saves on a schedule and before its job ends, and resumes: torchrun examples/preempted_loop.py RUN."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardproof as sp

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}
checkpointer = sp.Checkpointer(
    sys.argv[1],
    keep=sp.KeepLatest(3),
    every=sp.Every(steps=500) | sp.Every(minutes=20),
    preemption=sp.Preemption(),
)
step = checkpointer.restore(state) or 0
last = int(os.environ.get("STEPS", "1000"))
while step < last:
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    checkpointer.save_if_due(step, state, force=step == last)
checkpointer.wait()
dist.destroy_process_group()
