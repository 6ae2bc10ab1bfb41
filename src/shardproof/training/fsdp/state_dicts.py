"""State dicts of whole tensors. `module.state_dict()` is sharded, and does not communicate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardproof.training.fsdp.unit import units_in


def full_state_dict(
    module: nn.Module, *, device: torch.device | None = None, on_all_ranks: bool = True
) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers of a module with units, as whole tensors. A collective.

    It gathers one flat buffer at a time, in the master dtype. Data parallel shards become whole. A tensor
    parallel parameter stays a DTensor on the mesh of tensor parallelism.

    Args:
        module: a module with units.
        device: device of the result; None: device of the parameters.
        on_all_ranks: False to return the parameters of each unit only on the first rank of its mesh, and
            values outside of units (buffers, ignored parameters) only on the first rank of all meshes.

    Returns:
        Copies, under the names of `module.state_dict()`.

    Raises:
        ValueError: the module has no units.
    """
    whole: dict[int, torch.Tensor] = {}
    is_first = True
    for unit in units_in(module):
        wanted = on_all_ranks or not any(unit.ranks.mesh.get_coordinate() or [])
        is_first = is_first and wanted
        for buffer in unit.buffers:
            gathered = buffer.gathered()
            for parameter in buffer.parameters if wanted else ():
                view = gathered[parameter.start : parameter.stop].view(parameter.shape)
                whole[id(parameter.sharded)] = parameter.spec.gathered(view.to(device=device, copy=True))
    taken: dict[str, torch.Tensor] = {}
    sharded = {id(parameter.sharded) for unit in units_in(module) for parameter in unit.parameters}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in whole:
            taken[name] = whole[id(value)]
        elif id(value) not in sharded and is_first and isinstance(value, torch.Tensor):
            taken[name] = value.detach().to(device=device, copy=True)
    return taken


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Loads whole tensors. Each rank copies its own rows from an equal `state`. No collective.

    Args:
        module: a module with units.
        state: the result of `full_state_dict`, or the `state_dict()` of a model without units.

    Raises:
        ValueError: the module has no units, or names or shapes differ from the module's.
    """
    parameters = {id(p.sharded): p for unit in units_in(module) for p in unit.parameters}
    own = module.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise ValueError(f"the state dict is not this module's: missing {missing}, unexpected {unexpected}")
    for name, value in state.items():
        if tuple(value.shape) != tuple(own[name].shape):
            raise ValueError(f"{name} has shape {list(own[name].shape)}, the state dict {list(value.shape)}")
    for name, value in state.items():
        parameter = parameters.get(id(own[name]))
        if parameter is None:
            own[name].copy_(value)
        else:
            parameter.local.copy_(parameter.rows_of(value))
