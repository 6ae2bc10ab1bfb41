"""Reads and restores the slots of any optimizer.

The optimizer is a `SlotProvider`, Megatron-Core's HybridDeviceOptimizer, torch's ZeroRedundancyOptimizer, or
any other optimizer of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardproof.engine.state.dtensor import local_tensor
from shardproof.engine.state.optimizer.hybrid_device import HybridDeviceSlots, is_hybrid_device
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
from shardproof.engine.state.optimizer.zero_redundancy import is_zero_redundancy, owned_receiver, owned_slots
from shardproof.engine.state.tensors import empty_like_layout


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
