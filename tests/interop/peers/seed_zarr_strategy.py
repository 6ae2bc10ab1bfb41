"""Ranks write flat ranges of an optimizer with Megatron's Zarr strategy: `seed_zarr_strategy.py FOLDER`.

The ranges of all ranks lie in one chunk. Rank 0 creates the array and writes its range without a lock; the
other ranks take one. Here rank 0 has read the chunk when the others begin to write, and writes it back after
them. Only this order is forced, at the store of Zarr. Fact `zeros`: the elements that each rank loads as zero
from its range, which has none.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cpu_stubs
import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank, world_size

cpu_stubs.install()

import zarr  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

KEY = "optimizer.state.exp_avg.weight"
ROWS, COLUMNS = 6, 8
LIMIT = timedelta(seconds=60)


def force_order() -> None:
    """Rank 0 reads the chunk, the others read and write it one after the other, and rank 0 writes it."""
    own = zarr.storage.DirectoryStore.__setitem__
    store = dist.distributed_c10d._get_default_store()

    def write(self: Any, name: str, data: Any) -> None:
        if not name[0].isdigit():  # metadata
            return own(self, name, data)
        if rank() == 0:
            store.set("read", b"1")
            store.wait([f"written-{at}" for at in range(1, world_size())], LIMIT)
            return own(self, name, data)
        store.wait(["read"], LIMIT)
        own(self, name, data)
        return store.set(f"written-{rank()}", b"1")

    zarr.storage.DirectoryStore.__setitem__ = write


def ranges() -> dict[str, Any]:
    """The range of this rank, without zeros."""
    size = ROWS * COLUMNS // world_size()
    start = rank() * size
    data = torch.arange(start + 1.0, start + size + 1)
    item = ShardedTensor.from_rank_offsets_flat(
        KEY, data, (ROWS, COLUMNS), flattened_range=slice(start, start + size)
    )
    return {"optimizer": item}


def main() -> None:
    folder = Path(sys.argv[1])
    join_ranks()
    if rank() == 0:
        folder.mkdir()
    dist.barrier()
    force_order()
    dist_checkpointing.save(ranges(), str(folder), ("zarr", 1))
    asked = ranges()
    asked["optimizer"].data = None
    loaded = dist_checkpointing.load(asked, str(folder))["optimizer"]
    zeros: list[Any] = [None] * world_size()
    dist.all_gather_object(zeros, int((loaded == 0).sum()))
    result = Result()
    result.facts |= {"zeros": zeros, "version": version("megatron-core")}
    leave_ranks(result)


if __name__ == "__main__":
    main()
