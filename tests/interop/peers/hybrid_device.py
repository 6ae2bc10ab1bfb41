"""Trains with Megatron-Core's HybridDeviceOptimizer and its relatives: `hybrid_device.py RUNS`.

RUNS is a JSON list of runs, in order. Each is a dict of these:

    optimizer   "megatron", "adamw" (torch's), or "ours" (`shardproof.optim.HybridDeviceOptimizer`)
    dtype       of the weights; default "bfloat16"
    fraction    of the elements on the CPU; default 0.5
    in_fp32     whether bfloat16 weights have masters; default true
    overlap     default true
    fused       for "megatron", whether the device's side counts steps in its groups, as Apex's Adam does
    betas       options of the optimizer
    ahead       steps to take before the load
    load        checkpoint to load; `strict` and `cast` are those of `shardproof.load`
    first       number of the first step
    train       steps to take
    save        where to save
    named       true to give the optimizer as `shardproof.OptimizerState(optimizer, module)`
    sharded     "fsdp1" or "fsdp2" of torch, with one group; such a run has no result

The result has the state of the run after the load and at its end, as `<number>.loaded.<key>` and
`<number>.trained.<key>`. An error of shardproof is the fact `<number>`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import megatron_stubs
import offload_stubs
import torch
from peer_result import Result, join_ranks, leave_ranks, world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

megatron_stubs.install(fused=False)
offload_stubs.install()

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # noqa: E402
from megatron_stubs import FusedAdam  # noqa: E402

import shardproof as sp  # noqa: E402
from shardproof.state import slots_of  # noqa: E402

CPU = torch.device("cpu")


def model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3), torch.nn.Linear(3, 2)).to(dtype)


def optimizer_of(kind: str, module: Any, run: dict[str, Any]) -> torch.optim.Optimizer:
    """Two groups with different options."""
    groups: list[dict[str, Any]] = [{"params": list(module.parameters())}]
    if "sharded" not in run:
        groups = [{"params": list(module[0].parameters()), "weight_decay": 0.5}]
        groups += [{"params": [*module[1].parameters(), *module[2].parameters()], "weight_decay": 0.25}]
    options = {"lr": 0.01, **({"betas": tuple(run["betas"])} if "betas" in run else {})}
    fraction, in_fp32, overlap = run.get("fraction", 0.5), run.get("in_fp32", True), run.get("overlap", True)
    if kind == "adamw":
        return torch.optim.AdamW(groups, **options)
    if kind == "ours":
        return sp.optim.HybridDeviceOptimizer(
            groups,
            torch.optim.AdamW,
            cpu_fraction=fraction,
            overlap=overlap,
            master_dtype=torch.float32 if in_fp32 else None,
            fused=False,  # as torch's AdamW, with which bits are compared
            **options,
        )
    return HybridDeviceOptimizer(
        groups,
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=FusedAdam if run.get("fused") else torch.optim.AdamW,
        param_update_in_fp32=in_fp32,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        **options,
    )


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps with gradients that depend on the step only, and are exact in bfloat16."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def described(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every weight and every slot, by the keys of a checkpoint."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {f"model.{name}": parameter.detach().clone() for name, parameter in module.named_parameters()}
    for slots in slots_of(optimizer):
        for slot, item in slots.tensors.items():
            found[f"optimizer.{names[id(slots.parameter)]}.{slot}"] = item.detach().clone()
    return found


def save_sharded(module: torch.nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]) -> None:
    for _ in range(run.get("ahead", 0)):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    sp.save(run["save"], {"model": module, "optimizer": optimizer})


def train_and_save(number: int, run: dict[str, Any], result: Result) -> None:
    module = model(getattr(torch, run.get("dtype", "bfloat16")))
    if "sharded" in run:
        is_old = run["sharded"] == "fsdp1"
        module = (
            FullyShardedDataParallel(module, device_id=CPU)
            if is_old
            else fully_shard(module, mesh=init_device_mesh("cpu", (world_size(),)))
        )
    optimizer = optimizer_of(run["optimizer"], module, run)
    given = sp.OptimizerState(optimizer, module) if run.get("named") else optimizer
    state = {"model": module, "optimizer": given}
    if "sharded" in run:
        save_sharded(module, optimizer, run)
        return
    train(module, optimizer, 100, run.get("ahead", 0))
    if "load" in run:
        sp.load(run["load"], state, strict=run.get("strict", True), cast=run.get("cast", False))
    for key, item in described(module, optimizer).items():
        result.add_tensor(f"{number}.loaded.{key}", item)
    train(module, optimizer, run.get("first", 0), run.get("train", 0))
    if "save" in run:
        sp.save(run["save"], state)
    for key, item in described(module, optimizer).items():
        result.add_tensor(f"{number}.trained.{key}", item)
    result.objects[f"{number}.options"] = str(optimizer.param_groups)


def main() -> None:
    join_ranks()
    result = Result()
    for number, run in enumerate(json.loads(sys.argv[1])):
        try:
            train_and_save(number, run, result)
        except sp.ShardproofError as error:
            result.facts[str(number)] = f"{type(error).__name__}: {error}"
    leave_ranks(result)


if __name__ == "__main__":
    main()
