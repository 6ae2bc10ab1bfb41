"""Models under Megatron-FSDP, their training, and their whole state as Megatron-FSDP's collectives find it.

On the CPU, `cpu_stubs` stands in for streams and devices of CUDA. Imports come after its `install`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import cpu_stubs
import torch
import torch.distributed as dist
from peer_result import world_size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from uneven_model import GatedLayer, GatedModel, UnevenModel

cpu_stubs.install(current_device=0)

from megatron_fsdp import fully_shard_model, fully_shard_optimizer  # noqa: E402
from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata  # noqa: E402

from shardproof.layouts import experts as expert_layouts  # noqa: E402

__all__ = ["DEVICE", "sharded_model", "sharded_optimizer", "train", "whole_state"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sharded_model(words: set[str], seed: int, **options: Any) -> Any:
    """A model with random weights.

    Args:
        words: `stage0` to `stage3`; `bfloat16` or `float32`; `dense` for a layer with SwiGLU, and `gated`
            for layers with experts too, which have a mesh of their own; `ep` for two groups of ranks with
            different experts, and `four` for as many experts on each rank; `hybrid` for two groups of ranks
            that replicate each shard, and `outer` for two that divide the optimizer; `tp` for tensor
            parallelism of two ranks by DTensor, and `core` for that by Megatron-Core's attributes.
        seed: of the weights.
        options: for `fully_shard_model`.
    """
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if "bfloat16" in words else torch.float32
    mesh = _mesh(words, options)
    module: nn.Module = UnevenModel()
    if "dense" in words:
        module = GatedModel((), layers=1, bias=False)
    elif "gated" in words:
        options["expt_device_mesh"] = experts = _mesh(words | {"experts"}, options)
        first = 2 * experts.get_coordinate()[0] if "ep" in words else 0
        module = GatedModel(range(4) if "four" in words else range(first, first + 2))
        for layer in module.layers if {"ep", "four"} & words else ():
            expert_layouts.sequential(layer.mlp.experts.local_experts, first=first, total=4)
        with torch.no_grad():  # experts with other numbers have other weights
            for name, parameter in module.named_parameters():
                if "experts" in name:
                    parameter.add_(first / 10)
    if "tp" in words:
        plan = {"a": ColwiseParallel(), "b": ColwiseParallel()}
        parallelize_module(module, mesh["tp"], plan)
    elif "core" in words:
        for name, parameter in module.named_parameters():
            if "linear_fc" in name:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = int("fc2" in name)
    (stage,) = (int(word[-1]) for word in words if word.startswith("stage"))
    model = fully_shard_model(
        module.to(DEVICE, dtype),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[GatedLayer] if {"gated", "dense"} & words else [nn.Linear],
        zero_dp_strategy=stage,
        device=DEVICE,
        calculate_per_token_loss=True,  # gloo has no product with a scale
        **options,
    )
    model._replace_param_with_distributed_if_needed()
    return model


def _mesh(words: set[str], options: dict[str, Any]) -> DeviceMesh:
    """A mesh of all ranks for the dense parameters, or for the experts. Adds what a hybrid mesh needs."""
    is_expert = "experts" in words
    tp = 2 if {"tp", "core"} & words else 1
    if is_expert and "ep" in words:
        return init_device_mesh(DEVICE.type, (2, world_size() // 2, 1), mesh_dim_names=("ep", "dp", "tp"))
    if not {"hybrid", "outer"} & words:
        return init_device_mesh(DEVICE.type, (world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    mesh = init_device_mesh(DEVICE.type, (2, world_size() // 2, 1), mesh_dim_names=("outer", "dp", "tp"))
    both = mesh["outer", "dp"]._flatten("both").get_group()
    options["dp_outer_dim"] = "outer"
    options["outer_dp_sharding_strategy"] = int("outer" in words)
    options["hybrid_fsdp_expt_group" if is_expert else "hybrid_fsdp_group"] = both
    return mesh


def sharded_optimizer(model: Any, lr: float = 1e-2, **options: Any) -> torch.optim.Optimizer:
    """AdamW, after the step with gradients of zero that Megatron-FSDP takes."""
    return fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=lr), **options)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    """Trains, with the same tokens on any number of ranks, and returns the losses."""
    losses = []
    for step in range(first, first + steps):
        tokens = (torch.arange(12, device=DEVICE).reshape(2, 6) * (step + 3)) % 11
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        (loss / world_size()).backward()  # the gradients of all ranks are added
        optimizer.step()
        optimizer.zero_grad()
        model.module.seen += 1
        losses.append(loss.item())
    return losses


def whole_state(
    model: Any, optimizer: Any, state: Mapping[Any, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The state of all ranks, whole, from the positions that Megatron-FSDP's collectives found.

    Args:
        model: the model.
        optimizer: its optimizer.
        state: the state by parameter, if it is not `optimizer.state`.
    """
    buffer = model.param_and_grad_buffer
    state = optimizer.state if state is None else state
    own: dict[str, Any] = {}
    for name, parameter in buffer.optimizer_named_parameters:
        group = buffer.parameter_groups[buffer.param_to_param_group[parameter.orig_param]]
        main, weights = group.main_weight_buffer, group.model_weight_buffer
        local = parameter._local_tensor
        offsets = gather_and_compute_chunk_metadata(parameter).offsets
        stored = {"": local}
        if main is not None:
            raw = parameter.orig_param
            if weights is None:
                stored[""] = raw.data
            else:
                stored[""] = weights.get_item(main.param_idx[raw], only_shard=True).view(local.shape)
            if main.dtype != raw.dtype:
                stored[".master"] = local
        for slot, item in state.get(parameter, {}).items():
            stored[f".{slot}"] = getattr(item, "_local_tensor", item)
        for slot, item in stored.items():
            key = f"optimizer.{_global(model, name)}{slot}" if slot else f"model.{_global(model, name)}"
            whole = list(parameter.shape) if item.dim() else []
            own[key] = (whole, list(offsets) if item.dim() else [], item.detach().clone().cpu())
    for name, item in model.module.named_buffers():
        own[f"model.{name}"] = (list(item.shape), [0] * item.dim(), item.clone().cpu())
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, own)
    found: dict[str, torch.Tensor] = {}
    for of_rank in everyone:
        for key, (shape, offsets, local) in of_rank.items():
            if key not in found:
                found[key] = torch.zeros(shape, dtype=local.dtype) - 77
            box = tuple(slice(at, at + size) for at, size in zip(offsets, local.shape, strict=True))
            found[key][box] = local
    return found


def _global(model: Any, name: str) -> str:
    """A name with the number of its expert in the whole model."""
    first = getattr(model.module, "first_expert", 0)
    return re.sub(r"local_experts\.(\d+)", lambda match: f"local_experts.{int(match[1]) + first}", name)
