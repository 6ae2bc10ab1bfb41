"""Trains with Megatron-FSDP, and saves or loads through `shardproof.frameworks.megatron_fsdp`.

    train_megatron_fsdp.py MODE FOLDER CASE...

A case is `name:stage:dtype`; the checkpoint of a case is FOLDER/name. Results are the state of all ranks, put
together by the positions that Megatron-FSDP gathers itself, under `name.<key>`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch
from collective_count import without_collectives
from fsdp_models import sharded_model, sharded_optimizer, train, whole_state
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from uneven_model import UnevenModel

import shardproof as sp
from shardproof.frameworks import dcp
from shardproof.frameworks import megatron_fsdp as adapter
from shardproof.state import collect


def built(stage: int, dtype: torch.dtype, seed: int, hybrid: bool = False) -> tuple[Any, Any]:
    """A sharded model with random weights, and its AdamW. With `hybrid`, two ranks replicate each shard."""
    words = {f"stage{stage}", str(dtype).removeprefix("torch."), "hybrid" if hybrid else ""}
    model = sharded_model(words, seed)
    return model, sharded_optimizer(model, 1e-2 * (1 + seed))


def described(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state tree. The last rank collects one alone first, which would hang in a collective."""
    if rank() == world_size() - 1:
        collect(
            {"model": adapter.module_state(model), "optimizer": adapter.optimizer_state(optimizer, model)}
        )
    return {"model": adapter.module_state(model), "optimizer": adapter.optimizer_state(optimizer, model)}


def save(
    path: str, name: str, stage: int, dtype: torch.dtype, result: Result, *, hybrid: bool = False
) -> None:
    model, optimizer = built(stage, dtype, seed=0, hybrid=hybrid)
    train(model, optimizer, 2)
    add(result, name, whole_state(model, optimizer))
    with without_collectives():
        state = described(model, optimizer)
        pending = sp.Checkpointer(path).save(2, state)
    train(model, optimizer, 2)  # writes to all of the memory that the save reads
    pending.result()
    result.facts[f"{name}.elsewhere"] = sorted(
        part.parameter.shape.numel() for part in adapter._partitions_of(model).values() if part.is_elsewhere
    )


def load(path: str, name: str, stage: int, dtype: torch.dtype, result: Result) -> None:
    model, optimizer = built(stage, dtype, seed=1)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))  # gathers weights, which the load makes stale
    with without_collectives():
        state = described(model, optimizer)
        assert sp.Checkpointer(path).restore(state) == 2
    add(result, name, whole_state(model, optimizer))
    plain = UnevenModel().to(dtype)
    sp.load(f"{path}/step-00000002", {"model": plain}, include="model")
    tokens = torch.arange(11)[None]
    result.facts[f"{name}.output"] = torch.equal(model(tokens), plain(tokens))
    result.facts[f"{name}.lr"] = [group["lr"] for group in optimizer.param_groups]
    train(model, optimizer, 1)


def through_fsdp2(path: str, name: str, stage: int, dtype: torch.dtype, result: Result) -> None:
    """Into an fp32 model of FSDP2, which takes the exact masters, and from there into Megatron-FSDP."""
    torch.manual_seed(2)
    model = UnevenModel()
    fsdp2.fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    there = {"model": model, "optimizer": optimizer}
    sp.load(f"{path}/step-00000002", there, cast=True)
    sp.save(f"{path}/fsdp2", there)
    model, optimizer = built(stage, dtype, seed=3)
    sp.load(f"{path}/fsdp2", described(model, optimizer), cast=True)
    add(result, name, whole_state(model, optimizer))


def model_alone(path: str, name: str, stage: int, dtype: torch.dtype, result: Result) -> None:
    """Masters follow the weights of a load without the optimizer."""
    model, optimizer = built(stage, dtype, seed=4)
    sp.load(f"{path}/step-00000002", {"model": adapter.module_state(model)}, include="model")
    add(result, name, whole_state(model, optimizer))


def wrong(path: str, name: str, stage: int, dtype: torch.dtype, result: Result) -> None:
    """Stores the errors of wrong use."""
    model, optimizer = built(stage, dtype, seed=0)
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    for number, use in enumerate(
        (
            lambda: sp.save(path, {"model": model}),
            lambda: adapter.module_state(model.module),
            lambda: adapter.optimizer_state(other, model),
            lambda: dcp.save({"model": model}, checkpoint_id=path),
            lambda: sp.save(path, {"optimizer": optimizer}),
            lambda: sp.save(path, {"model": model.state_dict()}),
        )
    ):
        try:
            use()
        except sp.ShardproofError as error:
            result.facts[f"{name}.{number}"] = str(error)


def fp8(path: str, name: str, stage: int, dtype: torch.dtype, result: Result) -> None:
    """A group that says that it has fp8 weights stands for those of Transformer Engine, which need CUDA."""
    model, _ = built(stage, dtype, seed=0)
    group = model.param_and_grad_buffer.parameter_groups[0]
    group.dtype = "float8"
    try:
        adapter.module_state(model)
    except sp.StructureError as error:
        result.facts[name] = str(error)


def add(result: Result, name: str, tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        result.add_tensor(f"{name}.{key}", tensor)


MODES = {
    "save": save,
    "save_hybrid": partial(save, hybrid=True),
    "load": load,
    "through_fsdp2": through_fsdp2,
    "model_alone": model_alone,
    "wrong": wrong,
    "fp8": fp8,
}


def main() -> None:
    mode, folder, *cases = sys.argv[1:]
    join_ranks()
    result = Result()
    for case in cases:
        name, stage, dtype = case.split(":")
        MODES[mode](os.path.join(folder, name), name, int(stage), getattr(torch, dtype), result)
    leave_ranks(result)


if __name__ == "__main__":
    main()
