"""Trains, and resumes on any number of ranks: `torchrun --nproc-per-node 4 deepspeed_zero.py RUN STEPS`."""

import sys

import deepspeed
import torch

from shardproof.frameworks.deepspeed import load_checkpoint, save_checkpoint

run, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 13), torch.nn.Linear(13, 11))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 100, "warmup_type": "linear"},
    },
}
adamw = torch.optim.AdamW(module.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=module, optimizer=adamw, config=config)
path, client_state = load_checkpoint(engine, run)
print(f"resumed from {path}: {client_state}")
while engine.global_steps < steps:
    tokens = torch.randint(11, (2, 6), device=engine.device)
    loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()
    save_checkpoint(engine, run, client_state={"tokens": engine.global_steps * 12})
    print(f"step {engine.global_steps} loss {loss.item():.3f} lr {engine.get_lr()[0]:.6f}")
