"""Trains, and resumes if started again: torchrun --nproc-per-node 2 examples/accelerate_loop.py RUN."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardproof.frameworks.accelerate import load_state, save_state, wait

set_seed(1)
project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(project_config=project, cpu=True)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
data = DataLoader(TensorDataset(torch.randn(96, 16), torch.randn(96, 1)), batch_size=8, shuffle=True)
model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)

load_state(accelerator)  # the newest committed checkpoint, if there is one
for _ in range(project.iteration, int(os.environ.get("EPOCHS", "6"))):
    for inputs, targets in data:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    schedule.step()
    save_state(accelerator, background=True)
wait(accelerator)
accelerator.end_training()
