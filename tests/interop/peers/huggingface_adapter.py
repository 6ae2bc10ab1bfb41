"""Trains a sharded model from files to files: `huggingface_adapter.py WAY SOURCE EXPORT [DTYPE|kill]`.

WAY is how the ranks share the model: fsdp, tensor, both or whole. The model begins on the meta device. The
result has the tensors of `from_pretrained(SOURCE)` (reference), of the sharded model after `load_pretrained`
(loaded) and after a step (trained), and of `from_pretrained(EXPORT)` (opened). With "kill", the process kills
itself while it exports.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import shardproof as sp
from shardproof.frameworks.huggingface import load_pretrained, save_pretrained

way, source, export = sys.argv[1:4]
option = sys.argv[4] if len(sys.argv) > 4 else None
dtype = None if option in (None, "kill") else getattr(torch, option)


def shard(model: Any) -> None:
    if way == "both":
        mesh = init_device_mesh("cpu", (2, world_size() // 2), mesh_dim_names=("data", "tensor"))
        shard_tensors(model, mesh["tensor"])
        shard_layers(model, mesh["data"])
    elif way == "tensor":
        shard_tensors(model, init_device_mesh("cpu", (world_size(),)))
    elif way == "fsdp":
        shard_layers(model, init_device_mesh("cpu", (world_size(),)))


def shard_layers(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_tensors(model: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name, _ in model.named_modules():
        match name.rpartition(".")[2]:
            case "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj":
                plan[name] = ColwiseParallel()
            case "o_proj" | "down_proj":
                plan[name] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):  # experts, joined
            for name, axis in (("gate_up_proj", 1), ("down_proj", 2)):
                whole = distribute_tensor(getattr(module, name).data, mesh, [Shard(axis)])
                setattr(module, name, torch.nn.Parameter(whole))
    model.tie_weights()


def step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    if way == "tensor" and any(hasattr(module, "gate_up_proj") for module in model.modules()):
        for parameter in model.parameters():  # the forward of joined experts knows no tensor parallelism
            parameter.grad = torch.ones_like(parameter)
    else:
        torch.manual_seed(1)
        tokens = torch.randint(97, (2, 16))
        model(tokens).logits.float().square().mean().backward()
    optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def add(result: Result, kind: str, model: Any) -> None:
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        result.add_tensor(f"{kind}.{name}", whole(tensor))


def kill_in_conversion(event: sp.events.Event) -> None:
    if event.operation.startswith("convert") and event.phase == "verify":
        os.kill(os.getpid(), signal.SIGKILL)


join_ranks()
result = Result()
options = {} if dtype is None else {"dtype": dtype}
add(result, "reference", AutoModelForCausalLM.from_pretrained(source, **options))
with torch.device("meta"):
    config = AutoConfig.from_pretrained(
        source, experts_implementation="eager"
    )  # the other needs aligned sizes
    model = AutoModelForCausalLM.from_config(config)
shard(model)
report = load_pretrained(model, source, dtype=dtype)
add(result, "loaded", model)
step(model)
add(result, "trained", model)
if option == "kill":
    sp.events.subscribe(kill_in_conversion)
save_pretrained(model, export, max_file_bytes=20_000)

tensors = [*model.parameters(), *model.buffers()]
held = sum((t.to_local() if isinstance(t, DTensor) else t).untyped_storage().nbytes() for t in tensors)
counts: list[Any] = [None] * world_size()
dist.all_gather_object(counts, (report.bytes, report.needed, held))
result.facts["bytes"], result.facts["needed"], result.facts["held"] = zip(*counts, strict=True)
if rank() == 0:
    opened, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True, **options)
    add(result, "opened", opened)
    result.facts["info"] = {kind: sorted(map(str, info[kind])) for kind in info if kind.endswith("_keys")}
    result.facts["tied"] = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    result.facts["transformers"] = transformers.__version__
leave_ranks(result)
