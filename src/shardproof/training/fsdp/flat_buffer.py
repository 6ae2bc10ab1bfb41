"""A flat buffer: the shard that a rank owns, the gathered whole, and its gradients.

Gradients are reduced over the ranks while backward runs. Each rank gets its own range. `GradientFlags` makes
all ranks agree which parameters have a gradient, so `.grad` is None on all ranks or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shardproof.engine.state import declare_storage_owner
from shardproof.training.collectives import all_gather, all_reduce, reduce_scatter
from shardproof.training.fsdp.lanes import Done, Lane
from shardproof.training.fsdp.row_layout import MeshRanks
from shardproof.training.fsdp.unit_parameter import Packing, UnitParameter

_IN_FLIGHT = 2
"""Largest number of concurrent reductions: one is sent while the memory of the next is filled."""


class FlatBuffer:
    """The parameters of a unit with one dtype and one alignment class, as one tensor.

    Args:
        packing: the position of each parameter in the buffer.
        ranks: the ranks that share the buffer.
        parameters: parameters in the order of the packing.
        master: dtype of the shard.
        compute: dtype of the whole.
        reduce: dtype in which gradients are reduced.
        keep: True to keep the whole between uses. The shard is then a view of it, if the dtypes are equal.
        device: device of shard and whole.
    """

    def __init__(
        self,
        packing: Packing,
        ranks: MeshRanks,
        parameters: list[UnitParameter],
        *,
        master: torch.dtype,
        compute: torch.dtype,
        reduce: torch.dtype,
        keep: bool,
        device: torch.device,
    ) -> None:
        self.packing, self.ranks, self.parameters = packing, ranks, parameters
        self.master, self.compute, self.reduce, self.keep = master, compute, reduce, keep
        self.in_place = keep and master == compute
        self.shard = self.whole = torch.empty(0, dtype=torch.float32, device="cpu")
        self.gradients: torch.Tensor | None = None
        """Memory of the whole size for gradients; None if there are none."""
        self.arrived: set[int] = set()
        self.allocate(device)

    @property
    def device(self) -> torch.device:
        """Device of shard and whole."""
        return self.shard.device

    @property
    def trainable(self) -> bool:
        """True if a parameter requires a gradient."""
        return any(parameter.sharded.requires_grad for parameter in self.parameters)

    def allocate(self, device: torch.device) -> None:
        """Allocates shard and whole. The shard is zero, because its padding must be."""
        self.whole = torch.empty(self.packing.size, dtype=self.compute, device=device)
        self.guard = _unsafe_preserve_version_counter(self.whole)
        if self.in_place:
            self.shard = self.own(self.whole.zero_())
        else:
            self.shard = torch.zeros(self.packing.shard, dtype=self.master, device=device)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's range of a buffer of the whole size, as a view."""
        first = self.ranks.index * self.packing.shard
        return whole[first : first + self.packing.shard]

    def bind(self, requires_grad: list[bool]) -> None:
        """Makes sharded and whole parameters views of new memory. The whole must be gathered again."""
        self._bind_shards(requires_grad)
        for parameter in self.parameters:
            parameter.bind_whole(self.whole)
        self.free()

    def _bind_shards(self, requires_grad: list[bool]) -> None:
        for parameter, wanted in zip(self.parameters, requires_grad, strict=True):
            parameter.bind_shard(self.shard, wanted)
            declare_storage_owner(parameter.sharded, self.whole if self.in_place else self.shard)

    def gather(self, lane: Lane) -> Done:
        """Starts to fill the whole from the shards of all ranks.

        Tensors saved for backward are views of this memory. The gather writes the values that they had, so
        their version counter must be restored: the caller does so with `guard`, at the end.
        """
        if self.keep:
            self.guard = _unsafe_preserve_version_counter(self.whole)
        storage = self.whole.untyped_storage()
        if not storage.size():
            storage.resize_(self.packing.size * self.whole.element_size())
        with torch.no_grad(), lane.entered():
            own = self.own(self.whole)
            if not self.in_place:
                own.copy_(self.shard)
            if self.packing.ranks == 1:
                return lane.end()
            return lane.end(all_gather(self.whole, own, self.ranks.shard_group))

    def gathered(self) -> torch.Tensor:
        """Gathers the shards of all ranks into a new buffer of the master dtype, and waits for it."""
        whole = torch.empty(self.packing.size, dtype=self.master, device=self.device)
        with torch.no_grad():
            own = self.own(whole).copy_(self.shard)
            if self.packing.ranks > 1:
                all_gather(whole, own, self.ranks.shard_group).wait()
        return whole

    def free(self) -> None:
        """Frees the memory of the whole. `gather` fills it again, and with it the views saved for backward.

        Until then the version of these views differs, so that backward refuses them.
        """
        if not self.keep:
            self.guard = _unsafe_preserve_version_counter(self.whole)
            self.whole.untyped_storage().resize_(0)
            torch.autograd.graph.increment_version(self.whole)

    def add_gradient(self, parameter: UnitParameter, gradient: torch.Tensor) -> None:
        """Adds the gradient of a whole parameter to `gradients`."""
        assert self.gradients is not None
        view = self.gradients[parameter.start : parameter.stop].view(parameter.shape)
        if parameter.member in self.arrived:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.arrived.add(parameter.member)

    def take_gradients(self) -> tuple[torch.Tensor, frozenset[int]]:
        """The gradients of all parameters (zero for those without), and the members that have one."""
        memory, arrived = self.gradients, frozenset(self.arrived)
        assert memory is not None
        for parameter in self.parameters:
            if parameter.member not in arrived:
                memory[parameter.start : parameter.stop].zero_()
        self.drop_gradients()
        return memory, arrived

    def drop_gradients(self) -> None:
        """Drops the gradients."""
        self.gradients = None
        self.arrived.clear()

    @torch.inference_mode(False)
    @torch.no_grad()
    def adopt(self) -> None:
        """Copies tensors that replaced the parameters (`to_empty`, `to`, `load_state_dict(assign=True)`)."""
        found = [parameter.current() for parameter in self.parameters]
        values = [p.values_of(tensor.detach()) for p, tensor in zip(self.parameters, found, strict=True)]
        for parameter, value in zip(self.parameters, values, strict=True):
            if value.dtype != self.master:
                raise ValueError(
                    f"{parameter.name} became {value.dtype} and its flat buffer is {self.master}: choose "
                    "dtypes by fully_shard(..., mixed_precision=MixedPrecision(...))"
                )
        device, gradients = values[0].device, [tensor.grad for tensor in found]
        moves = device != self.device
        if moves:
            self.allocate(device)
        for parameter, value in zip(self.parameters, values, strict=True):
            if value is not parameter.local and not value.is_meta:
                parameter.part(self.shard).copy_(value)
        bind = self.bind if moves else self._bind_shards
        bind([isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in found])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.sharded.grad = gradient


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
        while len(self._in_flight) >= _IN_FLIGHT:
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
        """Frees the oldest memory, beyond the size of `_IN_FLIGHT` of the largest buffers."""
        allowed = _IN_FLIGHT * max((memory.nbytes for memory in self._idle), default=0)
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
