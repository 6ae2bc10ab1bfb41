"""Trains with Megatron-FSDP and optimizers on the CPU: `offload_megatron_fsdp.py MODE FOLDER CASE...`.

A case is `name` or `name:words`, with words joined by `-`: those of `fsdp_models.sharded_model`, `masters`
for masters of the optimizer in place of main weights, `decoupled` for decoupled gradients, `pin` for pinned
copies, `overlap`, and one optimizer: `adamw`, `shardproof` for `sp.optim.HybridDeviceOptimizer`, or `half` or
`all` for that part of Megatron-Core's HybridDeviceOptimizer on the CPU. `offload_stubs` says what stands for
the device. Results of a case have its name as prefix.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import cpu_stubs
import megatron_stubs
import offload_stubs
import torch
import torch.distributed.checkpoint as dcp
from collective_count import without_collectives
from peer_result import Result, join_ranks_on_devices, leave_ranks

megatron_stubs.install(fused=False)
offload_stubs.install()

from fsdp_models import sharded_model, train, whole_state  # noqa: E402

cpu_stubs.install(current_device=0)

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # noqa: E402
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_optimizer  # noqa: E402

import shardproof as sp  # noqa: E402
from shardproof.frameworks import megatron_fsdp as adapter  # noqa: E402
from shardproof.state import LAYOUTS, MASTER, local_tensor  # noqa: E402

PLAIN = {"preproc_state_dict_for_dcp_ckpt": False}


def built(words: set[str], seed: int, lr: float = 1e-2) -> tuple[Any, Any]:
    options: dict[str, Any] = dict(PLAIN)
    if "masters" in words:
        options["mixed_precision_policy"] = MixedPrecisionPolicy(main_params_dtype=None)
    model = sharded_model(words, seed, use_decoupled_grad="decoupled" in words, **options)
    parameters = list(model.parameters())
    if "adamw" in words:
        optimizer: Any = torch.optim.AdamW(parameters, lr=lr)
    elif "shardproof" in words:
        master = torch.float32 if "masters" in words else None
        optimizer = sp.optim.HybridDeviceOptimizer(parameters, torch.optim.AdamW, lr=lr, master_dtype=master)
    else:
        optimizer = adapter.hybrid_device_optimizer(
            parameters,
            offload_fraction=1.0 if "all" in words else 0.5,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32="masters" in words,
            overlap_cpu_optimizer_d2h_h2d="overlap" in words,
            pin_cpu_params="pin" in words,
            lr=lr,
        )
    return model, fully_shard_optimizer(optimizer, **PLAIN)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": adapter.module_state(model), "optimizer": adapter.optimizer_state(optimizer, model)}


def whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The whole state, with one name for a master of Megatron-FSDP and of the optimizers."""
    optimizer.state_dict()  # shows what a load has changed
    state = {parameter: dict(slots) for parameter, slots in optimizer.state.items()}
    if isinstance(optimizer, sp.optim.HybridDeviceOptimizer):  # whose state has no masters
        for slots in optimizer.describe_slots():
            if MASTER in slots.tensors:
                state[slots.parameter]["master_param"] = local_tensor(slots.tensors[MASTER])
    found = whole_state(model, optimizer, state)
    return {key.replace(".master_param", ".master"): tensor for key, tensor in found.items()}


def save(path: str, name: str, words: set[str], result: Result) -> None:
    offload_stubs.pinned.clear()
    model, optimizer = built(words, seed=0)
    result.facts[f"{name}.pinned"] = sorted(set(offload_stubs.pinned))
    train(model, optimizer, 2)
    for key, tensor in whole(model, optimizer).items():
        result.add_tensor(f"{name}.{key}", tensor)
    with without_collectives():
        pending = sp.Checkpointer(path).save(2, state_of(model, optimizer))
    losses = train(model, optimizer, 1, first=2)  # writes to all of the memory that the save reads
    pending.result()
    result.facts[f"{name}.losses"] = losses + train(model, optimizer, 1, first=3)


