"""Trains, and resumes if started again: torchrun --nproc-per-node 2 examples/dcp.py RUN STEPS"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardproof.frameworks import dcp

run, last_step, step, saving = Path(sys.argv[1]), int(sys.argv[2]), 0, None
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 4))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=last_step)


def state():
    weights, slots = get_state_dict(model, optimizer)
    return {"model": weights, "optim": slots, "scheduler": scheduler, "step": step}


if newest := max(run.glob("step-*/manifest.json"), default=None):
    dcp.load(loaded := state(), checkpoint_id=newest.parent)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    step = loaded["step"]
while (step := step + 1) <= last_step:
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    (loss := (model(data) - data[:, :4]).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"step {step}: loss {loss.item()}", flush=True)
    if step % 2 == 0:
        saving = dcp.async_save(state(), checkpoint_id=run / f"step-{step:08d}")
saving and saving.result()  # durable and verified
