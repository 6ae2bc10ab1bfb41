"""torch's ZeroRedundancyOptimizer: each rank describes the parameters whose state it owns.

It deals whole parameters out to the ranks of its group. A rank's share is trained by an inner optimizer, and
only there is the state; the outer one has the groups that the program and its schedulers see, and copies
their options inwards when it steps. Its own `state_dict` needs all shares gathered at one rank beforehand.
Here nothing is gathered: the state is the inner optimizer's, the options are the outer one's, and the shares
of all ranks together are every parameter once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.state.optimizer.slots import ParameterSlots, Receipt, Receiver, StoredSlot, options_of

__all__ = ["inner_optimizer", "is_zero_redundancy", "owned_receiver", "owned_slots"]

SlotsOf = Callable[[torch.optim.Optimizer], list[ParameterSlots]]


def is_zero_redundancy(optimizer: object) -> bool:
    """Whether it is a ZeroRedundancyOptimizer. Imports nothing: where torch's module is not, none can be.

    >>> is_zero_redundancy(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    False
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that trains this rank's share.

    Raises:
        StructureError: it is not made yet, or is one of torch's functional ones, which hide their options:
            so it is with ``overlap_with_ddp=True``.
    """
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer):
        found = "none is made before DDP has its buckets" if inner is None else type(inner).__qualname__
        raise StructureError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has a functional optimizer inside "
            f"({found}), which keeps its options out of its groups, so its state cannot be described. "
            "Construct it with overlap_with_ddp=False"
        )
    return inner


def owned_slots(optimizer: torch.optim.Optimizer, slots_of: SlotsOf) -> list[ParameterSlots]:
    """What this rank keeps of the parameters that it owns; of the others it says nothing. Local.

    Args:
        optimizer: a ZeroRedundancyOptimizer.
        slots_of: describes the inner optimizer, whichever it is.

    Returns:
        The inner optimizer's slots, under its class, with the options of the outer groups.

    Raises:
        StructureError: the inner optimizer cannot be described (see `inner_optimizer`), or keeps state beside
            its parameters, which would be one rank's alone.
    """
    inner = inner_optimizer(optimizer)
    beside = sorted(name for name in inner.state if isinstance(name, str))
    if beside:
        raise StructureError(
            f"{type(inner).__qualname__} in a ZeroRedundancyOptimizer keeps {beside} beside its parameters. "
            "Each rank has another inner optimizer, so nobody can say whose it is: keep it by parameter"
        )
    options: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        of_group = options_of(group)
        options |= {id(parameter): of_group for parameter in group["params"]}
    return [replace(slots, options=options[id(slots.parameter)]) for slots in slots_of(inner)]


def owned_receiver(
    optimizer: torch.optim.Optimizer, receiver: Callable[[torch.optim.Optimizer], Receiver]
) -> Receiver:
    """How parameters take what is stored: as the inner optimizer does, and not at all on other ranks.

    Args:
        optimizer: a ZeroRedundancyOptimizer. Options of its groups reach the inner one at the next step.
        receiver: makes the receiver of the inner optimizer, whichever it is.

    Raises:
        StructureError: the inner optimizer cannot be described (see `inner_optimizer`).
    """
    inner = inner_optimizer(optimizer)
    owned = {id(parameter) for share in inner.param_groups for parameter in share["params"]}
    receive = receiver(inner)

    def receive_owned(
        parameter: torch.Tensor, group: dict[str, Any], stored: Mapping[str, StoredSlot]
    ) -> Receipt:
        if id(parameter) in owned:
            return receive(parameter, group, stored)
        return Receipt(type(inner).__qualname__, {}, _takes_nothing)

    return receive_owned


def _takes_nothing(values: Mapping[str, Any], filled: frozenset[str]) -> None:
    """Another rank owns the state."""
