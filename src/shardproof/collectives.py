"""The collectives of training, each begun and waited for later.

Note: gloo
    For the result of a reduce-scatter or an all-gather on a CPU, gloo takes two to three times as long as for
    an exchange of the parts that their owner then adds up, or a broadcast of each part. So these are used
    there. The sum is in the order of the ranks; with two it is the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["Work", "all_gather", "all_reduce", "reduce_scatter"]

# Torch 2.13 renames both and warns at the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Returns when its result may be used by what the current stream runs next."""


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: ProcessGroup | None) -> Work:
    """Starts to fill `whole` with the parts of all ranks, in the order of the ranks.

    Args:
        whole: 1-D, as long as all parts together.
        part: 1-D; may be this rank's place in `whole`.
        group: None for all ranks.
    """
    if whole.device.type != "cpu" or not whole.numel():
        return _gather(whole, part, group=group, async_op=True)  # type: ignore[no-any-return]
    places = whole.chunk(dist.get_world_size(group))
    own = places[dist.get_rank(group)]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    return _Together(
        [dist.broadcast(place, group_src=at, group=group, async_op=True) for at, place in enumerate(places)]
    )


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: ProcessGroup | None) -> Work:
    """Starts to sum `whole` over the ranks, and to leave each rank its part.

    Args:
        part: 1-D, filled when the work is waited for; may lie in `whole`.
        whole: 1-D, as long as all parts together. It may be reused once the work is waited for.
        group: None for all ranks.
    """
    if whole.device.type != "cpu" or not whole.numel():
        return _scatter(part, whole, group=group, async_op=True)  # type: ignore[no-any-return]
    received = torch.empty_like(whole)
    return _Added(dist.all_to_all_single(received, whole, group=group, async_op=True), received, part)


def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Work:
    """Starts to reduce a tensor over the ranks, in place."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=True)  # type: ignore[no-any-return]


class _Together:
    """Several collectives that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for all of them."""
        for work in self._works:
            work.wait()


class _Added:
    """Parts that are added up once all are there."""

    def __init__(self, exchange: Any, received: torch.Tensor, part: torch.Tensor) -> None:
        self._exchange, self._part = exchange, part
        self._received: torch.Tensor | None = received

    @torch.no_grad()
    def wait(self) -> None:
        """Waits for the exchange, and adds up the first time."""
        self._exchange.wait()
        if self._received is not None:
            parts, self._received = self._received.view(-1, self._part.numel()), None
            self._part.copy_(parts[0])
            for other in parts[1:]:
                self._part.add_(other)
