"""Writes a checkpoint of Megatron-Core with `dist_checkpointing.save`: `write_torch_dist.py PATH [WIDTH]`.

It has what the layers of a transformer make: tensors split by columns and by rows over the ranks, a
replicated one, two layers stacked under one key, the halves of a SwiGLU under one key, an object of each
rank and the common state. WIDTH makes it larger: 1024 gives 56 MiB. The result is what was saved,
every tensor whole.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import cpu_stubs
import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank, world_size

cpu_stubs.install()

from megatron.core import dist_checkpointing as mcore  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402

LAYERS = 2


def tensors(width: int) -> dict[str, torch.Tensor]:
    """Every tensor whole, the same on each rank."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "embedding.word_embeddings.weight": random(4 * width, width, dtype=torch.bfloat16),
        "decoder.layers.self_attention.linear_proj.weight": random(LAYERS, width, 2 * width),
        "decoder.layers.mlp.linear_fc1.weight": random(LAYERS, 4 * width, width),
        "decoder.final_layernorm.weight": random(width),
    }


def sharded(whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What this rank saves of each tensor."""
    state: dict[str, Any] = {}
    here, ranks = rank(), world_size()
    word, projection, fc1, norm = whole
    rows = whole[word].chunk(ranks)[here].clone()
    state["word"] = ShardedTensor.from_rank_offsets(word, rows, (0, here, ranks))
    state["norm"] = ShardedTensor.from_rank_offsets(norm, whole[norm].clone(), replica_id=here)
    for layer in range(LAYERS):
        stacked = (0, layer, LAYERS)
        columns = whole[projection][layer].chunk(ranks, 1)[here].contiguous()
        state[f"projection.{layer}"] = ShardedTensor.from_rank_offsets(
            projection, columns, stacked, (2, here, ranks), prepend_axis_num=1
        )
        for half in range(2):  # gate, then up: each is split over the ranks
            part = whole[fc1][layer].chunk(2 * ranks)[half * ranks + here].clone()
            state[f"fc1.{layer}.{half}"] = ShardedTensor.from_rank_offsets(
                fc1, part, stacked, (1, half * ranks + here, 2 * ranks), prepend_axis_num=1
            )
    state["rng"] = ShardedObject("rng_state", [{"seed": here}], (ranks,), (here,))
    return state


def main() -> None:
    path = Path(sys.argv[1])
    width = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    join_ranks()
    if rank() == 0:
        path.mkdir()
    dist.barrier()
    common = {"iteration": 3, "checkpoint_version": 3.0, "args": Namespace(hidden_size=width)}
    whole = tensors(width)
    mcore.save(sharded(whole) | common, str(path))
    result = Result()
    for key, tensor in whole.items():
        result.add_tensor(key, tensor)
    for other in range(world_size()):
        result.add_object(f"rng_state/shard_{other}_{world_size()}", [{"seed": other}])
    result.add_object("common", common)
    leave_ranks(result)


if __name__ == "__main__":
    main()
