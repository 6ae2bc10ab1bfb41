"""Flat ranges of one tensor on every rank, some within one row: `seed_flat_ranges.py FOLDER`.

Facts: `flattened_range` and `zarr` say what the installed Megatron-Core has to offer for them.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version

import megatron_stubs
import torch
from peer_result import Result, join_ranks, leave_ranks, rank, world_size

megatron_stubs.install()

from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

from shardproof.frameworks import megatron_core as ours  # noqa: E402
from shardproof.frameworks.megatron.megatron_optimizer import FlatRange  # noqa: E402

SHAPE = (5, 7)


def main() -> None:
    folder = sys.argv[1]
    join_ranks()
    result = Result()
    whole = torch.arange(35.0).reshape(SHAPE) + 1
    cuts = [35 * at // world_size() for at in range(world_size() + 1)]
    start, stop = cuts[rank()], cuts[rank() + 1]
    part = whole.flatten()[start:stop].clone()
    try:
        ShardedTensor("w", part, part.dtype, SHAPE, SHAPE, (0, 0), (1, 1), flattened_range=slice(start, stop))
    except CheckpointingException as error:
        result.facts["flattened_range"] = str(error)
    strategies = "megatron.core.dist_checkpointing.strategies"
    result.facts["zarr"] = importlib.util.find_spec(f"{strategies}.zarr") is not None
    boxes = [((0, 0), SHAPE)]
    ours.save({"w": FlatRange("w", part, SHAPE, boxes, start)}, folder)
    other = world_size() - 1 - rank()  # another rank's range
    mine = torch.zeros(cuts[other + 1] - cuts[other])
    ours.load({"w": FlatRange("w", mine, SHAPE, boxes, cuts[other])}, folder)
    assert torch.equal(mine, whole.flatten()[cuts[other] : cuts[other + 1]])
    result.add_tensor("w", whole)
    result.facts["version"] = version("megatron-core")
    leave_ranks(result)


if __name__ == "__main__":
    main()
