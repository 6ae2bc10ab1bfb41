"""The ranks of one process group, and the collectives that training runs among them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardproof.training.collectives import Work, all_gather, reduce_scatter


class RankGroup:
    """A process group, or a single process.

    Args:
        group: None for all ranks, or for this process if `torch.distributed` is not initialized.

    >>> RankGroup(None).size
    1
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.size: int = 1 if alone else dist.get_world_size(group)
        self.rank: int = 0 if alone else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group it was given")

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies the first rank's tensor to every rank."""
        if self.size > 1:
            dist.broadcast(tensor, group_src=0, group=self.group)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def scatter_sum(self, shard: torch.Tensor, full: torch.Tensor) -> Work | None:
        """Starts to fill `shard` with this rank's range of the sum. None if it is filled already."""
        if self.size == 1:
            shard.copy_(full)
            return None
        return reduce_scatter(shard, full, self.group)

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work | None:
        """Starts to fill `full` with every rank's range. None if this rank owns all of it."""
        if self.size == 1:
            return None
        return all_gather(full, shard, self.group)

    def check_same(self, text: str, device: torch.device, what: str) -> None:
        """Checks that `text` is the same on all ranks.

        Raises:
            ValueError: on every rank, if `text` differs between ranks.
        """
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
        if self.size > 1:
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        if ends.tolist() != [number, -number]:
            raise ValueError(
                f"{what} is not the same on all ranks of the group. Here (rank {self.rank}) it is:\n"
                f"{text[:2000]}"
            )


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of a rank."""

    data: RankGroup
    """Ranks with the same dense parameters, which together have every expert of this part of the model."""
    expert: RankGroup
    """Ranks with the same experts."""
    model: RankGroup | None
    """Ranks with the other parts of the model: tensor and pipeline parallel."""
