"""A GPT of Megatron-Core in its wrapper of Megatron-FSDP: `train_megatron_fsdp_gpt.py MODE FOLDER CASE...`.

The optimizer is offloaded to the CPU, with every option on: `optimizer_cpu_offload` with
`optimizer_offload_fraction=1`, `overlap_cpu_optimizer_d2h_h2d`, `use_precision_aware_optimizer`,
`megatron_fsdp_use_decoupled_grad`, and gradients and parameters communicated in the background. A case is
`name` or `name:words`, with words joined by `-`: `pin` for `pin_cpu_params`, and `stage1` to `stage3`; `moe`
for experts, and `ep` for experts over two ranks; `tp` for tensor parallelism over two ranks; `undeclared` to
declare neither; `fp8` for layers and fp8 weights of Transformer Engine.

`megatron_stubs`, `offload_stubs` and this script stand for CUDA: meshes of `cuda` are of `cpu`, so that gloo
serves them, and the wrapper is told that the current device has the number 0.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import cpu_stubs
import megatron_stubs
import offload_stubs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peer_result import Result, join_ranks_on_devices, leave_ranks
from torch.distributed.device_mesh import DeviceMesh

megatron_stubs.install(fused=False)
offload_stubs.install()
_from_group = DeviceMesh.from_group


def on_cpu(group: Any, device_type: str, *args: Any, **options: Any) -> DeviceMesh:
    return _from_group(group, "cpu", *args, **options)


if not torch.cuda.is_available():
    DeviceMesh.from_group = staticmethod(on_cpu)

import megatron_gpt  # noqa: E402
from fsdp_models import DEVICE, whole_state  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.fsdp_dtensor_checkpoint import (  # noqa: E402
    expert_param_local_key,
    handle_experts_in_state_dict,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import shardproof as sp  # noqa: E402
from shardproof.frameworks import megatron_fsdp as adapter  # noqa: E402

STAGES = {"stage1": "optim", "stage2": "optim_grads", "stage3": "optim_grads_params"}
PARALLEL = {"ep": "expert_model_parallel_size", "tp": "tensor_model_parallel_size"}
EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_router_topk": 2}
METADATA = {"distrib_optim_sharding_type": "fsdp_dtensor"}


def built(words: set[str], seed: int) -> tuple[Any, Any]:
    """The wrapped model and its optimizer."""
    torch.manual_seed(seed)
    layout = {name: 2 for word, name in PARALLEL.items() if word in words}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**layout)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        calculate_per_token_loss=True,  # gloo has no product with a scale
        **layout,
        **({"fp8": "hybrid", "fp8_param": True} if "fp8" in words else {}),
        **(EXPERTS if {"moe", "ep"} & words else {}),
    )
    (stage,) = (STAGES[word] for word in words if word in STAGES)
    sharding = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=stage,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        megatron_fsdp_use_decoupled_grad=True,
    )
    cpu_stubs.install(current_device=0)
    module = megatron_gpt._model(config, None, engine="fp8" in words)
    if "undeclared" not in words:
        megatron_gpt.declare(module)
    model = FullyShardedDataParallel(config, sharding, module, device=DEVICE)
    cpu_stubs.install(current_device="cpu")
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=0.0,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            overlap_cpu_optimizer_d2h_h2d=True,
            use_precision_aware_optimizer=True,
            pin_cpu_params="pin" in words,
        ),
        [model],
    )
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> list[float]:
    """Trains, with the same tokens on any number of ranks, and returns the losses."""
    losses = []
    for step in range(first, first + steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        output, loss_of = megatron_gpt._forward(iter([megatron_gpt._batch(step, 0)]), model)
        loss, _ = loss_of(output)
        (loss / parallel_state.get_data_parallel_world_size()).backward()
        model.finish_grad_sync()
        assert optimizer.step()[0]
        losses.append(loss.item())
    return losses


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": adapter.module_state(model), "optimizer": adapter.optimizer_state(optimizer, model)}


def raw_state(model: Any, optimizer: Any, is_loading: bool = False) -> dict[str, Any]:
    """The state dict that Megatron-Core makes for `fsdp_dtensor`."""
    weights = model.state_dict_for_save_checkpoint()
    weights = {key: item for key, item in weights.items() if not key.endswith("_extra_state")}
    return {
        "model": handle_experts_in_state_dict(weights, model.config.num_moe_experts),
        "optimizer": optimizer.sharded_state_dict({}, is_loading, metadata=METADATA),
    }


def add(result: Result, name: str, model: Any, optimizer: Any) -> None:
    optimizer.optimizer.state_dict()  # shows what a load has changed
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    for key, tensor in whole_state(model.module, optimizer.optimizer).items():
        if "linear_fc1" in key and tensor.dim():  # the gate and the up projection of each rank
            tensor = tensor.unflatten(0, (ranks, 2, -1)).transpose(0, 1).flatten(0, 2)
        result.add_tensor(f"{name}.{key}", tensor)


def save(path: str, name: str, words: set[str], result: Result) -> None:
    model, optimizer = built(words, seed=0)
    train(model, optimizer, 2)
    add(result, name, model, optimizer)
    pending = sp.Checkpointer(path).save(2, state_of(model, optimizer))
    state = adapter.attach_chunk_metadata(raw_state(model, optimizer), model, optimizer)
    dcp.save(state, checkpoint_id=f"{path}-dcp")
    result.facts[f"{name}.losses"] = train(model, optimizer, 2, first=2)
    pending.result()


def load(path: str, name: str, words: set[str], result: Result) -> None:
    model, optimizer = built(words, seed=1)
    assert sp.Checkpointer(path).restore(state_of(model, optimizer)) == 2
    add(result, name, model, optimizer)
    result.facts[f"{name}.losses"] = train(model, optimizer, 2, first=2)


def load_dcp(path: str, name: str, words: set[str], result: Result) -> None:
    model, optimizer = built(words, seed=1)
    state = raw_state(model, optimizer, is_loading=True)
    dcp.load(adapter.attach_chunk_metadata(state, model, optimizer), checkpoint_id=f"{path}-dcp")
    count = model.config.num_moe_experts
    weights = {expert_param_local_key(key, count): item for key, item in state["model"].items()}
    model.module.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(state["optimizer"])
    add(result, name, model, optimizer)
    result.facts[f"{name}.losses"] = train(model, optimizer, 2, first=2)


def released(path: str, name: str, words: set[str], result: Result) -> None:
    """The released class fails in its first step."""
    model, optimizer = built(words, seed=0)
    try:
        train(model, optimizer, 1)
    except RuntimeError as error:
        result.facts["released"] = str(error)


def local_names(path: str, name: str, words: set[str], result: Result) -> None:
    """The state dict of the model has the numbers of experts on each rank. The last rank has others."""
    model, optimizer = built(words, seed=0)
    error = ""
    try:
        state = {"model": model.state_dict_for_save_checkpoint()}
        adapter.attach_chunk_metadata(state, model, optimizer)
    except sp.StructureError as refused:
        error = str(refused)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    result.facts[name] = errors


def undeclared(path: str, name: str, words: set[str], result: Result) -> None:
    model, _ = built(words, seed=0)
    uses = {name: adapter.module_state, f"{name}.whole": lambda model: sp.save(path, {"model": model})}
    for use, call in uses.items():
        try:
            call(model)
        except sp.ShardproofError as error:
            result.facts[use] = str(error)


def main() -> None:
    mode, folder, *cases = sys.argv[1:]
    join_ranks_on_devices()
    if mode != "released":
        adapter.enable_optimizer_offload()
    result = Result()
    for case in cases:
        name, _, words = case.partition(":")
        globals()[mode](os.path.join(folder, name), name, set((words or name).split("-")), result)
    leave_ranks(result)


if __name__ == "__main__":
    main()
