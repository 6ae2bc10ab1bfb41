"""Megatron-Core's HybridDeviceOptimizer for the DTensors of Megatron-FSDP.

The released class copies a DTensor's gradient into a plain tensor, which fails, and pins memory through the
DTensor. The class of this module trains the *local* tensors instead. It owns an optimizer of the released
class, whose parameters share the memory of the non-empty local tensors. Outside, all is keyed by the
DTensors: groups, gradients, `state` and `state_dict`. Nothing communicates.

A rank has no state of a parameter of which it has no element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer as Released

import shardproof as sp
from shardproof.engine.state import (
    MASTER,
    HybridDeviceSlots,
    ParameterSlots,
    Receipt,
    StoredSlot,
    local_tensor,
    receiver,
)
from shardproof.frameworks.megatron.uneven_dtensors import (
    UnevenDTensor,
    attach_chunk,
    distributed_like,
    megatron_fsdp_of,
    uneven_dtensors,
)

_MASTER_OF_MEGATRON = "master_param"
_CLASSES = frozenset(("params", "cpu_optimizer_cls", "gpu_optimizer_cls"))
"""Entries of a group that a load leaves."""


class MegatronHybridOptimizer(Released):
    """Megatron-Core's `HybridDeviceOptimizer`, for the parameters of a Megatron-FSDP model.

    It has the arguments and the attributes of the released class. `state` has DTensors with their positions
    for `torch.distributed.checkpoint`. A float32 master of a narrower parameter is the slot ``master_param``.
    The released class also has this slot where it repeats the parameter.
    """

    _local: dict[torch.Tensor, torch.nn.Parameter]
    """The local tensor of each parameter that has elements on this rank, as the released optimizer has it."""

    _released: Released | None
    """The optimizer of the local tensors; None if this rank has no element of any parameter."""

    def _init_sub_optimizers(self) -> None:
        """Makes the optimizer of the local tensors. The released constructor calls this."""
        self._local = {
            parameter: torch.nn.Parameter(local_tensor(parameter).detach(), requires_grad=False)
            for group in self.param_groups
            for parameter in group["params"]
            if local_tensor(parameter).numel()
        }
        self._parameter_of = {id(local): parameter for parameter, local in self._local.items()}
        self._uneven = _positions(self._local)
        groups = []
        for group in self.param_groups:
            members = [self._local[parameter] for parameter in group["params"] if parameter in self._local]
            if members:
                groups.append((group, {**group, "params": members}))
        self.cpu_optimizers: list[torch.optim.Optimizer] = []
        self.gpu_optimizer: torch.optim.Optimizer | None = None
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._released = None
        if groups:
            self._released = Released([local for _, local in groups], **self.defaults)
            self.cpu_optimizers = self._released.cpu_optimizers
            self.gpu_optimizer = self._released.gpu_optimizer
            live = self._released.param_groups
            self._groups = [(group, local) for (group, _), local in zip(groups, live, strict=True)]
        self._loading: HybridDeviceSlots | None = None
        self._described: dict[tuple[int, str], tuple[torch.Tensor, Any]] = {}
        self._versions = self._current_versions()

    def _register_load_state_dict_hooks(self) -> None:
        """Registers nothing: `load_state_dict` keeps the sub-optimizers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the parameters to an optimizer that has none, as the constructor and `fully_shard` do.

        Raises:
            StructureError: the optimizer has parameters. The released class would never train the group.
        """
        is_made = hasattr(self, "_groups")
        if is_made and self.param_groups:
            raise sp.StructureError(
                "HybridDeviceOptimizer divides its parameters once, and would not train a group that is "
                "added later. Pass all parameters to the constructor"
            )
        super().add_param_group(param_group)
        if is_made:
            self._init_sub_optimizers()

    @property
    def param_to_inner_param(self) -> Any:
        """Raises an error: this optimizer has no state by parameter without the model."""
        raise sp.StructureError(
            "this HybridDeviceOptimizer trains local tensors of Megatron-FSDP. Save and load it as "
            "shardproof.frameworks.megatron_fsdp.optimizer_state(optimizer, model)"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates the local tensors. A parameter without a gradient does not change.

        Args:
            closure: computes the gradients and returns the loss; called once.

        Returns:
            The loss of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._released is None:
            return loss
        self.synchronize()
        for parameter, local in self._local.items():
            gradient = getattr(parameter, "decoupled_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            self._set_local_gradient(
                local, None if gradient is None else local_tensor(gradient).view(local.shape)
            )
        self._released.step()
        for local in self._local.values():
            self._set_local_gradient(local, None)
        self._versions = self._current_versions()
        self._present()
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Passes on options and parameters that the program or a load has changed. Each step calls it first.

        Copies and masters follow a parameter that was written, by torch's version counter. Values of a
        master that round to the parameter stay.
        """
        if self._released is None:
            return
        for group, local in self._groups:
            local.update({name: value for name, value in group.items() if name != "params"})
        is_loaded, is_written = self._loading is not None, self._versions != self._current_versions()
        if self._loading is not None:
            self._loading.apply()
            self._loading = None
        if is_written:
            HybridDeviceSlots(self._released, receiver).apply()
            self._versions = self._current_versions()
        if is_loaded or is_written:
            self._present()

    def dummy_step(self) -> None:
        """Makes state for a load, by a step with gradients of zero. The parameters stay."""
        kept = [(local, local.detach().clone()) for local in self._local.values()]
        for parameter, local in self._local.items():
            parameter.grad = distributed_like(torch.zeros_like(local), parameter)
        self.step()
        self.zero_grad()
        with torch.no_grad():
            for local, values in kept:
                local.copy_(values)
        self._versions = []  # copies follow

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizers have it, with DTensors. Does not communicate."""
        self.synchronize()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies the values of a state dict of this class with the same layout.

        Raises:
            StructureError: the groups have other numbers of parameters.
        """
        stored = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (stored, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise sp.StructureError(
                f"the state dict has groups of {sizes[0]} parameters, and the optimizer of {sizes[1]}. Make "
                "the optimizer with the groups of the run that saved"
            )
        parameters: dict[int, torch.Tensor] = {}
        for group, saved in zip(self.param_groups, stored, strict=True):
            group.update({name: value for name, value in saved.items() if name not in _CLASSES})
            parameters.update(zip(saved["params"], group["params"], strict=True))
        states = {parameters[number]: state for number, state in state_dict["state"].items()}
        for parameter, local in self._local.items():  # one without a stored state has taken no step
            self._receive_state(local, states.get(parameter, {}))
        self.synchronize()

    def describe_slots(self) -> Iterator[ParameterSlots]:
        """The slots of each parameter with elements on this rank, as plain tensors. They are live memory."""
        self.synchronize()
        if self._released is not None:
            for slots in HybridDeviceSlots(self._released, receiver).describe_slots():
                yield replace(slots, parameter=self._parameter_of[id(slots.parameter)])

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """The destinations of the stored slots of one parameter, with the shape of its local tensor."""
        if parameter not in self._local or self._released is None:
            empty = {
                slot: torch.empty(like.shape, dtype=like.dtype, device="cpu") for slot, like in stored.items()
            }
            rule = self.cpu_optimizer_cls or self.gpu_optimizer_cls
            kind = str((rule.func if isinstance(rule, partial) else rule).__qualname__)
            return Receipt(kind, empty, lambda values, filled: None)
        if self._loading is None:
            self._loading = HybridDeviceSlots(self._released, receiver)
        return self._loading.receive_slots(self._local[parameter], stored)

    def describe_shared(self) -> dict[str, Any]:
        """Returns nothing: all of its state belongs to parameters."""
        return {}

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """Does nothing; see `describe_shared`."""

    @torch.no_grad()
    def _receive_state(self, local: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        tensors = {
            MASTER if slot == _MASTER_OF_MEGATRON else slot: local_tensor(item).detach()
            for slot, item in state.items()
            if isinstance(item, torch.Tensor)
        }
        stored = {slot: StoredSlot(item.dtype, tuple(item.shape)) for slot, item in tensors.items()}
        receipt = self.receive_slots(self._parameter_of[id(local)], stored)
        for slot, destination in receipt.tensors.items():
            if isinstance(destination, torch.Tensor) and slot in tensors:
                destination.copy_(tensors[slot])
        values = {slot: item for slot, item in state.items() if not isinstance(item, torch.Tensor)}
        receipt.attach(values, frozenset(tensors))

    def _set_local_gradient(self, local: Any, gradient: torch.Tensor | None) -> None:
        """Sets the gradient of the tensor that a sub-optimizer trains.

        The released step copies ``decoupled_grad``, of any dtype, to the CPU and to masters. It steps a
        parameter without a gradient with its last gradient, which is therefore removed here.
        """
        assert self._released is not None
        inner = self._released.param_to_inner_param[local]
        local.decoupled_grad = gradient
        inner.grad = None
        if gradient is None:
            return
        if inner is not local:
            inner.grad = self._released.cpu_copy_map_grad.get(inner)
        elif not getattr(self.gpu_optimizer, "use_decoupled_grad", False):
            inner.grad = gradient.to(local.dtype)

    def _current_versions(self) -> list[tuple[int, int]]:
        """The counts of writes to each parameter, through the DTensor and to its local tensor."""
        return [(parameter._version, local_tensor(parameter)._version) for parameter in self._local]

    def _present(self) -> None:
        """Shows the state of the sub-optimizers, keyed by the parameters of the model."""
        assert self._released is not None
        self.state.clear()
        for slots in HybridDeviceSlots(self._released, receiver).describe_slots():
            parameter = self._parameter_of[id(slots.parameter)]
            state: dict[str, Any] = dict(slots.values)
            for slot, item in slots.tensors.items():
                name = _MASTER_OF_MEGATRON if slot == MASTER else slot
                state[name] = self._as_dtensor(parameter, name, item)
            if slots.tensors.keys() - {MASTER}:
                self.state[parameter] = state

    def _as_dtensor(self, parameter: torch.Tensor, slot: str, item: Any) -> Any:
        uneven = self._uneven.get(id(parameter))
        if uneven is None or not item.dim():
            return item
        known = self._described.get((id(parameter), slot))
        if known is None or known[0] is not item:
            described = distributed_like(item.view(local_tensor(parameter).shape), parameter)
            attach_chunk(described, uneven.chunk_of(described, f"{uneven.name}.{slot}"))
            known = self._described[id(parameter), slot] = (item, described)
        return known[1]


def _positions(parameters: Mapping[torch.Tensor, Any]) -> dict[int, UnevenDTensor]:
    """The positions of the parameters of Megatron-FSDP models, by the id of the parameter."""
    models = {
        id(model): model for item in parameters if (model := getattr(item, "_megatron_fsdp_model", None))
    }
    return {
        id(item.parameter): item
        for model in models.values()
        for item in uneven_dtensors(megatron_fsdp_of(model)).values()
    }
