"""Trains, and resumes on any number of ranks: `torchrun megatron_fsdp.py RUN STEPS [offload]`."""

import sys
from functools import partial

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard

import shardproof as sp
from shardproof.frameworks import megatron_fsdp

run, steps = sys.argv[1], int(sys.argv[2])
adamw = torch.optim.AdamW
if sys.argv[3:] == ["offload"]:  # to the CPU, with Megatron-Core's HybridDeviceOptimizer
    both = {"cpu_optimizer_cls": adamw, "gpu_optimizer_cls": adamw}
    adamw = partial(megatron_fsdp.hybrid_device_optimizer, offload_fraction=1.0, **both)
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 13), torch.nn.Linear(13, 11))
mesh = dist.init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
options = {"dp_shard_dim": "dp", "tp_dim": "tp", "fsdp_unit_modules": [torch.nn.Linear], "device_mesh": mesh}
options |= {"device": torch.device(device), "calculate_per_token_loss": True}
model, optimizer = fully_shard(module.to(torch.bfloat16), adamw(module.parameters(), lr=1e-2), **options)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
state = {"model": megatron_fsdp.module_state(model), "scheduler": scheduler, "rng": sp.RandomState()}
state["optimizer"] = megatron_fsdp.optimizer_state(optimizer, model)
checkpointer = sp.Checkpointer(run)
for step in range((checkpointer.restore(state) or 0) + 1, steps + 1):
    tokens = torch.randint(11, (2, 6), device=device)
    loss = torch.nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    checkpointer.save(step, state)
    print(f"step {step} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.6f}", flush=True)
checkpointer.wait()
