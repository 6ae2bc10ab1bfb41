"""Trains transformers' models with the training parts: `train_zoo.py save|load FOLDER PART... -- MODEL...`.

`save` takes two steps, saves, and takes two more. `load` begins with other weights, loads that checkpoint,
saves it again, and takes the two steps. Both save the end. The facts are the losses of the last two steps, of
all samples, by part and model. All models run in turn in one process group.

Each batch has six samples, which the ranks divide. Epsilon is large, so that AdamW does not turn the rounding
of a gradient near zero into a step of full size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import transformers
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardproof as sp
from shardproof.fsdp import fully_shard
from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SIZES | ROUTED),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **SIZES,
            **ROUTED,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **{
                name: value
                for name, value in SIZES.items()
                if name not in ("num_key_value_heads", "head_dim")
            },
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "vit": (
        "ViTForImageClassification",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        | {"image_size": 16, "patch_size": 8, "num_labels": 5},
    ),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
    ),
}
"""Class and configuration of each model."""


def make_model(name: str, seed: int) -> nn.Module:
    kind, options = MODELS[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(seed)
    return model_class(model_class.config_class(**options)).train()


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of the model: the modules of its outermost lists."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    outer = [part for name, part in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return [block for part in outer for block in part]


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    for block in blocks(model):
        torch_fsdp.fully_shard(block, mesh=mesh)
    torch_fsdp.fully_shard(model, mesh=mesh)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def fsdp(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def distributed(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return DistributedOptimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-3)


def hybrid(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    fsdp(model, mesh)
    return HybridDeviceOptimizer(model.parameters(), torch.optim.AdamW, cpu_fraction=0.5, lr=1e-2, eps=1e-3)


PARTS: dict[str, Callable[[nn.Module, DeviceMesh], torch.optim.Optimizer]] = {
    "fsdp2": fsdp2,
    "fsdp": fsdp,
    "distributed": distributed,
    "hybrid": hybrid,
}


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    """This rank's samples of a step."""
    generator = torch.Generator().manual_seed(step)
    samples = slice(rank() * 6 // world_size(), (rank() + 1) * 6 // world_size())
    if name == "vit":
        pixels = torch.randn(6, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels[samples], "labels": torch.arange(6)[samples] % 5}
    tokens = torch.randint(1, 64, (6, 8), generator=generator)[samples]
    return {"input_ids": tokens, "labels": tokens}


def step(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One step. Returns the loss of all samples."""
    loss = model(**batch(name, number)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / world_size()


def run(action: str, part: str, name: str, folder: Path, mesh: DeviceMesh) -> list[float]:
    model = make_model(name, seed=int(action == "load"))
    optimizer = PARTS[part](model, mesh)
    state = {"model": model, "optimizer": optimizer}
    if action == "save":
        for number in range(2):
            step(name, model, optimizer, number)
        sp.save(folder / "saved", state)
    else:
        sp.load(folder / "saved", state)
        sp.save(folder / "loaded", state)
    losses = [step(name, model, optimizer, number) for number in (2, 3)]
    sp.save(folder / ("whole" if action == "save" else "continued"), state)
    return losses


def main() -> None:
    action, folder, *names = sys.argv[1:]
    at = names.index("--")
    join_ranks()
    result = Result()
    mesh = init_device_mesh("cpu", (world_size(),))
    for part in names[:at]:
        for name in names[at + 1 :]:
            result.facts[f"{part}.{name}"] = run(action, part, name, Path(folder) / part / name, mesh)
    leave_ranks(result)


if __name__ == "__main__":
    main()
