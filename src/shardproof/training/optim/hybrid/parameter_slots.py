"""Describes and receives the slots of one parameter, and converts them from and to torch's `state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from shardproof.engine.state import (
    MASTER,
    ParameterSlots,
    Receipt,
    StoredSlot,
    device_of_scalar,
    is_dtensor,
    local_tensor,
    tensors_and_values,
)
from shardproof.errors import StructureError
from shardproof.training.optim.hybrid.stepped_copy import SteppedCopy
from shardproof.training.optim.schema import Spec

Schema = Callable[[], Mapping[str, Spec]]


def describe(
    stepped: SteppedCopy, state: Mapping[str, Any], kind: str, options: Mapping[str, Any]
) -> ParameterSlots:
    """Describe the slots of a parameter. A master always exists, other slots from the first step on.

    Args:
        stepped: the copy of the parameter.
        state: the sub-optimizer's state of the parameter, or an empty mapping.
        kind: class name of the update rule.
        options: options of the program's group.
    """
    if MASTER in state:
        raise StructureError(
            f"{kind} has a slot named {MASTER!r}, which is the name of the hybrid optimizer's masters. "
            "Use another class"
        )
    tensors, values = tensors_and_values(state)
    if stepped.has_master:
        tensors[MASTER] = stepped.current()
    return ParameterSlots(stepped.parameter, kind, options, tensors, values)


def receive(
    stepped: SteppedCopy,
    states: dict[torch.Tensor, Any],
    kind: str,
    options: Mapping[str, Any],
    stored: Mapping[str, StoredSlot],
    schema: Schema,
) -> Receipt:
    """Prepare a parameter for a load of the stored slots, from any side or optimizer.

    All destinations are new memory on the parameter's side, so a failed load changes nothing. A stored master
    is loaded into the parameter itself if the parameter has the master's dtype.

    Args:
        stepped: the copy of the parameter.
        states: state by parameter of the program. `Receipt.attach` replaces the parameter's entry.
        kind: class name of the update rule.
        options: options of the program's group.
        stored: slots in the checkpoint.
        schema: returns the slots that the sub-optimizer would create. Called only for slots that do not
            exist.
    """
    current = states.get(stepped.parameter) or {}
    specs = schema() if any(slot not in current and slot != MASTER for slot in stored) else {}
    tensors = {
        slot: _destination(stepped, slot, current.get(slot), specs.get(slot), options, found)
        for slot, found in stored.items()
        if slot != MASTER
    }
    if stepped.has_master or (MASTER in stored and stored[MASTER].dtype == stepped.tensor.dtype):
        tensors[MASTER] = stepped.values()  # elements that are not stored (padding) do not change

    def attach(values: Mapping[str, Any], filled: frozenset[str]) -> None:
        state: dict[str, Any] = {}
        for slot in stored:  # equal order on every rank; the order of a set is not
            if slot in filled and slot != MASTER:
                dtype = specs[slot].dtype if slot in specs else None
                state[slot] = tensors[slot] if dtype is None else tensors[slot].to(dtype)
        state.update(values)
        if state:
            states[stepped.parameter] = state
        else:
            states.pop(stepped.parameter, None)
        if MASTER not in filled:
            if stepped.owns_memory:
                stepped.take_values(stepped.local)
            return
        with torch.no_grad():
            if not stepped.has_master:
                stepped.local.copy_(tensors[MASTER])
            if stepped.owns_memory:
                stepped.take_values(tensors[MASTER])

    return Receipt(kind, tensors, attach)


def _destination(
    stepped: SteppedCopy,
    slot: str,
    present: Any,
    spec: Spec | None,
    options: Mapping[str, Any],
    found: StoredSlot,
) -> torch.Tensor:
    """New memory for one slot, with the device and dtype that the sub-optimizer would choose.

    It is on the device of the stepped tensor; see `device_of_scalar` for step counts.
    """
    if isinstance(present, torch.Tensor):
        return torch.zeros_like(present)
    dtype, shape, device = found.dtype, tuple(stepped.tensor.shape), stepped.tensor.device
    if spec is not None and spec.dtype is not None and torch.promote_types(dtype, spec.dtype) != spec.dtype:
        dtype = spec.dtype  # it would not widen without loss
    is_scalar = spec.kind == "scalar" if spec is not None else found.shape == ()
    if is_scalar:
        return torch.zeros((), dtype=dtype, device=device_of_scalar(slot, options, device))
    if spec is None and found.shape != shape:
        if is_dtensor(stepped.parameter):
            raise StructureError(
                f"slot {slot!r} has shape {list(found.shape)}, but the local shape of its sharded parameter "
                f"is {list(shape)}: the part of the slot that belongs to this rank is unknown. Use an "
                "optimizer whose slots have the shape of the parameter"
            )
        shape = found.shape
    return torch.zeros(shape, dtype=dtype, device=device)


def with_masters(state_dict: dict[str, Any], copies: Sequence[SteppedCopy | None]) -> dict[str, Any]:
    """Add the masters to a state dict of torch."""
    state = dict(state_dict["state"])
    for index, stepped in enumerate(copies):
        if stepped is not None and stepped.has_master:
            state[index] = {**state.get(index, {}), MASTER: stepped.current()}
    return {**state_dict, "state": state}


def receipts(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    receive: Callable[[torch.Tensor, Mapping[str, StoredSlot]], Receipt],
) -> list[Callable[[], None]]:
    """Copy a state dict of torch into new memory. Returns for each parameter a function that attaches it."""
    saved = state_dict["param_groups"]
    here, there = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if here != there:
        raise ValueError(
            f"the groups of this optimizer have {here} parameters, those of the state dict {there}"
        )
    attach: list[Callable[[], None]] = []
    for group, described in zip(groups, saved, strict=True):
        for parameter, index in zip(group["params"], described["params"], strict=True):
            state = state_dict["state"].get(index, {})
            tensors = {
                slot: local_tensor(item) for slot, item in state.items() if isinstance(item, torch.Tensor)
            }
            values = {slot: deepcopy(item) for slot, item in state.items() if slot not in tensors}
            stored = {slot: StoredSlot(item.dtype, tuple(item.shape)) for slot, item in tensors.items()}
            receipt = receive(parameter, stored)
            filled = frozenset(receipt.tensors) & frozenset(tensors)
            for slot in sorted(filled):
                source, destination = tensors[slot], receipt.tensors[slot]
                assert isinstance(destination, torch.Tensor)
                if destination.shape != source.shape:
                    raise ValueError(
                        f"slot {slot!r} of parameter {index} has shape {list(source.shape)}, expected "
                        f"{list(destination.shape)}"
                    )
                destination.copy_(source)
            attach.append(partial(receipt.attach, values, filled))
    return attach
