"""The chunks of Megatron-FSDP state dicts, gathered and computed: `uneven_chunks.py MODE FOLDER CASE...`.

A case is the words of `fsdp_models.sharded_model`, joined by `-`. Results of a case have its name as prefix.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from collective_count import Collectives
from fsdp_models import sharded_model, sharded_optimizer, train, whole_state
from megatron.core import parallel_state
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_swiglu_in_state_dict
from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
from torch.distributed.tensor import DTensor

from shardproof import StructureError
from shardproof.frameworks import megatron_fsdp as adapter

PLAIN = {"preproc_state_dict_for_dcp_ckpt": False}
"""So that `state_dict()` runs no collective."""


def built(words: set[str], seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded_model(words, seed, **PLAIN)
    return model, sharded_optimizer(model, **PLAIN)


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def gathered(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What Megatron-Core does with the state, under the names that it expects."""
    names = {id(one): name for name, one in model.module.named_parameters()}
    everything = [one for group in optimizer.param_groups for one in group["params"]]
    weights = {key.removeprefix("module."): one for key, one in model.state_dict().items()}
    moments = {}
    for one in everything:  # ranks with fewer keys would wait: an empty shard has empty moments here
        state = dict(optimizer.state.get(one, {}))
        for slot in ("exp_avg", "exp_avg_sq"):
            if slot not in state:
                like = one.to_local().detach()
                state[slot] = DTensor.from_local(
                    torch.empty_like(like),
                    one.device_mesh,
                    one.placements,
                    shape=one.shape,
                    stride=one.stride(),
                )
        moments[f"module.module.{names[id(one)]}"] = state
    weights, rest = handle_swiglu_in_state_dict(model, weights, {"state": moments})
    return preprocess_state_dict_for_uneven_dtensor({"model": weights, "optimizer": rest})


def chunks_in(state: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """The position and the write items of every DTensor."""
    found = {}
    for name, item in state.items():
        path = f"{key}.{name}".removeprefix(".").replace("module.", "")
        if isinstance(item, Mapping):
            found |= chunks_in(item, path)
        elif isinstance(item, DTensor):
            local = item._local_tensor
            (chunk,) = local.__create_chunk_list__()
            found[path] = (
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                local.__create_write_items__("key", item),
                tuple(item.shape),
                local.clone(),
            )
    return found


def equal(path: str, name: str, words: set[str], result: Result) -> None:
    """Compares what is computed with what is gathered, and counts collectives of both."""
    model, optimizer = built(words, seed=0)
    for state in optimizer.state.values():
        for slot in ("exp_avg", "exp_avg_sq"):
            state[slot].to_local().normal_()
    names = {id(one): key for key, one in model.module.named_parameters()}
    moments = {names[id(one)]: state for one, state in optimizer.state.items()}
    with Collectives() as ours:
        state = {"model": model.state_dict(), "optimizer": {"state": moments}}
        computed = chunks_in(adapter.attach_chunk_metadata(state, model, optimizer))
    with Collectives() as theirs:
        expected = chunks_in(gathered(model, optimizer))
    problems = []
    for key, (*place, local) in expected.items():
        if key not in computed and not local.numel() and key.startswith("optimizer"):
            continue  # no entry on this rank
        *found, values = computed.pop(key, (None,))
        if found != place or not torch.equal(values, local):
            problems.append(f"{key}: gathered {place}, computed {found}")
    problems += [f"{key}: unexpected" for key in computed]
    everyone: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(everyone, (problems, len(moments), dict(ours.counts)))
    result.facts[f"{name}.problems"] = [problem for each in everyone for problem in each[0]]
    result.facts[f"{name}.parameters"] = [each[1] for each in everyone]
    result.facts[f"{name}.ours"] = [each[2] for each in everyone]
    result.facts[f"{name}.theirs"] = dict(theirs.counts)


def save(path: str, name: str, words: set[str], result: Result) -> None:
    model, optimizer = built(words, seed=0)
    train(model, optimizer, 2)
    for key, tensor in whole_state(model, optimizer).items():
        result.add_tensor(f"{name}.{key}", tensor)
    state = state_of(model, optimizer)
    if rank() == world_size() - 1:
        adapter.attach_chunk_metadata(state, model, optimizer)  # alone: waits for no rank
    dcp.save(adapter.attach_chunk_metadata(state, model, optimizer), checkpoint_id=path)
    result.facts[f"{name}.losses"] = train(model, optimizer, 2, first=2)


def load(path: str, name: str, words: set[str], result: Result) -> None:
    model, optimizer = built(words, seed=1)
    state = state_of(model, optimizer)
    dcp.load(adapter.attach_chunk_metadata(state, model, optimizer), checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for key, tensor in whole_state(model, optimizer).items():
        result.add_tensor(f"{name}.{key}", tensor)
    result.facts[f"{name}.losses"] = train(model, optimizer, 2, first=2)


def wrong(path: str, name: str, words: set[str], result: Result) -> None:
    """Stores the errors of wrong use."""
    model, optimizer = built(words, seed=0)
    state = state_of(model, optimizer)
    weight = next(key for key in state["model"] if key.endswith("linear_fc1.weight"))
    inner = weight.removeprefix("module.")
    uses = {
        "no optimizer": lambda: adapter.attach_chunk_metadata(state, model),
        "no such weight": lambda: adapter.attach_chunk_metadata(
            state["model"], model, fused={"fc9": {"a": 1}}
        ),
        "rows": lambda: adapter.attach_chunk_metadata(state["model"], model, fused={inner: {"a": 3, "b": 4}}),
        "shape": lambda: adapter.attach_chunk_metadata({inner: state["model"]["module.emb.weight"]}, model),
        "module": lambda: adapter.attach_chunk_metadata(state, model.module),
    }
    for what, use in uses.items():
        try:
            use()
        except StructureError as error:
            result.facts[f"{name}.{what}"] = str(error)


def main() -> None:
    mode, folder, *cases = sys.argv[1:]
    join_ranks()
    parallel_state.initialize_model_parallel()  # which names of experts need
    result = Result()
    for name in cases:
        globals()[mode](os.path.join(folder, name), name, set(name.split("-")), result)
    leave_ranks(result)


if __name__ == "__main__":
    main()
