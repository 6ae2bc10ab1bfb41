"""A flat buffer: the shard that a rank owns, the gathered whole, and the gradients to reduce."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shardproof.engine.state import declare_storage_owner
from shardproof.training.collectives import all_gather
from shardproof.training.fsdp.lanes import Done, Lane
from shardproof.training.fsdp.mesh_ranks import MeshRanks
from shardproof.training.fsdp.packing import Packing
from shardproof.training.fsdp.unit_parameter import UnitParameter


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
        """Copies tensors that replaced the parameters (`to_empty`, `to`, `load_state_dict(assign=True)`).

        Raises:
            ValueError: a tensor has another shape or dtype.
        """
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
