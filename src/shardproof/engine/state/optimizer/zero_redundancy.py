"""torch's ZeroRedundancyOptimizer: each rank describes the parameters whose state it owns.

It assigns whole parameters to the ranks of its group. An inner optimizer trains a rank's parameters and holds
their state. The outer one has the groups that the program and its schedulers use, and copies their options to
the inner one in each step. Its `state_dict` needs a gather of all states on one rank. This module gathers
nothing: each rank saves the inner optimizer's state with the outer one's options. Each parameter belongs to
exactly one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shardproof.engine.state.optimizer.slots import ParameterSlots, Receipt, Receiver, StoredSlot, options_of
from shardproof.errors import StructureError

SlotsOf = Callable[[torch.optim.Optimizer], list[ParameterSlots]]


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


def owned_slots(optimizer: torch.optim.Optimizer, slots_of: SlotsOf) -> list[ParameterSlots]:
    """The slots of the parameters that this rank owns.

    Args:
        optimizer: a ZeroRedundancyOptimizer.
        slots_of: returns the slots of the inner optimizer.

    Returns:
        The inner optimizer's slots, with its class and the options of the outer groups.

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

    Args:
        optimizer: a ZeroRedundancyOptimizer. It copies the options of its groups to the inner one at the next
            step.
        receiver: returns the receiver of the inner optimizer.

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
