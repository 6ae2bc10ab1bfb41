"""Calls on a whole sharded model: whole state dicts, materialization, and clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shardproof.engine.state import local_tensor
from shardproof.training.collectives import all_reduce
from shardproof.training.fsdp.unit import ShardedUnit, units_in


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


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    different_over: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scales gradients so that their norm over all parameters and ranks is at most `max_norm`. A collective.

    Each element counts once. Shards (even, uneven or empty) are summed over the mesh dimensions that shard
    them; replicas are not. Parameters may be on different meshes.

    Args:
        parameters: a module or parameters, the same on all ranks, with or without gradients.
        max_norm: the largest norm that is allowed; infinity to compute the norm only.
        norm_type: p of the p-norm, or infinity.
        different_over: a group whose ranks have different parameters under one name, such as experts that are
            not DTensors of the expert parallel mesh. Pass only such parameters together with it.

    Returns:
        The norm before clipping, a float32 scalar on the gradients' device; the same on all ranks.

    Raises:
        ValueError: there are no parameters.
    """
    wanted = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    if not wanted:
        raise ValueError("clip_grad_norm_ needs at least one parameter")
    device = local_tensor(wanted[0]).device
    kinds: dict[tuple[int, ...], tuple[list[ProcessGroup], list[torch.Tensor]]] = {}
    gradients = []
    for parameter in wanted:
        groups: list[ProcessGroup] = []
        """Groups whose ranks hold different parts of the parameter."""
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            groups = [mesh.get_group(dim) for dim, one in enumerate(placements) if not one.is_replicate()]
        kind = kinds.setdefault(tuple(map(id, groups)), (groups, []))
        if parameter.grad is not None:
            gradients.append(local_tensor(parameter.grad))
            kind[1].append(gradients[-1])
    infinite = norm_type == float("inf")
    operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    powers = []
    for groups, shards in kinds.values():
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) for g in shards if g.numel()]
        power = torch.zeros((), dtype=torch.float32, device=device)
        if norms and infinite:
            power = torch.stack(norms).max()
        elif norms:
            power = torch.stack(norms).pow_(norm_type).sum()
        for group in [*groups, *([different_over] if different_over is not None else [])]:
            all_reduce(power, group, operation).wait()
        powers.append(power)
    total = torch.stack(powers).max() if infinite else torch.stack(powers).sum() ** (1.0 / norm_type)
    if gradients:
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, scale)
    return total
