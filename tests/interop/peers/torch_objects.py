"""Saves or loads the training state of torchao, torchdata, schedulefree and peft with shardproof.

    torch_objects.py save KIND CHECKPOINT
    torch_objects.py load KIND CHECKPOINT

Both write every tensor and value of the state, as the packages hold them on all ranks. `load` begins with
other weights, and takes one more training step at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, world_size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardproof as sp

State = dict[str, Any]
WIDTH = 256


def network(seed: int, rows: int = 128) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, rows), nn.GELU(), nn.Linear(rows, WIDTH))


def sharded(seed: int, rows: int = 128) -> nn.Sequential:
    model = network(seed, rows)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    return model


def step(state: State) -> None:
    """One optimizer step, whose gradients do not depend on the number of ranks."""
    if "optimizer" not in state:
        return
    state["model"](torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def low_bit(name: str, build: Callable[[int], nn.Module] = sharded) -> Callable[[int], State]:
    """A model with one of torchao's optimizers. Its steps run without compilation, which takes minutes."""

    def make(seed: int) -> State:
        import torchao.optim

        import shardproof.frameworks.torchao  # noqa: F401

        torch.compile = lambda function, **_: function  # type: ignore[assignment]
        model = build(seed)
        return {"model": model, "optimizer": getattr(torchao.optim, name)(model.parameters(), lr=1e-2)}

    return make


def columns(seed: int) -> nn.Module:
    """FSDP2 over tensor parallelism, on the first and the second dimension, if there are ranks for both."""
    model = network(seed, rows=512)
    mesh = init_device_mesh("cpu", (world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def quantised(config: str) -> Callable[[int], State]:
    """A model whose weights torchao has quantised for inference, the same on all ranks."""

    def make(seed: int) -> State:
        import torchao.quantization

        import shardproof.frameworks.torchao  # noqa: F401

        model = network(seed).to(torch.bfloat16)
        torchao.quantization.quantize_(model, getattr(torchao.quantization, config)())
        return {"model": model}

    return make


def float8(seed: int) -> State:
    """A model of float8 layers whose sharded weights are cast before FSDP2 gathers them."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = network(seed)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


KINDS: dict[str, Callable[[int], State]] = {
    "AdamW8bit": low_bit("AdamW8bit"),
    "AdamW4bit": low_bit("AdamW4bit"),
    "AdamWFp8": low_bit("AdamWFp8"),
    "AdamW8bit columns": low_bit("AdamW8bit", columns),
    "float8": float8,
    "Int8WeightOnlyConfig": quantised("Int8WeightOnlyConfig"),
    "Int8DynamicActivationInt8WeightConfig": quantised("Int8DynamicActivationInt8WeightConfig"),
    "Float8WeightOnlyConfig": quantised("Float8WeightOnlyConfig"),
    "AdamW8bit cut": low_bit("AdamW8bit", lambda seed: sharded(seed, rows=300)),
}


def whole(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a tensor on all ranks: those of shards of rows in the order of the ranks.

    For other shards of low-bit state it is the tensor that the state stands for.
    """
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if not hasattr(local, "__tensor_flatten__"):
        return {"": tensor.full_tensor() if isinstance(tensor, DTensor) else local}
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1:
        like = tensor.device_mesh, tensor.placements
        floats = DTensor.from_local(local.dequantize(), *like, shape=tensor.shape, stride=tensor.stride())
        return {".dequantised": floats.full_tensor()}
    parts = {}
    for name in local.__tensor_flatten__()[0]:
        part = getattr(local, name).flatten()
        if isinstance(tensor, DTensor) and name != "qmap":
            gathered: list[Any] = [None] * world_size()
            dist.all_gather_object(gathered, part.view(torch.uint8))
            part = torch.cat(gathered).view(part.dtype)
        parts[f".{name}"] = part
    return parts


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in state["model"].named_parameters():
        slots = state["optimizer"].state.get(parameter, {}) if "optimizer" in state else {}
        for key, value in {name: parameter, **{f"{name}.{slot}": slots[slot] for slot in slots}}.items():
            found |= {f"{key}{part}": tensor for part, tensor in whole(value).items()}
    return found


def main() -> None:
    action, kind, checkpoint = sys.argv[1:]
    join_ranks()
    result = Result()
    state = KINDS[kind](0 if action == "save" else 1)
    if action == "save":
        for _ in range(2):
            step(state)
        sp.save(checkpoint, state)
    else:
        sp.load(checkpoint, state)
    tensors = tensors_of(state)
    for name, tensor in tensors.items():
        result.add_tensor(name, tensor)
    result.facts["keys"] = sorted(sp.open(checkpoint).keys())
    step(state)
    leave_ranks(result)


if __name__ == "__main__":
    main()
