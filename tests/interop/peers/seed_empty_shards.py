"""A Megatron-FSDP model with SwiGLU and an offloaded optimizer: `seed_empty_shards.py HOW FOLDER`.

HOW is `upstream` for the functions of Megatron-Core and Megatron-FSDP that describe a state dict, `ours`
for a save by shardproof, `described` for a save by torch of a state dict that shardproof described, and
`load` for a load of what `ours` saved. A rank has no element of some parameters, and no optimizer state
of them.

Megatron-Core's HybridDeviceOptimizer steps through shardproof's adapter, because it fails with DTensors.
`cpu_stubs` and `offload_stubs` say what stands for CUDA and for the device.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import cpu_stubs
import megatron_stubs
import offload_stubs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peer_result import Result, join_ranks, leave_ranks, rank, world_size

megatron_stubs.install(fused=False)
offload_stubs.install()

from fsdp_models import sharded_model, train, whole_state  # noqa: E402

cpu_stubs.install(current_device=0)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_swiglu_in_state_dict  # noqa: E402
from megatron_fsdp import fully_shard_optimizer  # noqa: E402
from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor  # noqa: E402

import shardproof as sp  # noqa: E402
from shardproof.frameworks import megatron_fsdp as adapter  # noqa: E402

WORDS = {"stage3", "bfloat16", "dense"}
PLAIN = {"preproc_state_dict_for_dcp_ckpt": False}


def built(seed: int) -> tuple[Any, Any]:
    model = sharded_model(WORDS, seed, **PLAIN)
    optimizer = adapter.hybrid_device_optimizer(
        model.parameters(),
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        overlap_cpu_optimizer_d2h_h2d=True,
        param_update_in_fp32=True,
        lr=1e-2,
    )
    return model, fully_shard_optimizer(optimizer, **PLAIN)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": adapter.module_state(model), "optimizer": adapter.optimizer_state(optimizer, model)}


def described_upstream(model: Any, optimizer: Any) -> None:
    """What Megatron-Core does before a save: split the fused weights, then gather the positions."""
    names = {id(one): name for name, one in model.module.named_parameters()}
    moments = {f"module.module.{names[id(one)]}": state for one, state in optimizer.state.items()}
    weights = {key.removeprefix("module."): one for key, one in model.state_dict().items()}
    print(f"rank {rank()} describes {len(moments)} parameters", flush=True)
    weights, rest = handle_swiglu_in_state_dict(model, weights, {"state": moments})
    preprocess_state_dict_for_uneven_dtensor({"model": weights, "optimizer": rest})
    print(f"rank {rank()} is back", flush=True)


def main() -> None:
    how, folder = sys.argv[1:]
    join_ranks()
    parallel_state.initialize_model_parallel()  # which names of experts need
    result = Result()
    result.facts["versions"] = [version(name) for name in ("megatron-core", "megatron-fsdp")]
    model, optimizer = built(seed=1 if how == "load" else 0)
    if how == "load":
        sp.load(folder, state_of(model, optimizer), deadline=60)
        optimizer.state_dict()  # shows what the load has changed
    else:
        train(model, optimizer, 2)
    for key, tensor in whole_state(model, optimizer).items():
        result.add_tensor(key, tensor)
    if how == "ours":
        sp.save(folder, state_of(model, optimizer), deadline=60)
    elif how == "described":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(adapter.attach_chunk_metadata(state, model, optimizer), checkpoint_id=folder)
    elif how == "upstream":
        store = dist.distributed_c10d._get_default_store()
        described_upstream(model, optimizer)
        store.set(f"back-{rank()}", "")
        store.wait([f"back-{other}" for other in range(world_size())])
    result.facts["losses"] = train(model, optimizer, 2, first=2)
    leave_ranks(result)


if __name__ == "__main__":
    main()
