"""Trains with DeepSpeed, and saves or loads through `shardproof.frameworks.deepspeed`.

    train_deepspeed.py MODE FOLDER CASE...

A case is `name:stage:dtype`; the checkpoints of a case are in FOLDER/name. Results are the state of the ranks
as DeepSpeed's own gathering functions give it, under `name.<key>`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from uneven_model import UnevenModel

import shardproof as sp
from shardproof.frameworks import dcp
from shardproof.frameworks import deepspeed as adapter
from shardproof.frameworks.shared.zero_blocks import BlockOptimizer
from shardproof.state import collect

PRECISION = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "offload": {"bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}},
}


def built(stage: int, dtype: str, seed: int, lr: float = 1e-2, sub_group: int = 100) -> Any:
    """An engine with random weights, and AdamW with two groups."""
    torch.manual_seed(seed)
    model = UnevenModel()
    matrices = [item for item in model.parameters() if item.requires_grad and item.dim() > 1]
    vectors = [item for item in model.parameters() if item.requires_grad and item.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": sub_group,
            "stage3_param_persistence_threshold": 20,
            **({"offload_optimizer": {"device": "cpu"}} if dtype == "offload" else {}),
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": lr, "warmup_num_steps": 9}},
        **PRECISION[dtype],
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=lr), config=config, dist_init_required=False
    )
    return engine


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        tokens = (torch.arange(12).reshape(2, 6) * (step + 3) + rank()) % 11
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        engine.module.seen += 1


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """The state of all ranks, whole, by DeepSpeed's own functions."""
    zero = engine.optimizer
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False  # 0.19.8 links the first group alone
        zero._lazy_init_hp_params_optimizer_state()
    found: dict[str, torch.Tensor] = {"model.seen": engine.module.seen.clone()}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"model.{name}"] = parameter.detach().clone()
        if parameter.requires_grad:
            found[f"optimizer.{name}.master"] = safe_get_full_fp32_param(parameter).clone()
            for slot in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.{name}.{slot}"] = safe_get_full_optimizer_state(parameter, slot).clone()
    return found


def scalars(engine: Any) -> dict[str, Any]:
    base = engine.optimizer.optimizer
    return {
        "steps": sorted({float(state["step"]) for state in base.state.values()}),
        "lr": engine.get_lr(),
        "scheduler": engine.lr_scheduler.state_dict(),
        "scale": engine.optimizer.loss_scaler.cur_scale,
        "iteration": getattr(engine.optimizer.loss_scaler, "cur_iter", None),
        "counts": [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps],
    }


