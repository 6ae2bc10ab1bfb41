"""Trains a model with a manager of verl: `train_verl.py STRATEGY ACTION FOLDER [LAST]`.

STRATEGY is that of verl: `fsdp2`, or `fsdp`, with FSDP1 as verl wraps a model by default.
ACTION is `save`, or `restore`, which saves the restored state to LAST. It prints the file that verl's own
manager misses in its own checkpoint, which `save` writes to FOLDER-own. `restore_own` restores that one with
ours. The saves also write `hf_model`.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import get_fsdp_wrap_policy

import shardproof as sp

STRATEGY, ACTION, FOLDER, *LAST = sys.argv[1:]
EXAMPLE = Path(__file__).parents[3] / "examples" / "verl_manager.py"


def sharded(model: LlamaForCausalLM, mesh: DeviceMesh) -> Any:
    if STRATEGY == "fsdp2":
        return fully_shard(model, mesh=mesh)
    return FullyShardedDataParallel(  # verl also sets sync_module_states, which torch refuses on a CPU
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(
            model, {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        ),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
        device_mesh=mesh,
        use_orig_params=False,
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank + 10 * len(LAST))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, architectures=["LlamaForCausalLM"], **sizes))
    model = sharded(model, init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    contents = {"save_contents": ["model", "optimizer", "extra", "hf_model"]}
    manager_class = runpy.run_path(str(EXAMPLE))["ShardproofCheckpointManager"]
    manager = manager_class(model, optimizer, scheduler, checkpoint_config=contents)
    theirs = None if STRATEGY == "fsdp" else contents  # its own export of FSDP1 fails on a CPU
    own = FSDPCheckpointManager(model, optimizer, scheduler, checkpoint_config=theirs)
    if ACTION == "restore_own":
        manager.load_checkpoint(f"{FOLDER}-own")
        sp.save(LAST[0], manager.state(["model", "optimizer", "extra"]))
    elif ACTION == "restore":
        try:
            own.load_checkpoint(f"{FOLDER}-own")
        except FileNotFoundError as error:
            print("own", error.filename)
        manager.load_checkpoint(FOLDER)
        sp.save(LAST[0], manager.state(["model", "optimizer", "extra"]))
    else:
        for _ in range(3):
            tokens = torch.randint(64, (2, 8))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        own.save_checkpoint(f"{FOLDER}-own", global_step=3)
        manager.save_checkpoint(FOLDER, global_step=3, max_ckpt_to_keep=1)
        manager.save_checkpoint(f"{FOLDER}-next", global_step=4, max_ckpt_to_keep=2)
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
