"""Trains with 8-bit AdamW, and resumes: torchrun --nproc-per-node 2 examples/torchao_loop.py RUN."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.optim import AdamW8bit

import shardproof as sp
import shardproof.frameworks.torchao

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.Dropout(0.1), nn.Linear(512, 256))
fully_shard(model)
optimizer = AdamW8bit(model.parameters(), lr=1e-3)

state = {"model": model, "optimizer": optimizer}
checkpointer = sp.Checkpointer(sys.argv[1], keep=sp.KeepLatest(2))
first = checkpointer.restore(state) or 0
for step in range(first + 1, int(os.environ.get("STEPS", "12")) + 1):
    torch.manual_seed(1000 * step + rank)  # this step's data and dropout
    inputs = torch.randn(8, 256)
    nn.functional.mse_loss(model(inputs), inputs).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step, state)
checkpointer.wait()
dist.destroy_process_group()
