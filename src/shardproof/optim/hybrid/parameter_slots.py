"""The slots of one parameter, described and received, and in torch's `state_dict` form by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.optim.hybrid.stepped_copy import SteppedCopy
from shardproof.optim.schema import Spec
from shardproof.state import MASTER, LocalRange, ParameterSlots, Receipt, StoredSlot, is_dtensor, local_tensor

__all__ = ["describe", "receipts", "receive", "with_masters"]

Schema = Callable[[], Mapping[str, Spec]]


def describe(
    stepped: SteppedCopy, state: Mapping[str, Any], kind: str, options: Mapping[str, Any]
) -> ParameterSlots:
    """What is kept of a parameter. A master is there from the start, other slots once there is state.

    Args:
        stepped: what is stepped for the parameter.
        state: the sub-optimizer's, of this parameter; empty if it has not made any.
        kind: the class to name.
        options: of the program's group.
    """
    tensors: dict[str, torch.Tensor | LocalRange] = {}
    values: dict[str, Any] = {}
    for slot, item in state.items():
        if slot == MASTER:
            raise StructureError(
                f"{kind} keeps a slot of its own that is named {MASTER!r}, as the hybrid optimizer's masters "
                "are. Use another class"
            )
        if isinstance(item, torch.Tensor):
            tensors[slot] = item
        else:
            values[slot] = item
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
    """How a parameter takes what is stored, from whichever side or optimizer it comes.

    All destinations are new memory on the parameter's side, so that a load that fails has changed nothing. A
    master that is stored for a parameter which has no need of one (it has the master's dtype itself) goes to
    the parameter.

    Args:
        stepped: what is stepped for the parameter.
        states: state by parameter of the program; the parameter's entry is replaced at the end.
        kind: the class to name.
        options: of the program's group.
        stored: what the checkpoint has.
        schema: tells the slots that the sub-optimizer would make; asked only about slots that it has not
            made.
    """
    current = states.get(stepped.parameter) or {}
    known = schema() if any(slot not in current and slot != MASTER for slot in stored) else {}
    tensors: dict[str, torch.Tensor | LocalRange] = {}
    for slot, found in stored.items():
        if slot != MASTER:
            tensors[slot] = _destination(stepped, slot, current.get(slot), known.get(slot), options, found)
    if stepped.has_master or (MASTER in stored and stored[MASTER].dtype == stepped.tensor.dtype):
        tensors[MASTER] = stepped.values()  # elements that are stored nowhere (padding) stay what they are

    def attach(values: Mapping[str, Any], filled: frozenset[str]) -> None:
        state = {
            slot: _widened(tensors[slot], known.get(slot))
            for slot in stored  # the same order on every rank, whose sets have orders of their own
            if slot in filled and slot != MASTER
        }
        state.update(values)
        if state:
            states[stepped.parameter] = state
        else:
            states.pop(stepped.parameter, None)
        if MASTER not in filled:
            if stepped.owns_memory:
                stepped.take_parameter()
            return
        master = tensors[MASTER]
        assert isinstance(master, torch.Tensor)
        with torch.no_grad():
            if not stepped.has_master:
                stepped.local.copy_(master)
            if stepped.owns_memory:
                stepped.take_values(master)

    return Receipt(kind, tensors, attach)


def _destination(
    stepped: SteppedCopy,
    slot: str,
    present: Any,
    known: Spec | None,
    options: Mapping[str, Any],
    found: StoredSlot,
) -> torch.Tensor:
    """New memory for one slot, where the sub-optimizer would have made it, and in the dtype it would have.

    As in torch's own `Optimizer.load_state_dict`, step counts lie on the CPU unless the group computes with
    them on the device, and all else lies where the stepped tensor does.
    """
    if isinstance(present, torch.Tensor):
        return torch.zeros_like(present)
    dtype = found.dtype
    if known is not None and known.dtype is not None and not _widens(found.dtype, known.dtype):
        dtype = known.dtype
    scalar = known.kind == "scalar" if known is not None else found.shape == ()
    if scalar:
        on_device = slot != "step" or options.get("capturable") or options.get("fused")
        return torch.zeros((), dtype=dtype, device=stepped.tensor.device if on_device else "cpu")
    if known is not None or found.shape == tuple(stepped.tensor.shape):
        return stepped.empty(dtype)
    if is_dtensor(stepped.parameter):
        raise StructureError(
            f"slot {slot!r} has shape {list(found.shape)}, its parameter, which is sharded, is held as "
            f"{list(stepped.tensor.shape)}: there is no saying which part of the slot belongs to this rank. "
            "Use an optimizer whose slots are like the parameter"
        )
    return stepped.empty(dtype, found.shape)


def _widens(stored: torch.dtype, made: torch.dtype) -> bool:
    """Whether values of the stored dtype become the sub-optimizer's without loss."""
    return torch.promote_types(stored, made) == made


def _widened(item: torch.Tensor | LocalRange, known: Spec | None) -> torch.Tensor:
    assert isinstance(item, torch.Tensor)
    return item if known is None or known.dtype is None else item.to(known.dtype)


def with_masters(state_dict: dict[str, Any], copies: Sequence[SteppedCopy]) -> dict[str, Any]:
    """A state dict of torch's with the masters added.

    Args:
        state_dict: what `torch.optim.Optimizer.state_dict` gave.
        copies: of all parameters, by position.
    """
    state = dict(state_dict["state"])
    for index, stepped in enumerate(copies):
        if stepped.has_master:
            state[index] = {**state.get(index, {}), MASTER: stepped.current()}
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
