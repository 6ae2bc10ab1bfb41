"""Modules and optimizers of frameworks that store parameters in flat buffers. Each rank has its own range.

An adapter describes each parameter by a `Partition`: the row-major elements that this rank has, and their
memory. No function of this module communicates, and a rank may have no element of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

import shardproof as sp
from shardproof.engine.geometry import IndexMap
from shardproof.engine.state import (
    MASTER,
    LocalRange,
    ParameterSlots,
    Receipt,
    StoredSlot,
    declare_storage_owner,
    options_of,
)


@dataclass(eq=False)
class Partition:
    """This rank's range of one parameter.

    Args:
        name: name of the parameter.
        shape: shape of the parameter, without data parallelism.
        start: first row-major element of the range.
        stop: element after the last.
        weight: 1-D memory of the range, in the dtype of the model.
        master: 1-D memory of the same elements in another dtype, which the optimizer steps; None if it steps
            `weight`.
        whole: 1-D memory of all elements, of which `weight` is a part, if every rank has all of the weight.
            Then `start` and `stop` apply only to the optimizer's state.
        copies: other memory with the values of `weight`.
        owners: the buffers that `weight` and `master` are parts of.
        description: a tensor without memory with the parameter's shape, dtype and tensor parallel placements.
        index_map: the position of a tensor parallel shard in the global tensor. `start` and `stop` then count
            elements of the shard.
        is_gathered_in_place: True if a forward pass writes `weight` again, with equal values. A save then
            copies `weight` before training continues.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    weight: torch.Tensor
    master: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    copies: Sequence[torch.Tensor] = ()
    owners: Sequence[torch.Tensor] = ()
    description: torch.Tensor | None = None
    index_map: IndexMap | None = None
    is_gathered_in_place: bool = False
    parameter: torch.nn.Parameter = field(init=False)
    """Stands for the parameter in a checkpoint. It has no memory."""

    def __post_init__(self) -> None:
        if self.description is None:
            self.description = torch.empty(self.shape, dtype=self.weight.dtype, device="meta")
        self.parameter = torch.nn.Parameter(self.description, requires_grad=False)
        if not self.weight.numel():
            # The memory identifies tied parameters, so an empty range needs memory of its own.
            self.weight = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        for part in (self.weight, self.master, self.whole):
            for owner in self.owners:
                if part is not None and part.untyped_storage().data_ptr() == owner.data_ptr():
                    declare_storage_owner(part, owner)

    @property
    def memory(self) -> torch.Tensor:
        """The memory of the weight on this rank."""
        return self.weight if self.whole is None else self.whole

    @property
    def is_elsewhere(self) -> bool:
        """True if the parameter has elements, and this rank has none of them."""
        return self.start == self.stop and prod(self.shape) > 0

    @property
    def stepped(self) -> tuple[torch.Tensor, ...]:
        """The memory of the weight that a save may read until the next step of the optimizer."""
        return () if self.is_gathered_in_place else (self.memory,)

    def range_of(self, item: torch.Tensor) -> torch.Tensor | LocalRange:
        """The range of an elementwise slot, whose shape is that of the range; a scalar as it is."""
        return LocalRange(item.view(-1), self.start, self.stop) if item.dim() else item

    def receive_master(
        self, stored: Mapping[str, StoredSlot]
    ) -> tuple[dict[str, torch.Tensor | LocalRange], Callable[[frozenset[str]], None]]:
        """The destination of the stored master, and a function to call with the names of the filled slots.

        A weight without a master takes the exact values of a master with its dtype, which the checkpoint
        stores besides the rounded weight. A master that is not stored is made from the weight.
        """
        weight = self.memory
        if (master := self.master) is not None:

            @torch.no_grad()
            def finish_master(filled: frozenset[str]) -> None:
                if MASTER not in filled:
                    master.copy_(self.weight)

            return {MASTER: self.range_of(master)}, finish_master
        if MASTER not in stored or stored[MASTER].dtype != weight.dtype:
            return {}, lambda filled: None
        exact = torch.empty_like(weight)
        first = self.start if self.whole is None else 0

        @torch.no_grad()
        def finish(filled: frozenset[str]) -> None:
            if MASTER in filled:
                weight.copy_(exact)
                self.update_copies()

        return {MASTER: LocalRange(exact, first, first + exact.numel())}, finish

    def shard(self) -> sp.FlatShard:
        """The weight as a checkpoint stores it."""
        shape = self.shape if self.index_map is None else self.index_map.global_shape
        if self.whole is not None:
            return sp.FlatShard(self.whole, shape, 0, prod(self.shape), self.index_map)
        return sp.FlatShard(self.weight, shape, self.start, self.stop, self.index_map)

    @torch.no_grad()
    def update_copies(self) -> None:
        """Copies the weight to its other memory."""
        for copy in self.copies:
            copy.copy_(self.weight)

    @torch.no_grad()
    def update_master(self) -> None:
        """Sets the elements of the master that do not round to the weight. The others stay exact."""
        if self.master is not None:
            rounded = self.master.to(self.weight.dtype)
            bits = _BITS[self.weight.element_size()]
            equal = rounded.view(bits) == self.weight.view(bits)
            self.master.copy_(torch.where(equal, self.master, self.weight.to(self.master.dtype)))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PartitionedModule(torch.nn.Module):
    """A module as a checkpoint stores it: its parameters are this rank's ranges.

    It shares all memory with the framework's module. It is not for training. `sp.save`, `sp.load` and
    `sp.Checkpointer` accept it wherever they accept a module.

    Args:
        module: the framework's module. Values of its state dict that are not partitions are stored unchanged.
        partitions: the partitions by name in the state dict. Tied parameters share one.
        loaded: called after a load, when all weights and masters have their values.
    """

    replaced_hooks = ("deepspeed.", "megatron.", "megatron_fsdp.")
    """Beginnings of the names of Python modules whose load hooks `state_loaded` replaces."""

    def __init__(
        self,
        module: torch.nn.Module,
        partitions: Mapping[str, Partition],
        loaded: Callable[[], None],
    ) -> None:
        super().__init__()
        self._inner = (module,)  # a tuple, so that torch does not register the module
        self._partitions = partitions
        self._loaded = loaded

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """The partitions by name, and the other values of the framework's module. Does not communicate."""
        state = self._inner[0].state_dict(keep_vars=True)
        return {
            name: self._partitions[name].shard() if name in self._partitions else value
            for name, value in state.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Loads the values that are not partitions. A hook of the framework may then read the masters."""
        self._update_memory()
        rest = {name: value for name, value in state_dict.items() if name not in self._partitions}
        return self._inner[0].load_state_dict(rest, strict=False)

    def state_loaded(self) -> None:
        """Called after a load: masters and other memory follow the loaded weights."""
        self._update_memory()
        self._loaded()

    def _update_memory(self) -> None:
        for partition in {id(item): item for item in self._partitions.values()}.values():
            partition.update_copies()
            partition.update_master()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters by name, without memory."""
        seen: set[int] = set()
        for name, partition in self._partitions.items():
            if not remove_duplicate or id(partition) not in seen:
                seen.add(id(partition))
                yield f"{prefix}.{name}" if prefix else name, partition.parameter

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of the framework's module."""
        return self._inner[0].named_buffers(*args, **options)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """A module inside, which loads its own extra state."""
        return self._inner[0].get_submodule(target)

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules inside, whose declared layouts and names apply."""
        yield from self._inner[0].named_modules(*args, **options)


class PartitionedOptimizer:
    """An optimizer as a checkpoint stores it: state and masters by parameter name, as this rank's ranges.

    A subclass gives access to the framework's state. See `shardproof.state.SlotProvider`.

    Args:
        optimizer: the optimizer whose step writes the state.
        groups: for each group of the optimizer, the live group and its partitions.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Iterable[tuple[dict[str, Any], Sequence[Partition]]],
    ) -> None:
        self.stepper = optimizer
        self._kind = type(optimizer).__qualname__
        self._groups = list(groups)
        self.param_groups: list[dict[str, Any]] = [_PartGroup(group, parts) for group, parts in self._groups]
        self._by_parameter = {id(part.parameter): part for _, parts in self._groups for part in parts}

    @property
    def names(self) -> dict[str, torch.Tensor]:
        """The parameters by name, for `shardproof.OptimizerState`."""
        return {part.name: part.parameter for part in self._by_parameter.values()}

    def state_of(self, partition: Partition) -> Mapping[str, Any]:
        """The current state of a parameter: 1-D tensors of the range's elements, scalars, plain values."""
        raise NotImplementedError

    def set_state(self, partition: Partition, state: dict[str, Any]) -> None:
        """Replaces the state of a parameter, in the form of `state_of`."""
        raise NotImplementedError

    def new_slot(self, partition: Partition, slot: str, stored: StoredSlot) -> torch.Tensor:
        """Memory for a slot that does not exist: as many elements as the range, or a scalar."""
        like = partition.weight if partition.master is None else partition.master
        if slot == "step" or (not stored.shape and partition.shape):
            return torch.zeros((), dtype=stored.dtype, device="cpu" if slot == "step" else like.device)
        dtype = like.dtype if stored.dtype.is_floating_point else stored.dtype
        return torch.zeros(partition.stop - partition.start, dtype=dtype, device=like.device)

    def describe_slots(self) -> Iterator[ParameterSlots]:
        """See `SlotProvider`. A rank does not describe a parameter of which it has no element."""
        for group, partitions in self._groups:
            options = options_of(group)
            for part in partitions:
                if part.is_elsewhere:
                    continue
                tensors: dict[str, torch.Tensor | LocalRange] = {}
                values: dict[str, Any] = {}
                for slot, item in self.state_of(part).items():
                    if isinstance(item, torch.Tensor):
                        tensors[slot] = part.range_of(item)
                    else:
                        values[slot] = item
                if part.master is not None:
                    tensors[MASTER] = part.range_of(part.master)
                yield ParameterSlots(part.parameter, self._kind, options, tensors, values, part.stepped)

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """See `SlotProvider`. Existing memory is filled in place."""
        part = self._by_parameter[id(parameter)]
        present = self.state_of(part)
        slots = {
            slot: present[slot]
            if isinstance(present.get(slot), torch.Tensor)
            else self.new_slot(part, slot, found)
            for slot, found in stored.items()
            if slot != MASTER
        }
        tensors = {slot: part.range_of(item) for slot, item in slots.items()}
        masters, finish = part.receive_master(stored)

        def attach(values: Mapping[str, Any], filled: frozenset[str]) -> None:
            state = {slot: item for slot, item in slots.items() if slot in filled}
            self.set_state(part, state | dict(values))
            finish(filled)

        return Receipt(self._kind, tensors | masters, attach)

    def describe_shared(self) -> dict[str, Any]:
        """See `SlotProvider`. There is no shared state."""
        return {}

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """See `SlotProvider`. Refuses any shared state."""
        if state:
            raise sp.StructureError(
                f"the checkpoint has optimizer state that belongs to no parameter ({sorted(state)}), which "
                f'{self._kind} of this framework does not have. Exclude it: exclude="*.@extra"'
            )


class _PartGroup(dict[str, Any]):
    """The options of a group with stand-ins for its parameters. New options also reach the live group."""

    def __init__(self, group: dict[str, Any], partitions: Sequence[Partition]) -> None:
        super().__init__(group, params=[partition.parameter for partition in partitions])
        self._live = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._live[name] = value
