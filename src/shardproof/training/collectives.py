"""Asynchronous collectives for training.

Note: gloo
    On the CPU, gloo's reduce-scatter and all-gather take two to three times as long as equivalent
    collectives. So `reduce_scatter` uses an all-to-all, and each rank adds up the parts in rank order.
    `all_gather` uses one broadcast per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# Torch 2.13 renames both functions and warns about the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective that has started."""

    def wait(self) -> Any:
        """Blocks until later work on the current stream may use the result."""


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: ProcessGroup | None) -> Work:
    """Starts to fill `whole` with the parts of all ranks, in rank order.

    Args:
        whole: 1-D, with room for the parts of all ranks.
        part: 1-D; may be this rank's slice of `whole`.
        group: None for all ranks.
    """
    if whole.device.type != "cpu" or not whole.numel():
        return _gather(whole, part, group=group, async_op=True)  # type: ignore[no-any-return]
    slices = whole.chunk(dist.get_world_size(group))
    own = slices[dist.get_rank(group)]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    return _WorkList(
        [dist.broadcast(item, group_src=rank, group=group, async_op=True) for rank, item in enumerate(slices)]
    )


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: ProcessGroup | None) -> Work:
    """Starts to sum `whole` over the ranks. Each rank receives its part of the sum.

    Args:
        part: 1-D, filled by `Work.wait`; may be a slice of `whole`.
        whole: 1-D, the parts of all ranks. The caller may reuse it after `Work.wait`.
        group: None for all ranks.
    """
    if whole.device.type != "cpu" or not whole.numel():
        return _scatter(part, whole, group=group, async_op=True)  # type: ignore[no-any-return]
    received = torch.empty_like(whole)
    return _SumOfParts(dist.all_to_all_single(received, whole, group=group, async_op=True), received, part)


def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Work:
    """Starts to reduce a tensor over the ranks, in place."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=True)  # type: ignore[no-any-return]


class _WorkList:
    """Several collectives with one `wait`."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _SumOfParts:
    """Adds up the parts that an exchange delivers."""

    def __init__(self, exchange: Any, received: torch.Tensor, part: torch.Tensor) -> None:
        self._exchange, self._part = exchange, part
        self._received: torch.Tensor | None = received

    @torch.no_grad()
    def wait(self) -> None:
        """Waits for the exchange. The first call adds up the parts."""
        self._exchange.wait()
        if self._received is not None:
            parts, self._received = self._received.view(-1, self._part.numel()), None
            self._part.copy_(parts[0])
            for other in parts[1:]:
                self._part.add_(other)
