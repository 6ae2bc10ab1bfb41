"""Reads a checkpoint of torch.distributed.checkpoint.

`read_dcp.py keys PATH` loads every key of `.metadata`. On several ranks each tensor is loaded as a DTensor,
sharded over its first dimension, and put together afterwards.

`read_dcp.py model PATH [MODEL_KEY [OPTIMIZER_KEY]]` resumes training: it loads into the model and the AdamW
of `tiny_model`, sharded by FSDP2 over the ranks, with `get_state_dict` and `set_state_dict`. The result is
the state that the model and the optimizer then have.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from peer_result import Result, join_ranks, leave_ranks, rank, world_size
from tiny_model import fresh, gathered_state
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def read_keys(path: str) -> Result:
    metadata = dcp.FileSystemReader(path).read_metadata()
    state: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            state[key] = io.BytesIO()
            continue
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        if tensor.numel():
            # A load that skips an element leaves this pattern, which no golden checkpoint has.
            tensor.reshape(-1).view(torch.uint8).fill_(0xA5)
        if world_size() > 1 and tensor.dim():
            mesh = init_device_mesh("cpu", (world_size(),))
            state[key] = distribute_tensor(tensor, mesh, [Shard(0)])
        else:
            state[key] = tensor
    dcp.load(state, checkpoint_id=path, no_dist=world_size() == 1)
    result = Result()
    for key, value in state.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            result.add_tensor(key, value)
        else:
            result.add_object(key, value)
    result.facts["chunks"] = {
        key: len(stored.chunks)
        for key, stored in metadata.state_dict_metadata.items()
        if not isinstance(stored, BytesStorageMetadata)
    }
    return result


def read_model(path: str, model_key: str = "model", optimizer_key: str = "optim") -> Result:
    model, optimizer = fresh(seed=rank() + 100)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {model_key: model_state, optimizer_key: optimizer_state}
    dcp.load(state, checkpoint_id=path)
    unused = set_state_dict(
        model,
        optimizer,
        model_state_dict=state[model_key],
        optim_state_dict=state[optimizer_key],
    )
    result = Result()
    result.add_tree(gathered_state(model, optimizer, model_key, optimizer_key))
    result.facts["missing_keys"] = unused.missing_keys
    result.facts["unexpected_keys"] = unused.unexpected_keys
    return result


def main() -> None:
    mode, *arguments = sys.argv[1:]
    join_ranks()
    result = {"keys": read_keys, "model": read_model}[mode](*arguments)
    result.facts["torch"] = torch.__version__
    leave_ranks(result)


if __name__ == "__main__":
    main()
