"""Reduces gradients over the ranks while backward runs. Each rank gets its own range.

`GradientFlags` makes all ranks agree which parameters have a gradient, so `.grad` is None on all ranks or
none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardproof.training.collectives import all_reduce, reduce_scatter
from shardproof.training.fsdp.flat_buffer import FlatBuffer
from shardproof.training.fsdp.lanes import Done, Lane

IN_FLIGHT = 2
"""Largest number of concurrent reductions: one is sent while the memory of the next is filled."""


class Reduction:
    """The reduction of one flat buffer's gradients.

    A sum in fp16 is divided twice, as in PyTorch's FSDP, against overflow and underflow: before the reduction
    by a power of two near the root of the divisor, and after it by the remaining factor. Other sums are
    divided after the reduction.

    Args:
        buffer: the buffer; all of its gradients have arrived.
        divisor: divisor of the sum.
        lane: the lane for reductions.
        give_back: called with the memory of the gradients when it may be written again.
    """

    def __init__(
        self, buffer: FlatBuffer, divisor: float, lane: Lane, give_back: Callable[[torch.Tensor], None]
    ) -> None:
        self.buffer, self._lane, self._give_back = buffer, lane, give_back
        self._memory, self.arrived = buffer.take_gradients()
        ranks, packing = buffer.ranks, buffer.packing
        scattered = packing.ranks > 1
        self._sum = torch.empty(packing.shard, dtype=buffer.reduce, device=buffer.device)
        self.result = self._sum
        if buffer.reduce != buffer.master:
            self.result = torch.empty(packing.shard, dtype=buffer.master, device=buffer.device)
        before = 2.0 ** (int(divisor).bit_length() // 2) if buffer.reduce == torch.float16 else 1.0
        self._after = divisor / before
        self._to_reduce = [group for group in ranks.replicate_groups if group.size() > 1]
        self._works: list[Any] = []
        with lane.entered():
            if before != 1.0:
                self._memory.div_(before)
            if scattered:
                self._works = [reduce_scatter(self._sum, self._memory, ranks.shard_group)]
            else:
                self._sum.copy_(self._memory)
            self._done: Done | None = None
            if lane.stream is not None:
                for work in self._works:
                    work.wait()
                for group in self._to_reduce:
                    all_reduce(self._sum, group).wait()
                self._divide()
                self._done = lane.end()
            elif not scattered:
                self.advance()

    def advance(self) -> None:
        """On a CPU, waits for the current collective and starts the next one."""
        if self._lane.stream is None and self._to_reduce:
            for work in self._works:
                work.wait()
            self._works = [all_reduce(self._sum, self._to_reduce.pop(0))]

    def finish(self) -> None:
        """Waits for `result`: (shard,) this rank's range of the mean gradients, in the master dtype."""
        if self._done is not None:
            self._done.wait()
        else:
            while self._to_reduce:
                self.advance()
            for work in self._works:
                work.wait()
            self._divide()
        self._give_back(self._memory)
        del self._memory, self._sum

    def _divide(self) -> None:
        if self._after != 1.0:
            self._sum.div_(self._after)
        if self.result is not self._sum:
            self.result.copy_(self._sum)


class GradientPool:
    """Reusable memory for whole gradients, and the reductions that read it.

    Reductions finish in the order in which they began, at points that depend only on the order of units. So
    all ranks run the same collectives in the same order.
    """

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        self._in_flight: deque[Reduction] = deque()

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for `size` elements, uninitialised."""
        for index, memory in enumerate(self._idle):
            if (memory.numel(), memory.dtype, memory.device) == (size, dtype, device):
                return self._idle.pop(index)
        return torch.empty(size, dtype=dtype, device=device)

    def give_back(self, memory: torch.Tensor) -> None:
        """Returns memory that nothing reads any more to the pool."""
        self._idle.append(memory)

    def make_room(self) -> None:
        """Finishes old reductions until the next one may begin."""
        while len(self._in_flight) >= IN_FLIGHT:
            self._in_flight.popleft().finish()
        if self._in_flight:
            self._in_flight[-1].advance()

    def launched(self, reduction: Reduction) -> None:
        """Records a reduction that began, after `make_room`."""
        self._in_flight.append(reduction)

    def finish(self) -> None:
        """Finishes all reductions, in the order in which they began."""
        for reduction in self._in_flight:
            reduction.advance()
        while self._in_flight:
            self._in_flight.popleft().finish()
        self._trim()

    def _trim(self) -> None:
        """Frees the oldest memory, beyond the size of `IN_FLIGHT` of the largest buffers."""
        allowed = IN_FLIGHT * max((memory.nbytes for memory in self._idle), default=0)
        retained: list[torch.Tensor] = []
        for memory in reversed(self._idle):
            if memory.nbytes <= allowed:
                allowed -= memory.nbytes
                retained.append(memory)
        self._idle = retained[::-1]


class GradientFlags:
    """One flag for each parameter with a gradient on any rank, in one tensor for each mesh.

    The flags are reduced together with the gradients. A rank with gradients for all parameters does not read
    the result, so its host does not wait for an accelerator.
    """

    def __init__(self, reductions: list[Reduction]) -> None:
        by_mesh: dict[tuple[int, ...], list[Reduction]] = {}
        for reduction in reductions:
            by_mesh.setdefault(tuple(map(id, reduction.buffer.ranks.groups)), []).append(reduction)
        self._flags: dict[Reduction, tuple[torch.Tensor, int]] = {}
        self._works: list[Any] = []
        for alike in by_mesh.values():
            bits: list[bool] = []
            starts = []
            for reduction in alike:
                starts.append(len(bits))
                arrived = reduction.arrived
                bits += [
                    p.member in arrived or not p.sharded.requires_grad for p in reduction.buffer.parameters
                ]
            flags = torch.ones(len(bits), dtype=torch.int32, device=alike[0].buffer.device)
            if not all(bits):
                flags.copy_(torch.tensor(bits, dtype=torch.bool, device="cpu"))
            for reduction, start in zip(alike, starts, strict=True):
                self._flags[reduction] = (flags, start)
            groups = [group for group in alike[0].buffer.ranks.groups if group.size() > 1]
            for group in groups:
                self._works.append(all_reduce(flags, group, dist.ReduceOp.MAX))
                if group is not groups[-1]:
                    self._works.pop().wait()

    def wait(self) -> None:
        """Waits for the collectives."""
        for work in self._works:
            work.wait()
        self._works = []

    def arrived(self, reduction: Reduction) -> frozenset[int]:
        """Members of the packing that are frozen or have a gradient on any rank. Call `wait` before."""
        parameters = reduction.buffer.parameters
        if all(p.member in reduction.arrived for p in parameters if p.sharded.requires_grad):
            return reduction.arrived
        flags, start = self._flags[reduction]
        found = flags[start : start + len(parameters)].tolist()
        return frozenset(p.member for p, flag in zip(parameters, found, strict=True) if flag)