def save(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """The last rank collects a state alone first, which would hang in a collective."""
    engine = built(stage, dtype, seed=0)
    train(engine, 3)
    add(result, name, whole_state(engine))
    result.facts[name] = scalars(engine)
    if rank() == world_size() - 1:
        collect(adapter.engine_state(engine))
    adapter.save_checkpoint(engine, path, client_state={"epoch": 3})
    engine.save_checkpoint(f"{path}/own", client_state={"epoch": 3, "note": {"seed": 7}})
    pending = sp.Checkpointer(f"{path}/run").save(3, adapter.engine_state(engine))
    train(engine, 2)  # writes to all of the memory that the save reads
    pending.result()


def load(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    engine = built(stage, dtype, seed=1, lr=0.5)
    tokens = torch.arange(11)[None]
    with torch.no_grad():
        engine(tokens)  # gathers weights, which the load makes stale
    assert sp.Checkpointer(f"{path}/run").restore(adapter.engine_state(engine)) == 3
    overlapped = whole_state(engine) | {"output": engine(tokens).detach()}
    engine = built(stage, dtype, seed=2, lr=0.5)
    assert adapter.load_checkpoint(engine, path) == (f"{path}/global_step3", {"epoch": 3})
    found = whole_state(engine) | {"output": engine(tokens).detach()}
    assert all(torch.equal(found[key], overlapped[key]) for key in found)
    plain = UnevenModel().to(torch.bfloat16 if dtype == "offload" else getattr(torch, dtype))
    sp.load(f"{path}/global_step3", {"model": plain}, include="model")
    result.facts[f"{name}.output"] = torch.equal(found.pop("output"), plain(tokens))
    add(result, name, found)
    result.facts[name] = scalars(engine)
    train(engine, 1)


def load_files(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """A checkpoint that DeepSpeed wrote, at another stage and on other ranks."""
    engine = built(stage, dtype, seed=5, lr=0.5)
    client = {"epoch": 3, "note": {"seed": 7}}
    assert adapter.load_checkpoint(engine, f"{path}/own") == (f"{path}/own/global_step3", client)
    add(result, name, whole_state(engine))
    result.facts[name] = scalars(engine)
    train(engine, 1)


def through_fsdp2(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """Into an fp32 model of FSDP2, which takes the exact masters, and from there into an engine."""
    model = UnevenModel()
    fsdp2.fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    trained = [item for item in model.parameters() if item.requires_grad]
    matrices, vectors = ([item for item in trained if (item.dim() > 1) == wide] for wide in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    there = {"model": model, "optimizer": optimizer}
    sp.load(f"{path}/global_step3", there, include=["model", "optimizer"], cast=True)
    sp.save(f"{path}/fsdp2", there)
    engine = built(stage, dtype, seed=3)
    state = adapter.engine_state(engine)
    sp.load(f"{path}/fsdp2", state, include=["model", "optimizer"], cast=True)
    add(result, name, whole_state(engine))


def model_alone(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """Masters follow the weights of a load without the optimizer."""
    engine = built(stage, dtype, seed=4)
    train(engine, 1)
    sp.load(f"{path}/global_step3", adapter.engine_state(engine), include="model")
    add(result, name, whole_state(engine))


def wrong(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """Stores the errors of wrong use."""
    model = UnevenModel()
    trained = [item for item in model.parameters() if item.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for item in trained:
        item.grad = torch.zeros_like(item)
    optimizer.step()
    optimizer.state[model.b.weight]["step"] += 4
    sp.save(path, {"model": model, "optimizer": optimizer})
    engine = built(stage, dtype, seed=0)
    for number, use in enumerate(
        (
            lambda: adapter.engine_state(built(0, dtype, seed=0)),
            lambda: sp.load(path, adapter.engine_state(engine), include=["model", "optimizer"]),
        )
    ):
        try:
            use()
        except sp.ShardproofError as error:
            result.facts[f"{name}.{number}"] = str(error)


def bare(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """Stores the errors of the optimizer without its engine, and saves as they advise."""
    engine = built(stage, dtype, seed=0)
    train(engine, 1)
    zero = engine.optimizer
    for way, save in {
        "itself": lambda: sp.save(f"{path}-bare", {"optimizer": zero}, deadline=60),
        "named": lambda: sp.save(f"{path}-bare", {"it": sp.OptimizerState(zero, engine.module)}, deadline=60),
        "dcp": lambda: dcp.save({"optimizer": zero}, checkpoint_id=f"{path}-bare"),
    }.items():
        try:
            save()
        except sp.ShardproofError as error:
            result.facts[f"{name}.{way}"] = str(error)
    sp.save(f"{path}-state", adapter.engine_state(engine))
    adapter.save_checkpoint(engine, f"{path}-run")


def again(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """A job that ended between the commit of a tag and ``latest`` resumes, and saves the tag again."""
    engine = built(stage, dtype, seed=0)
    train(engine, 1)
    adapter.save_checkpoint(engine, path)
    train(engine, 1)
    adapter.save_checkpoint(engine, path, save_latest=False)
    resumed = built(stage, dtype, seed=1)
    assert adapter.load_checkpoint(resumed, path) == (f"{path}/global_step1", {})
    train(resumed, 1)
    adapter.save_checkpoint(resumed, path)
    loaded = built(stage, dtype, seed=2)
    assert adapter.load_checkpoint(loaded, path) == (f"{path}/global_step2", {})
    before, after = whole_state(resumed), whole_state(loaded)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    if rank() == 0:
        os.remove(f"{path}/latest")
        os.mkdir(f"{path}/latest")  # rank 0 cannot replace a folder by a file
    cause = "rank 0 could not write latest"
    result.facts[name] = error_of(lambda: adapter.save_checkpoint(resumed, path), cause)


def other_format(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """Rank 0 alone finds the format. Rank 1 would find another one."""
    engine = built(stage, dtype, seed=0)
    train(engine, 1)
    adapter.save_checkpoint(engine, path)
    find = adapter.is_of_deepspeed
    adapter.is_of_deepspeed = find if rank() == 0 else (lambda _: True)
    loaded = built(stage, dtype, seed=1)
    assert adapter.load_checkpoint(loaded, path) == (f"{path}/global_step1", {})
    before, after = whole_state(engine), whole_state(loaded)
    assert all(torch.equal(before[key], after[key]) for key in before)
    tag = "nothing" if rank() == 0 else "global_step1"
    cause = "rank 0 found no checkpoint"
    result.facts[name] = error_of(lambda: adapter.load_checkpoint(loaded, path, tag=tag), cause)


def unreadable(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """Rank 1 cannot open the files that DeepSpeed wrote."""
    engine = built(stage, dtype, seed=0)
    train(engine, 1)
    engine.save_checkpoint(path)
    if rank() == 1:
        sp.open = None
    cause = "rank 1 could not open the files"
    result.facts[name] = error_of(lambda: adapter.load_checkpoint(engine, path), cause)


def unfit(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """Rank 1 fails between two meetings: where it matches the optimizer, and where it attaches the state."""
    engine = built(stage, dtype, seed=0)
    train(engine, 1)
    engine.save_checkpoint(path)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for a slot")

    result.facts[name] = []
    match, finish = BlockOptimizer.receive_slots, adapter._Engine.load_state_dict
    for kind, method in ((BlockOptimizer, "receive_slots"), (adapter._Engine, "load_state_dict")):
        if rank() == 1:
            setattr(kind, method, fail)
        cause = f"rank 1 failed in {method}"
        result.facts[name].append(error_of(lambda: adapter.load_checkpoint(engine, path), cause))
        BlockOptimizer.receive_slots, adapter._Engine.load_state_dict = match, finish
    adapter.load_checkpoint(engine, path)


def before_a_step(path: str, name: str, stage: int, dtype: str, result: Result) -> None:
    """What DeepSpeed's function for optimizer state does after a load, before the first step."""
    engine = built(stage, dtype, seed=0)
    train(engine, 1)
    adapter.save_checkpoint(engine, path)
    engine.save_checkpoint(f"{path}/own")
    for loaded, load in (
        ("theirs", lambda other: other.load_checkpoint(f"{path}/own")),
        ("ours", lambda other: adapter.load_checkpoint(other, path)),
    ):
        other = built(stage, dtype, seed=1)
        load(other)
        # The part of that function before its collective, which a rank without this error would wait in.
        fragments = [getattr(item, "_hp_mapping", None) for item in other.module.parameters()]
        try:
            found = [item.get_hp_fragment("exp_avg") for item in fragments if item is not None]
            result.facts[f"{name}.{loaded}"] = len(found)
        except TypeError as error:
            result.facts[f"{name}.{loaded}"] = str(error)
        if stage < 3:
            other.optimizer._lazy_init_hp_params_optimizer_state()
            found = [item.get_hp_fragment("exp_avg") for item in fragments if item is not None]
            result.facts[f"{name}.{loaded}.linked"] = len(found)


def error_of(call: Callable[[], Any], cause: str) -> str:
    """The message of the error that this rank raises."""
    try:
        call()
    except sp.ShardproofError as error:
        return str(error)
    raise AssertionError(f"rank {rank()} does not know that {cause}")


def add(result: Result, name: str, tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        result.add_tensor(f"{name}.{key}", tensor)


MODES = {
    "save": save,
    "load": load,
    "load_files": load_files,
    "through_fsdp2": through_fsdp2,
    "model_alone": model_alone,
    "wrong": wrong,
    "bare": bare,
    "again": again,
    "other_format": other_format,
    "unreadable": unreadable,
    "unfit": unfit,
    "before_a_step": before_a_step,
}


def main() -> None:
    mode, folder, *cases = sys.argv[1:]
    join_ranks()
    # The operator is compiled, and a rank that is killed meanwhile leaves a lock that the next run waits for.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    result = Result()
    for case in cases:
        name, stage, dtype = case.split(":")
        MODES[mode](os.path.join(folder, name), name, int(stage), dtype, result)
    leave_ranks(result)


if __name__ == "__main__":
    main()
