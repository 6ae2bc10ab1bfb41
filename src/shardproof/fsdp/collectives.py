"""The collectives of training, by the names that this torch has for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]

# Torch 2.13 renames both and warns at the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: ProcessGroup) -> Any:
    """Starts to fill `whole` with the parts of all ranks; `part` may be this rank's place in it."""
    return _gather(whole, part, group=group, async_op=True)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: ProcessGroup) -> Any:
    """Starts to sum `whole` over the ranks, and to leave each rank its part."""
    return _scatter(part, whole, op=dist.ReduceOp.SUM, group=group, async_op=True)


def all_reduce(tensor: torch.Tensor, group: ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Any:
    """Starts to reduce a tensor over the ranks, in place."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=True)
