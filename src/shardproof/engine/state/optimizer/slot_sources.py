"""Reads and restores the slots of any optimizer.

The optimizer is a `SlotProvider`, Megatron-Core's HybridDeviceOptimizer, torch's ZeroRedundancyOptimizer, or
any other optimizer of torch.

Note: ZeroRedundancyOptimizer
    It assigns whole parameters to the ranks of its group. An inner optimizer trains a rank's parameters and
    holds their state. The outer one has the groups that the program and its schedulers use, and copies their
    options to the inner one in each step. Its `state_dict` needs a gather of all states on one rank. This
    module gathers nothing: each rank saves the inner optimizer's state with the outer one's options. Each
    parameter belongs to exactly one rank.

Note: HybridDeviceOptimizer
    It trains a fraction of its parameters on the CPU, and the rest on the device. Each parameter has an
    *inner* tensor, which a sub-optimizer trains: a copy on the CPU, a copy in float32, or the parameter
    itself. Its own `state_dict` lacks the step counts that Apex and Transformer Engine keep in the groups of
    a sub-optimizer, and its load takes a trial step to make state. This module reads the sub-optimizers, and
    names the state by the program's parameters. So the keys are those of the same optimizer without an
    offload:

    - A slot of the inner tensor is a slot of the parameter.
    - A float32 inner tensor of a narrower parameter is the parameter's master. It exists before the first
      step.
    - ``step`` is a slot of each parameter, also where a sub-optimizer counts steps in its groups.

    Source: ``megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py`` of megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardproof.engine.state.dtensor import local_tensor
from shardproof.engine.state.optimizer.slots import (
    MASTER,
    ParameterSlots,
    Receipt,
    Receiver,
    SlotProvider,
    StoredSlot,
    cast_slot,
    destination_dtype,
    device_of_scalar,
    options_of,
    slot_dtype,
    tensors_and_values,
)
from shardproof.engine.state.tensors import empty_like_layout
from shardproof.errors import StructureError

_STEP = "step"
_MASTER_OF_MEGATRON = "master_param"
"""A slot that Megatron-Core adds to `state`: the inner tensor itself."""


def slots_of(optimizer: torch.optim.Optimizer | SlotProvider) -> list[ParameterSlots]:
    """The slots of any optimizer.

    The call does not change the optimizer, and creates no state for a parameter without state.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> slots_of(torch.optim.SGD([weight], lr=0.1))[0].tensors
    {}
    """
    if is_hybrid_device(optimizer):
        optimizer = HybridDeviceSlots(optimizer, receiver)
    if isinstance(optimizer, SlotProvider):
        return list(optimizer.describe_slots())
    if is_zero_redundancy(optimizer):
        return owned_slots(optimizer, slots_of)
    kind = type(optimizer).__qualname__
    described = []
    for group in optimizer.param_groups:
        options = options_of(group)
        for parameter in group["params"]:
            tensors, values = tensors_and_values(optimizer.state.get(parameter) or {})
            described.append(ParameterSlots(parameter, kind, options, tensors, values))
    return described


def receiver(optimizer: torch.optim.Optimizer | SlotProvider) -> Receiver:
    """The receiver of stored slots of any optimizer. Nothing changes before `Receipt.attach`.

    A torch optimizer receives existing tensors in place. It has no masters, so it ignores stored ones.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> adam = torch.optim.AdamW([weight])
    >>> receive = receiver(adam)
    >>> receipt = receive(weight, adam.param_groups[0], {"exp_avg": StoredSlot(torch.float32, (2,))})
    >>> receipt.attach({}, frozenset(receipt.tensors))
    >>> list(adam.state[weight])
    ['exp_avg']
    """
    if is_hybrid_device(optimizer):
        optimizer = HybridDeviceSlots(optimizer, receiver)
    if isinstance(optimizer, SlotProvider):
        provider = optimizer
        return lambda parameter, _, stored: provider.receive_slots(parameter, stored)
    if is_zero_redundancy(optimizer):
        return owned_receiver(optimizer, receiver)
    return partial(_receive, optimizer)


def _receive(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    group: dict[str, Any],
    stored: Mapping[str, StoredSlot],
) -> Receipt:
    current = optimizer.state.get(parameter) or {}
    tensors: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for slot, like in stored.items():
        present = current.get(slot)
        if isinstance(present, torch.Tensor):
            tensors[slot] = present
        elif like.wrapper is not None:
            tensors[slot] = like.wrapper.new(parameter)
        elif slot != MASTER:
            dtypes[slot] = slot_dtype(optimizer, parameter, like)
            destination = replace(like, dtype=destination_dtype(like, dtypes[slot]))
            tensors[slot] = _new_slot(parameter, group, slot, destination)
    attach = partial(_attach, optimizer, parameter, tensors, dtypes)
    return Receipt(type(optimizer).__qualname__, tensors, attach)


def _attach(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    values: Mapping[str, Any],
    filled: frozenset[str],
) -> None:
    current = optimizer.state.get(parameter) or {}
    state = {slot: item for slot, item in current.items() if slot in filled or slot in values}
    state.update(
        {
            slot: cast_slot(item, dtypes.get(slot, item.dtype))
            for slot, item in tensors.items()
            if slot in filled
        }
    )
    state.update(values)
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


def _new_slot(parameter: torch.Tensor, group: Mapping[str, Any], slot: str, like: StoredSlot) -> torch.Tensor:
    """Memory for a slot that the target has not made yet.

    It is on the parameter's device; for step counts, see `device_of_scalar`. Padding is zero, as in a slot
    that the optimizer makes.
    """
    if not like.shape and (slot == "step" or parameter.shape != ()):
        return torch.zeros((), dtype=like.dtype, device=device_of_scalar(slot, group, parameter.device))
    elementwise = like.shape == tuple(local_tensor(parameter).shape)
    new = empty_like_layout(parameter, like.dtype, None if elementwise else like.shape)
    local_tensor(new).zero_()
    return new


def is_zero_redundancy(optimizer: object) -> bool:
    """True for a ZeroRedundancyOptimizer.

    Does not import its module: until the program imports it, no such optimizer exists.

    >>> is_zero_redundancy(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    False
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that trains this rank's parameters.

    Raises:
        StructureError: with ``overlap_with_ddp=True`` the inner optimizer does not exist yet, or is one of
            torch's functional optimizers, which do not expose their options.
    """
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer):
        found = "not created before DDP has its buckets" if inner is None else type(inner).__qualname__
        raise StructureError(
            "cannot save or load a ZeroRedundancyOptimizer with overlap_with_ddp=True: its functional inner "
            f"optimizer ({found}) does not have its options in its groups. "
            "Construct it with overlap_with_ddp=False"
        )
    return inner


def owned_slots(
    optimizer: torch.optim.Optimizer, slots_of: Callable[[torch.optim.Optimizer], list[ParameterSlots]]
) -> list[ParameterSlots]:
    """The slots of the parameters that this rank owns.

    They have the class of the inner optimizer and the options of the outer groups.

    Raises:
        StructureError: `inner_optimizer` raises, or the inner optimizer has state that belongs to no
            parameter, which would exist on one rank only.
    """
    inner = inner_optimizer(optimizer)
    others = sorted(name for name in inner.state if isinstance(name, str))
    if others:
        raise StructureError(
            f"{type(inner).__qualname__} in a ZeroRedundancyOptimizer has state {others} that belongs to no "
            "parameter. The ranks have different inner optimizers, so it may differ. Store it by parameter"
        )
    options: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        of_group = options_of(group)
        options |= {id(parameter): of_group for parameter in group["params"]}
    return [replace(slots, options=options[id(slots.parameter)]) for slots in slots_of(inner)]


def owned_receiver(
    optimizer: torch.optim.Optimizer, receiver: Callable[[torch.optim.Optimizer], Receiver]
) -> Receiver:
    """The receiver of stored slots: the inner optimizer's for owned parameters, without effect for others.

    The optimizer copies the options of its groups to the inner one at the next step.

    Raises:
        StructureError: see `inner_optimizer`.
    """
    inner = inner_optimizer(optimizer)
    owned = {id(parameter) for share in inner.param_groups for parameter in share["params"]}
    receive = receiver(inner)

    def receive_owned(
        parameter: torch.Tensor, group: dict[str, Any], stored: Mapping[str, StoredSlot]
    ) -> Receipt:
        if id(parameter) in owned:
            return receive(parameter, group, stored)
        return Receipt(
            type(inner).__qualname__, {}, lambda values, filled: None
        )  # another rank owns the state

    return receive_owned


def is_hybrid_device(optimizer: object) -> bool:
    """True for a HybridDeviceOptimizer of Megatron-Core.

    Does not import its module: until the program imports it, no such optimizer exists.

    >>> is_hybrid_device(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    False
    """
    module = sys.modules.get("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    return module is not None and isinstance(optimizer, module.HybridDeviceOptimizer)


class HybridDeviceSlots:
    """A HybridDeviceOptimizer of Megatron-Core, as a `SlotProvider`."""

    def __init__(self, optimizer: Any, receiver: Callable[[torch.optim.Optimizer], Receiver]) -> None:
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        rules = [rule for rule in (optimizer.cpu_optimizer_cls, optimizer.gpu_optimizer_cls) if rule]
        self.kind = (rules[0].func if isinstance(rules[0], partial) else rules[0]).__qualname__
        self._defaults = _common_defaults(rules)
        """Options that the groups may lack, because both sides add them."""
        self._receiver = receiver
        self._trained: dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]] = {
            id(inner): (sub, group)
            for sub in optimizer.sub_optimizers
            for group in sub.param_groups
            for inner in group["params"]
        }
        """By inner tensor: its sub-optimizer, and its group there."""
        self._groups = {id(parameter): group for group in self.param_groups for parameter in group["params"]}
        self._received: set[int] = set()
        """Ids of the parameters that have received state."""
        self._counts: dict[int, int] = {}
        """Loaded counts of steps, by the id of the sub-optimizer's group."""

    def describe_slots(self) -> Iterator[ParameterSlots]:
        """The slots of every parameter. The inner tensors and the state are live memory."""
        for group in self.param_groups:
            # Megatron-Core's load leaves an old count of steps in the groups.
            options = self._defaults | options_of(group, (_STEP,))
            for parameter in group["params"]:
                inner = self._inner(parameter)
                sub, group_of_sub = self._trained[id(inner)]
                tensors, values = tensors_and_values(sub.state.get(inner) or {})
                tensors.pop(_MASTER_OF_MEGATRON, None)
                count = group_of_sub.get(_STEP) if _counts_by_group(sub) else None
                if tensors and count is not None:
                    device = count.device if isinstance(count, torch.Tensor) else "cpu"
                    tensors[_STEP] = torch.as_tensor(count, dtype=torch.float32, device=device)
                if self._has_master(parameter):
                    tensors[MASTER] = inner.detach()
                yield ParameterSlots(parameter, self.kind, options, tensors, values)

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """The destinations for the stored slots of one parameter, for the side that trains it."""
        if id(parameter) in self._received:  # another load before a step
            self._received.clear()
            self._counts.clear()
        inner = self._inner(parameter)
        sub, group = self._trained[id(inner)]
        of_sub = {slot: like for slot, like in stored.items() if slot != MASTER}
        count = None
        if _STEP in stored and _counts_by_group(sub):
            del of_sub[_STEP]
            count = torch.zeros((), dtype=stored[_STEP].dtype, device="cpu")
        receipt = self._receiver(sub)(inner, group, of_sub)
        tensors = dict(receipt.tensors)
        if count is not None:
            tensors[_STEP] = count
        if self._has_master(parameter):
            tensors[MASTER] = inner.detach()

        def attach(values: Mapping[str, Any], filled: frozenset[str]) -> None:
            receipt.attach(values, filled - {MASTER})
            self._publish(parameter)
            # A step would copy this option over the counts of the sub-optimizers.
            self._groups[id(parameter)].pop(_STEP, None)
            if count is not None and _STEP in filled:
                self._set_count(group, int(count), parameter)
            elif _counts_by_group(sub) and id(group) not in self._counts:
                group.pop(_STEP, None)  # saved before the first step
            if inner is not parameter and not (MASTER in filled and self._has_master(parameter)):
                with torch.no_grad():
                    inner.copy_(parameter)
            self._received.add(id(parameter))

        return Receipt(self.kind, tensors, attach)

    def describe_shared(self) -> dict[str, Any]:
        """Returns nothing: all of its state belongs to parameters."""
        return {}

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """Does nothing; see `describe_shared`."""

    @torch.no_grad()
    def apply(self) -> None:
        """Ends a load. Inner tensors of parameters without stored state follow the loaded parameters.

        The values of a master that round to those of its parameter stay.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                inner = self._inner(parameter)
                if id(parameter) not in self._received and inner is not parameter:
                    values = parameter.detach().to(inner.device)
                    inner.copy_(torch.where(inner.to(values.dtype) == values, inner, values.to(inner.dtype)))

    def _inner(self, parameter: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.optimizer.param_to_inner_param[parameter]
        return inner

    def _has_master(self, parameter: torch.Tensor) -> bool:
        return parameter in self.optimizer.param_to_fp32_param

    def _set_count(self, group: dict[str, Any], count: int, parameter: torch.Tensor) -> None:
        """Sets the count of a group, which all its parameters share."""
        present = group.get(_STEP)
        if self._counts.setdefault(id(group), count) != count:
            raise StructureError(
                f"the checkpoint has {count} steps for a parameter of shape {list(parameter.shape)}, but "
                f"{self._counts[id(group)]} for another in its group, whose steps "
                f"{self.optimizer.gpu_optimizer_cls.__qualname__} counts together. Load with "
                "offload_fraction=1, or give each of them a group of its own"
            )
        group[_STEP] = torch.full_like(present, count) if isinstance(present, torch.Tensor) else count

    def _publish(self, parameter: torch.Tensor) -> None:
        """Shows the sub-optimizer's state of a parameter in the optimizer's own `state`, as its step does."""
        inner = self._inner(parameter)
        state = self._trained[id(inner)][0].state
        if not state.get(inner):
            state.pop(inner, None)
            self.optimizer.state.pop(parameter, None)
            return
        if self.optimizer.param_update_in_fp32:
            state[inner][_MASTER_OF_MEGATRON] = inner
        self.optimizer.state[parameter] = state[inner]


def _common_defaults(rules: list[Any]) -> dict[str, Any]:
    """The default options of the first class for which no other class has another default."""
    first, *others = [inspect.signature(rule).parameters for rule in rules]
    return {
        name: item.default
        for name, item in first.items()
        if item.default is not item.empty
        and all(name not in other or other[name].default == item.default for other in others)
    }


def _counts_by_group(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer counts steps in its groups, as FusedAdam of Apex and Transformer Engine does."""
    return any(kind.__name__ == "FusedAdam" for kind in type(optimizer).__mro__)