def load(path: str, name: str, words: set[str], result: Result) -> None:
    model, optimizer = built(words, seed=1, lr=0.5)
    with without_collectives():
        assert sp.Checkpointer(path).restore(state_of(model, optimizer)) == 2
    for key, tensor in whole(model, optimizer).items():
        result.add_tensor(f"{name}.{key}", tensor)
    result.facts[f"{name}.losses"] = train(model, optimizer, 2, first=2)
    result.facts[f"{name}.lr"] = [group["lr"] for group in optimizer.param_groups]


def save_dcp(path: str, name: str, words: set[str], result: Result) -> None:
    """By torch. The optimizer's state dict has its positions already."""
    model, optimizer = built(words, seed=0)
    train(model, optimizer, 2)
    for key, tensor in whole(model, optimizer).items():
        result.add_tensor(f"{name}.{key}", tensor)
    state = adapter.attach_chunk_metadata({"model": model.state_dict()}, model, fused={})
    dcp.save({**state, "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    result.facts[f"{name}.losses"] = train(model, optimizer, 2, first=2)
    result.facts[f"{name}.slots"] = sorted({slot for one in optimizer.state.values() for slot in one})


def load_dcp(path: str, name: str, words: set[str], result: Result) -> None:
    model, optimizer = built(words, seed=1, lr=0.5)
    state = adapter.attach_chunk_metadata({"model": model.state_dict()}, model, fused={})
    state["optimizer"] = optimizer.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for key, tensor in whole(model, optimizer).items():
        result.add_tensor(f"{name}.{key}", tensor)
    result.facts[f"{name}.losses"] = train(model, optimizer, 2, first=2)


def model_alone(path: str, name: str, words: set[str], result: Result) -> None:
    """The next step starts from the loaded weights, not from the copies on the CPU."""
    model, optimizer = built(words, seed=1, lr=0.0)
    sp.load(f"{path}/step-00000002", {"model": adapter.module_state(model)}, include="model")
    train(model, optimizer, 1)
    for key, tensor in whole(model, optimizer).items():
        result.add_tensor(f"{name}.{key}", tensor)


def without_gradient(path: str, name: str, words: set[str], result: Result) -> None:
    """A parameter without a gradient stays, also if it had one in the step before."""
    model, optimizer = built(words, seed=0)
    train(model, optimizer, 1)
    before = whole(model, optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.decoupled_grad = None
    optimizer.step()
    after = whole(model, optimizer)
    result.facts[f"{name}.changed"] = [key for key in before if not torch.equal(before[key], after[key])]


def wrong(path: str, name: str, words: set[str], result: Result) -> None:
    """Stores the errors of wrong use, and that of the released class."""
    model, optimizer = built(words, seed=0)
    offload_stubs.pinned.clear()
    options = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW, "lr": 0.1}
    released = HybridDeviceOptimizer(list(model.parameters()), offload_fraction=1.0, **options)
    result.facts[f"{name}.pinned"] = sorted(set(offload_stubs.pinned))
    uses = {
        "released": lambda: fully_shard_optimizer(released, **PLAIN),
        "bare": lambda: sp.save(path, {"model": adapter.module_state(model), "optimizer": optimizer}),
        "group": lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
    }
    for what, use in uses.items():
        try:
            use()
        except Exception as error:
            result.facts[f"{name}.{what}"] = f"{type(error).__name__}: {error}"


def undeclared(path: str, name: str, words: set[str], result: Result) -> None:
    model, _ = built(words, seed=0)
    for module in model.modules():
        module.__dict__.pop(LAYOUTS, None)
    try:
        adapter.module_state(model)
    except sp.StructureError as error:
        result.facts[f"{name}.undeclared"] = str(error)


def main() -> None:
    mode, folder, *cases = sys.argv[1:]
    join_ranks_on_devices()
    result = Result()
    for case in cases:
        name, _, words = case.partition(":")
        globals()[mode](os.path.join(folder, name), name, set((words or name).split("-")), result)
    leave_ranks(result)


if __name__ == "__main__":
    main()
