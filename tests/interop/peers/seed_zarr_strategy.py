"""Ranks write flat ranges of an optimizer with Megatron's Zarr strategy: `seed_zarr_strategy.py FOLDER LOST`.

A weight in bfloat16 has main weights and moments of torch's AdamW, without zeros. The ranges of all ranks lie
in one chunk of each. Rank 0 creates the array and writes its range without a lock; the other ranks take one.
For the slots in LOST, with commas, rank 0 has read the chunk when the others begin to write, and writes it
back after them. For the other slots, rank 0 writes before the others read. Only this order is forced, at the
store of Zarr. Fact `zeros`: the elements of its ranges that each rank loads as zero.
"""

from __future__ import annotations

import sys
from argparse import Namespace
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

ROWS, COLUMNS = 6, 8
LIMIT = timedelta(seconds=60)


def force_order(lost: list[str]) -> None:
    """The order of reads and writes of each chunk of the optimizer; see above."""
    kind, store = zarr.storage.DirectoryStore, dist.distributed_c10d._get_default_store()
    own_read, own_write = kind.__getitem__, kind.__setitem__

    def slot_of(array: Any, name: str) -> str | None:
        parts = Path(array.path).name.split(".")
        return parts[2] if parts[0] == "optimizer" and name[0].isdigit() else None

    def read(self: Any, name: str) -> Any:
        slot = slot_of(self, name)
        if slot is not None and slot not in lost and rank():
            store.wait([f"{slot} written by 0"], LIMIT)
        return own_read(self, name)

    def write(self: Any, name: str, data: Any) -> None:
        slot = slot_of(self, name)
        if slot in lost and rank():
            store.wait([f"{slot} read by 0"], LIMIT)
        elif slot in lost:
            store.set(f"{slot} read by 0", b"1")
            store.wait([f"{slot} written by {at}" for at in range(1, world_size())], LIMIT)
        own_write(self, name, data)
        store.set(f"{slot} written by {rank()}", b"1")

    kind.__getitem__, kind.__setitem__ = read, write


def trained() -> tuple[torch.Tensor, torch.optim.AdamW]:
    """The main weight and its optimizer after three steps."""
    torch.manual_seed(0)
    main = torch.randn(ROWS, COLUMNS)
    optimizer = torch.optim.AdamW([main], lr=0.01)
    for _ in range(3):
        main.grad = torch.randn(ROWS, COLUMNS)
        optimizer.step()
    return main, optimizer


def state() -> dict[str, Any]:
    """The weight, the ranges of this rank, and what Megatron-LM puts into the common state."""
    main, optimizer = trained()
    size = ROWS * COLUMNS // world_size()
    here = slice(rank() * size, rank() * size + size)
    slots = {"fp32_param": main, **{slot: optimizer.state[main][slot] for slot in ("exp_avg", "exp_avg_sq")}}
    ranges = {
        slot: ShardedTensor.from_rank_offsets_flat(
            f"optimizer.state.{slot}.weight",
            item.reshape(-1)[here].clone(),
            (ROWS, COLUMNS),
            flattened_range=here,
        )
        for slot, item in slots.items()
    }
    options = [
        {name: item for name, item in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", main.bfloat16(), replica_id=rank()),
        "ranges": ranges,
        "optimizer": {"optimizer": {"param_groups": options}},
        "args": Namespace(use_precision_aware_optimizer=False),
    }


def main() -> None:
    folder, lost = Path(sys.argv[1]), sys.argv[2].split(",")
    join_ranks()
    if rank() == 0:
        folder.mkdir()
    dist.barrier()
    force_order(lost)
    saved, asked = state(), state()
    assert not any((item.data == 0).any() for item in saved["ranges"].values())
    dist_checkpointing.save(saved, str(folder), ("zarr", 1))
    for item in asked["ranges"].values():
        item.data = None
    loaded = dist_checkpointing.load(asked, str(folder))["ranges"]
    zeros: list[Any] = [None] * world_size()
    dist.all_gather_object(zeros, {slot: int((item == 0).sum()) for slot, item in loaded.items()})
    result = Result()
    result.facts |= {"zeros": zeros, "version": version("megatron-core")}
    leave_ranks(result)


if __name__ == "__main__":
    main()
