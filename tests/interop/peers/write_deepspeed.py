"""Writes a checkpoint of DeepSpeed: `write_deepspeed.py FOLDER STAGE DTYPE`.

The result has the state of all ranks by the functions of DeepSpeed that gather it, under the keys of
shardproof's reader.
"""

from __future__ import annotations

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from peer_result import Result, join_ranks, leave_ranks, rank
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does; building it takes minutes
folder, stage, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
join_ranks()
torch.manual_seed(5)
model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 13), nn.LayerNorm(13), nn.Linear(13, 11))
matrices = [item for item in model.parameters() if item.dim() > 1]
vectors = [item for item in model.parameters() if item.dim() == 1]
config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": stage},
    "bf16": {"enabled": dtype == "bfloat16"},
}
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config, dist_init_required=False
)
for step in range(2):
    tokens = (torch.arange(12).reshape(2, 6) * (step + 3) + rank()) % 11
    engine.backward(nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten()))
    engine.step()
zero = engine.optimizer
if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
    zero._hp_optimizer_states_linked = False  # 0.19.8 links the first group alone
    zero._lazy_init_hp_params_optimizer_state()
result = Result()
for name, parameter in engine.module.named_parameters():
    result.add_tensor(f"module.{name}", parameter)
    result.add_tensor(f"fp32.{name}", safe_get_full_fp32_param(parameter))
    for slot in ("exp_avg", "exp_avg_sq"):
        value = safe_get_full_optimizer_state(parameter, slot)
        result.add_tensor(f"optimizer.state.{name}.{slot}", value)
engine.save_checkpoint(folder)
result.facts["deepspeed"] = deepspeed.__version__
leave_ranks(result)
