"""The options of Megatron's optimizers, from a checkpoint of another number of optimizers.

From expert parallel size 2 on, experts have an optimizer of their own. The tensors of both optimizers have
the keys of one, but the state dict has the options of each optimizer: at the top for one, below the number
of each for several.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import shardproof as sp


def fit_options(state: dict[Any, Any], asked: Mapping[Any, Any]) -> None:
    """Gives each optimizer of a sharded state dict its options, in place.

    Args:
        state: the state of a checkpoint, before or after its tensors were added.
        asked: the sharded state dict to load.

    Raises:
        StructureError: the numbers of optimizers differ, and so do the options of the saved ones.
    """
    for key in state.keys() & asked.keys():
        stored, wanted = state[key], asked[key]
        if not (isinstance(stored, dict) and isinstance(wanted, Mapping)):
            continue
        saved, targets = optimizers_in(stored), optimizers_in(wanted)
        if not (saved and targets):
            fit_options(stored, wanted)
        elif len(saved) != len(targets):
            found = options_for(saved, targets)
            own = {name: value for name, value in stored.items() if not isinstance(name, int)}
            if len(targets) == 1:
                state[key] = {**found[0], **own}
            else:
                numbers = sorted(name for name in wanted if isinstance(name, int))
                state[key] = {
                    number: {**options, **stored.get(number, {})}
                    for number, options in zip(numbers, found, strict=True)
                }


def optimizers_in(state: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """The states with options of groups, of one optimizer or several; none if it is another state."""
    if _has_groups(state):
        return [state]
    numbered = [state[number] for number in sorted(name for name in state if isinstance(name, int))]
    return numbered if all(map(_has_groups, numbered)) else []


def options_for(
    saved: Sequence[Mapping[Any, Any]], targets: Sequence[Mapping[Any, Any]]
) -> list[dict[Any, Any]]:
    """The options of each target.

    Args:
        saved: the state of each saved optimizer, with the options of its groups.
        targets: the same of each optimizer of this run.

    Raises:
        StructureError: the numbers of optimizers differ, and so do the options of the saved ones.
    """
    if len(saved) == len(targets):
        return [dict(options) for options in saved]
    own = ("params", "is_expert_parallel")  # they always differ between dense and expert weights
    groups = [
        [
            {key: value for key, value in group.items() if key not in own}
            for group in options["optimizer"]["param_groups"]
        ]
        for options in saved
    ]
    if any(group not in groups[0] for others in groups[1:] for group in others):
        raise sp.StructureError(
            f"the checkpoint has the options of {len(saved)} optimizers, which differ, and this run has "
            f"{len(targets)}. Load with as many expert parallel ranks as it was saved with"
        )
    found: list[dict[Any, Any]] = []
    for target in targets:
        is_expert = any(group.get("is_expert_parallel") for group in target["optimizer"]["param_groups"])
        options = {
            name: copy.deepcopy(value)
            for name, value in saved[0].items()
            if not isinstance(name, int) and name != "param_state"
        }
        for group in options["optimizer"]["param_groups"]:
            group["is_expert_parallel"] = is_expert
        found.append(options)
    return found


def _has_groups(state: Any) -> bool:
    inner = state.get("optimizer") if isinstance(state, Mapping) else None
    return isinstance(inner, Mapping) and "param_groups" in inner
