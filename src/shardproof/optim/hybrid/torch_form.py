"""`state_dict` as torch's optimizers have it: slots by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from shardproof.optim.hybrid.stepped_copy import Twin
from shardproof.state import MASTER, Receipt, StoredSlot, local_tensor

__all__ = ["receipts", "with_masters"]


def with_masters(state_dict: dict[str, Any], twins: Sequence[Twin]) -> dict[str, Any]:
    """A state dict of torch's with the masters added.

    Args:
        state_dict: what `torch.optim.Optimizer.state_dict` gave.
        twins: of all parameters, by position.
    """
    state = dict(state_dict["state"])
    for index, twin in enumerate(twins):
        if twin.has_master:
            state[index] = {**state.get(index, {}), MASTER: twin.current()}
    return {**state_dict, "state": state}


def receipts(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    receive: Callable[[torch.Tensor, Mapping[str, StoredSlot]], Receipt],
) -> list[Callable[[], None]]:
    """New memory filled from a state dict of torch's form, and what attaches it, by parameter.

    Args:
        state_dict: torch's form.
        groups: of the program.
        receive: `HybridDeviceOptimizer.receive_slots`.

    Raises:
        ValueError: groups, numbers of parameters or shapes differ.
    """
    saved = state_dict["param_groups"]
    here, there = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if here != there:
        raise ValueError(f"the groups here have {here} parameters, those of the state dict {there}")
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
                _fill(receipt.tensors[slot], tensors[slot], f"slot {slot!r} of parameter {index}")
            attach.append(partial(receipt.attach, values, filled))
    return attach


def _fill(destination: Any, source: torch.Tensor, what: str) -> None:
    if destination.shape != source.shape:
        raise ValueError(f"{what} has shape {list(source.shape)}, {list(destination.shape)} is held here")
    destination.copy_(source)
