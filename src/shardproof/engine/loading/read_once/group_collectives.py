"""The collectives of the read-once exchange, over the process group of the training.

Loads without `read_once` call no collective.

Note: Collectives of a load
    Every rank of the group calls the same methods in the same order: `any_failed` and `start` for each round
    of the coordinator's plan. A rank that fails still calls the next `any_failed`, after which all ranks
    leave the exchange. So no error of a single rank may occur between those calls. So `reserve` takes the
    device memory beforehand, and a failure there is reported like any other. If a rank dies, gloo closes its
    connections at once; other backends end the wait after the group's timeout. No other thread may use the
    group meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardproof._utils.accelerator import device_of_group
from shardproof.errors import StructureError


def can_exchange(group: ProcessGroup | None) -> bool:
    """True if there is a process group."""
    return group is not None or (dist.is_available() and dist.is_initialized())


class Exchange:
    """Sends bytes from all ranks to all ranks. `rank` and `world_size` are those of the rendezvous.

    Raises:
        StructureError: the ranks of the group are not the ranks of the rendezvous.
    """

    def __init__(self, group: ProcessGroup | None, rank: int, world_size: int) -> None:
        found = (dist.get_rank(group), dist.get_world_size(group))
        if found != (rank, world_size):
            raise StructureError(
                f"read_once: the process group has this process as rank {found[0]} of {found[1]}, the load "
                f"as rank {rank} of {world_size}: pass the group of the ranks that load, in their order"
            )
        self._group = group
        self._device = device_of_group(group)
        self._flag = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._outgoing = self._arriving = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, sent: int, received: int) -> None:
        """Allocates the device memory for rounds of at most this many bytes, if the group needs any."""
        if self._device.type != "cpu":
            self._outgoing = torch.empty(sent, dtype=torch.uint8, device=self._device)
            self._arriving = torch.empty(received, dtype=torch.uint8, device=self._device)

    def any_failed(self, failed: bool) -> bool:
        """True if any rank calls this with `failed` true."""
        self._flag.fill_(int(failed))
        dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group)
        return bool(self._flag.item())

    def start(
        self,
        sent: torch.Tensor,
        sent_sizes: Sequence[int],
        received: torch.Tensor,
        received_sizes: Sequence[int],
    ) -> PendingExchange:
        """Starts to send a part to each rank and to receive a part from each. The previous call must be over.

        Args:
            sent: uint8 host memory, the parts for rank 0, 1, ... one after another, at most as many bytes as
                were reserved. The caller must not write to it before the end.
            sent_sizes: bytes for each rank.
            received: uint8 host memory for the parts of rank 0, 1, ... one after another, at most as many
                bytes as were reserved.
            received_sizes: bytes from each rank.
        """
        source, target = sent[: sum(sent_sizes)], received[: sum(received_sizes)]
        arriving = target
        if self._device.type != "cpu":
            source = self._outgoing[: len(source)].copy_(source)
            arriving = self._arriving[: len(target)]
        work: Any = dist.all_to_all_single(
            arriving, source, list(received_sizes), list(sent_sizes), group=self._group, async_op=True
        )
        return PendingExchange(work, arriving, target)


class PendingExchange:
    """An exchange that has started; `wait` ends it."""

    def __init__(self, work: Any, arriving: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._arriving, self._target = work, arriving, target

    def wait(self) -> None:
        """Waits until all bytes are received in host memory."""
        self._work.wait()
        if self._arriving is not self._target:
            self._target.copy_(self._arriving)
