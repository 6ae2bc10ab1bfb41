"""What any optimizer keeps and how it takes it back: one of torch's, or a `SlotKeeper`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from shardproof.state.dtensor import is_dtensor
from shardproof.state.slots import MASTER, LocalRange, ParameterSlots, Receipt, SlotKeeper, StoredSlot
from shardproof.state.tensors import empty_like_layout
from shardproof.state.zero_redundancy import is_zero_redundancy, owned_receipt, owned_slots

__all__ = ["receive", "slots_of"]

_NOT_OPTIONS = ("params", "param_names")


def slots_of(optimizer: torch.optim.Optimizer | SlotKeeper) -> list[ParameterSlots]:
    """What any optimizer keeps. Only looks: a parameter that has no state yet has none after.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> slots_of(torch.optim.SGD([weight], lr=0.1))[0].tensors
    {}
    """
    if isinstance(optimizer, SlotKeeper):
        return list(optimizer.describe_slots())
    if is_zero_redundancy(optimizer):
        return owned_slots(optimizer, slots_of)
    kind = type(optimizer).__qualname__
    described = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
        for parameter in group["params"]:
            tensors: dict[str, torch.Tensor | LocalRange] = {}
            values: dict[str, Any] = {}
            for slot, item in (optimizer.state.get(parameter) or {}).items():
                if isinstance(item, torch.Tensor):
                    tensors[slot] = item
                else:
                    values[slot] = item
            described.append(ParameterSlots(parameter, kind, options, tensors, values))
    return described


def receive(
    optimizer: torch.optim.Optimizer | SlotKeeper,
    parameter: torch.Tensor,
    group: dict[str, Any],
    stored: Mapping[str, StoredSlot],
) -> Receipt:
    """How any optimizer takes the stored slots of one of its parameters. Touches nothing before `attach`.

    An optimizer of torch's takes tensors in place where it has them. It keeps no masters, so it takes none.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> adam = torch.optim.AdamW([weight])
    >>> receipt = receive(adam, weight, adam.param_groups[0], {"exp_avg": StoredSlot(torch.float32, (2,))})
    >>> receipt.attach({}, frozenset(receipt.tensors))
    >>> list(adam.state[weight])
    ['exp_avg']
    """
    if isinstance(optimizer, SlotKeeper):
        return optimizer.receive_slots(parameter, stored)
    if is_zero_redundancy(optimizer):
        return owned_receipt(optimizer, parameter, group, stored, receive)
    current = optimizer.state.get(parameter) or {}
    tensors: dict[str, torch.Tensor] = {}
    for slot, like in stored.items():
        present = current.get(slot)
        if isinstance(present, torch.Tensor):
            tensors[slot] = present
        elif slot != MASTER:
            tensors[slot] = _new_slot(parameter, group, slot, like)
    return Receipt(type(optimizer).__qualname__, tensors, partial(_attach, optimizer, parameter, tensors))


def _attach(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    filled: frozenset[str],
) -> None:
    current = optimizer.state.get(parameter) or {}
    state = {slot: item for slot, item in current.items() if slot in filled or slot in values}
    state.update({slot: item for slot, item in tensors.items() if slot in filled})
    state.update(values)
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


def _new_slot(parameter: torch.Tensor, group: Mapping[str, Any], slot: str, like: StoredSlot) -> torch.Tensor:
    """Memory for a slot that the target has not made yet, where the target's group would have made it.

    As in torch's own `Optimizer.load_state_dict`, step counts lie on the CPU unless the group computes with
    them on the device, and all else lies where the parameter does. Elements that are stored nowhere (padding
    of a vocabulary) are zero, as in a slot that the optimizer makes.
    """
    if slot == "step" and not like.shape:
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=like.dtype, device=parameter.device if on_device else "cpu")
    if not like.shape and parameter.shape != ():
        return torch.zeros((), dtype=like.dtype, device=parameter.device)
    local = parameter._local_tensor if is_dtensor(parameter) else parameter
    elementwise = like.shape == tuple(local.shape)
    new = empty_like_layout(parameter, like.dtype, None if elementwise else like.shape)
    (new._local_tensor if is_dtensor(new) else new).zero_()
    return new
