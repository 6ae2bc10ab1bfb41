"""Megatron-Core's HybridDeviceOptimizer: its parameters with the state of its sub-optimizers.

It trains a fraction of its parameters on the CPU, and the rest on the device. Each parameter has an *inner*
tensor, which a sub-optimizer trains: a copy on the CPU, a copy in float32, or the parameter itself. Its own
`state_dict` lacks the step counts that Apex and Transformer Engine keep in the groups of a sub-optimizer, and
its load takes a trial step to make state. This module reads the sub-optimizers, and names the state by the
program's parameters. So the keys are those of the same optimizer without an offload:

- A slot of the inner tensor is a slot of the parameter.
- A float32 inner tensor of a narrower parameter is the parameter's master. It exists before the first step.
- ``step`` is a slot of each parameter, also where a sub-optimizer counts steps in its groups.

Source: ``megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py`` of megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from shardproof.engine.state.optimizer.slots import (
    MASTER,
    ParameterSlots,
    Receipt,
    Receiver,
    StoredSlot,
    options_of,
    tensors_and_values,
)
from shardproof.errors import StructureError

_STEP = "step"
_MASTER_OF_MEGATRON = "master_param"
"""A slot that Megatron-Core adds to `state`: the inner tensor itself."""


def is_hybrid_device(optimizer: object) -> bool:
    """True for a HybridDeviceOptimizer of Megatron-Core.

    Does not import its module: until the program imports it, no such optimizer exists.

    >>> is_hybrid_device(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    False
    """
    module = sys.modules.get("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    return module is not None and isinstance(optimizer, module.HybridDeviceOptimizer)


class HybridDeviceSlots:
    """A HybridDeviceOptimizer of Megatron-Core, as a `SlotProvider`.

    Args:
        optimizer: the optimizer.
        receiver: returns the receiver of a sub-optimizer.
    """

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
