"""Reads a checkpoint of Megatron-Core: `read_torch_dist.py [plain|sharded] PATH`.

`plain` calls `load_plain_tensors`, and loads the objects with `load`. `sharded` loads tensors and objects
with one call of `load` with strict=RAISE_ALL: each rank asks for a ShardedTensor of its rows and for every
ShardedObject. Both add the common state as the object "common", with `load_common_state_dict`, and
check the tensors' shapes and dtypes against `load_tensors_metadata`. The fact `content_metadata` is what
`load_content_metadata` gives.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import cpu_stubs
import torch
import torch.distributed as dist
from peer_result import Result, encoded, join_ranks, leave_ranks, rank, world_size

cpu_stubs.install()

from megatron.core import dist_checkpointing as mcore  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.validation import StrictHandling  # noqa: E402

COMMON = "common_state"


def read_plain(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = mcore.load_plain_tensors(path)
    for key in mcore.load_common_state_dict(path):  # which it puts beside the tensors
        tensors.pop(key, None)
    return tensors, load(stored_objects(path), path, strict=StrictHandling.ASSUME_OK_UNEXPECTED)


def read_sharded(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    shapes = mcore.load_tensors_metadata(path)
    asked: dict[str, Any] = {}
    for key, stored in shapes.items():
        asked[f"tensor/{key}"] = rows_of_rank(key, tuple(stored.global_shape), stored.dtype)
    objects = stored_objects(path)
    if rank():
        for item in objects.values():
            item.replica_id = rank()
    loaded = load(asked | objects, path, strict=StrictHandling.RAISE_ALL)
    tensors = {}
    for key, stored in shapes.items():
        local = loaded.pop(f"tensor/{key}")
        tensors[key] = gathered(local) if is_split(tuple(stored.global_shape)) else local
    return tensors, loaded


def is_split(shape: tuple[int, ...]) -> bool:
    """Whether the ranks each hold rows of it: Megatron-Core divides evenly."""
    return bool(shape) and shape[0] % world_size() == 0


def gathered(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, one after another."""
    own = rows.contiguous().reshape(-1).view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(parts, own)
    whole = torch.cat(parts).view(rows.dtype)
    return whole.reshape((rows.shape[0] * world_size(), *rows.shape[1:]))


def rows_of_rank(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> ShardedTensor:
    """What this rank asks for: its rows, or a replica of all."""
    if is_split(shape):
        local = torch.empty((shape[0] // world_size(), *shape[1:]), dtype=dtype)
        return ShardedTensor.from_rank_offsets(key, local, (0, rank(), world_size()))
    return ShardedTensor.from_rank_offsets(key, torch.empty(shape, dtype=dtype), replica_id=rank())


def stored_objects(path: str) -> dict[str, ShardedObject]:
    """A ShardedObject for each stored one, by its unique key."""
    stored = mcore.serialization.load_sharded_metadata(path)
    return {
        key: item for key, item in stored.items() if isinstance(item, ShardedObject) and item.key != COMMON
    }


def load(asked: dict[str, Any], path: str, strict: StrictHandling) -> dict[str, Any]:
    """Calls `load` and removes the common state, which it puts beside what was asked for."""
    names = set(asked)
    validate = strict is StrictHandling.RAISE_ALL
    loaded = mcore.load(asked, path, strict=strict, validate_access_integrity=validate)
    return {key: value for key, value in loaded.items() if key in names}


def main() -> None:
    mode, path = sys.argv[1:]
    join_ranks()
    tensors, objects = {"plain": read_plain, "sharded": read_sharded}[mode](path)
    shapes = mcore.load_tensors_metadata(path)
    if tensors.keys() != shapes.keys():
        raise ValueError(f"loaded {sorted(tensors)}, the metadata has {sorted(shapes)}")
    result = Result()
    for key, tensor in tensors.items():
        described = tuple(shapes[key].global_shape), shapes[key].dtype
        if (tuple(tensor.shape), tensor.dtype) != described:
            raise ValueError(f"{key}: loaded {tensor.shape} {tensor.dtype}, the metadata has {described}")
        result.add_tensor(key, tensor)
    for key, value in objects.items():
        result.add_object(key, value)
    common = mcore.load_common_state_dict(path)
    result.add_object("common", common)
    result.facts["content_metadata"] = encoded(common.get("content_metadata"))
    result.facts["megatron_core"] = version("megatron-core")
    leave_ranks(result)


if __name__ == "__main__":
    main()
