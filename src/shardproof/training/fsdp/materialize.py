"""Allocates and initialises parameters on the meta device, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from shardproof.training.fsdp.unit import ShardedUnit, units_in


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"{type(module).__name__} has parameters and no reset_parameters(): pass materialize(..., "
            "initialize=function), which sets a module's own parameters and buffers"
        )
    reset()


def materialize(
    module: nn.Module, device: torch.device | str, *, initialize: Callable[[nn.Module], None] | None = None
) -> nn.Module:
    """Allocates and initialises a module that was built on the meta device. A collective.

    For one unit after another, each rank allocates and initialises whole parameters. The first rank of the
    mesh broadcasts its values, and each rank copies its own rows. The parameter objects stay the same.

    Args:
        module: a module with units.
        device: device of parameters and buffers.
        initialize: sets the parameters and buffers of one module, without its children; None: the module's
            `reset_parameters()`. It is called for modules with parameters or buffers on the meta device.

    Returns:
        The same module.

    Raises:
        ValueError: the module has no units, or a module has no `reset_parameters`.

    Example:
        >>> import torch.distributed as dist
        >>> from shardproof.fsdp import fully_shard
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with torch.device("meta"):
        ...     model = nn.Linear(3, 2)
        >>> model = materialize(fully_shard(model, mesh=init_device_mesh("cpu", (1,))), "cpu")
        >>> model.weight.is_meta
        False
        >>> dist.destroy_process_group()
    """
    device = torch.device(device)
    for unit in reversed(units_in(module)):
        _materialize(unit, device, initialize or _reset)
    for part in module.modules():
        if _empty_buffers(part, device):
            (initialize or _reset)(part)
    return module


@torch.no_grad()
def _materialize(unit: ShardedUnit, device: torch.device, initialize: Callable[[nn.Module], None]) -> None:
    buffers = [buffer for buffer in unit.buffers if buffer.device.type == "meta"]
    whole = []
    for buffer in buffers:
        memory = torch.zeros(buffer.packing.size, dtype=buffer.master, device=device)
        for parameter in buffer.parameters:
            view = memory[parameter.start : parameter.stop].view(parameter.shape)
            parameter.register(nn.Parameter(parameter.spec.gathered(view), requires_grad=False))
        whole.append(memory)
    owners = {id(m): m for b in buffers for p in b.parameters for m, _ in p.owners}
    try:
        for owner in owners.values():
            _empty_buffers(owner, device)
            initialize(owner)
    finally:
        for parameter in unit.parameters:
            parameter.show_sharded()
    for buffer, memory in zip(buffers, whole, strict=True):
        for group in buffer.ranks.groups:
            dist.broadcast(memory, group=group, group_src=0)
        wanted = [parameter.sharded.requires_grad for parameter in buffer.parameters]
        buffer.allocate(device)
        buffer.shard.copy_(buffer.own(memory))
        buffer.bind(wanted)


def _empty_buffers(module: nn.Module, device: torch.device) -> bool:
    found = [name for name, value in module._buffers.items() if value is not None and value.is_meta]
    for name in found:
        value = module._buffers[name]
        assert value is not None
        module._buffers[name] = torch.empty_like(value, device=device)
    return bool(found)
