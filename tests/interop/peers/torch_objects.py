"""Saves or loads the training state of torchao, torchdata, schedulefree and peft with shardproof.

    torch_objects.py save KIND CHECKPOINT
    torch_objects.py load KIND CHECKPOINT

Both write every tensor and value of the state, as the packages have them on all ranks. `load` begins with
other weights, and takes one more training step at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
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


def low_bit(
    name: str, build: Callable[[int], nn.Module] = sharded, compiled: bool = False
) -> Callable[[int], State]:
    """A model with one of torchao's optimizers. Compiled steps take minutes."""

    def make(seed: int) -> State:
        import torchao.optim

        import shardproof.frameworks.torchao  # noqa: F401

        if not compiled:
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


def schedule_free(seed: int) -> State:
    """An optimizer that keeps other weights for training than for evaluation."""
    import schedulefree

    model = sharded(seed)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=3)
    if seed == 0:
        optimizer.train()  # a load brings the mode, with the weights of that mode
    return {"model": model, "optimizer": optimizer}


def adapters(seed: int) -> State:
    """Adapters of LoRA on a frozen model, which is the same in every run and is not saved."""
    from peft import LoraConfig, get_peft_model

    base = network(0)
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"]))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {"model": model, "optimizer": torch.optim.AdamW(trained.values(), lr=1e-2)}


KINDS: dict[str, Callable[[int], State]] = {
    "AdamW8bit": low_bit("AdamW8bit"),
    "AdamW4bit": low_bit("AdamW4bit"),
    "AdamWFp8": low_bit("AdamWFp8"),
    "AdamW8bit compiled": low_bit("AdamW8bit", compiled=True),
    "AdamW4bit compiled": low_bit("AdamW4bit", compiled=True),
    "AdamWFp8 compiled": low_bit("AdamWFp8", compiled=True),
    "AdamW8bit columns": low_bit("AdamW8bit", columns),
    "float8": float8,
    "Int8WeightOnlyConfig": quantised("Int8WeightOnlyConfig"),
    "Int8DynamicActivationInt8WeightConfig": quantised("Int8DynamicActivationInt8WeightConfig"),
    "Float8WeightOnlyConfig": quantised("Float8WeightOnlyConfig"),
    "schedulefree": schedule_free,
    "peft": adapters,
    "AdamW8bit cut": low_bit("AdamW8bit", lambda seed: sharded(seed, rows=101)),
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


def saved(kind: str, state: State) -> State:
    """The part of the state that is saved."""
    model, optimizer = state["model"], state.get("optimizer")
    if kind == "peft":
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        state = {"adapter": trained, "optimizer": sp.OptimizerState(optimizer, model)}
    return state


def data_loader(result: Result, action: str, checkpoint: str) -> None:
    """Batches after the third of a loader with two workers, whose state each rank has saved in between."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(range(64), num_replicas=world_size(), rank=rank(), seed=1)
    loader = StatefulDataLoader(range(64), batch_size=4, sampler=sampler, num_workers=2)
    state = {"data": sp.PerRank(loader)}
    batches = iter(())
    if action == "save":
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        sp.save(checkpoint, state)
    else:
        sp.load(checkpoint, state)
        batches = iter(loader)
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, [batch.tolist() for batch in batches])
    result.add_object("batches", gathered)


def main() -> None:
    action, kind, checkpoint = sys.argv[1:]
    join_ranks()
    result = Result()
    if kind == "data loader":
        data_loader(result, action, checkpoint)
        leave_ranks(result)
    state = KINDS[kind](0 if action == "save" else 1)
    if action == "save":
        for _ in range(2):
            step(state)
        sp.save(checkpoint, saved(kind, state))
    else:
        sp.load(checkpoint, saved(kind, state))
    for name, tensor in tensors_of(state).items():
        result.add_tensor(name, tensor)
    result.facts["keys"] = sorted(sp.open(checkpoint).keys())
    step(state)
    for name, tensor in tensors_of(state).items():
        result.add_tensor(f"a step later: {name}", tensor)
    leave_ranks(result)


if __name__ == "__main__":
    main()
