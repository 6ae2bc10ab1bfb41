"""`fully_shard` makes a module a unit.

A program may control when units gather and free their parameters, with the names of torch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof._utils.arguments import warn_of_row_major_copies
from shardproof.engine.state import LOCAL, local_tensor
from shardproof.training.fsdp.flat_buffer import FlatBuffer
from shardproof.training.fsdp.row_layout import MeshRanks, spec_of
from shardproof.training.fsdp.schedule import install, schedule_of
from shardproof.training.fsdp.unit import UNIT, MixedPrecision, ShardedUnit, Strategy, unit_of
from shardproof.training.fsdp.unit_parameter import UnitParameter, pack

CACHE_LINE = 64
"""Alignment of parameters in bytes, as for separate memory, so that kernels give the same bits."""

_IN_UNIT = "_shardproof_in_unit"
"""Attribute of a parameter that a unit replaced."""


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    strategy: Strategy = "all",
    mixed_precision: MixedPrecision | None = None,
    reshard_after_forward: bool | None = None,
    prefetch: int = 1,
    ignored_params: Collection[nn.Parameter] = (),
    gradient_divisor: float | None = None,
) -> nn.Module:
    """Shards a module's parameters over ranks in row-aligned flat buffers, as one unit.

    Call it on inner modules first, and on the outermost module last. A unit has the parameters of its module
    that no inner unit has. The outermost unit, which schedules the inner units, may have none. Parameters
    become DTensors of which this rank holds *its own* rows: those in its range of the buffer, possibly none.

    - Make the optimizer after this call.
    - Call the module, not its `forward`, and do not change its output in place.
    - Return all results of a unit in its output, as tensors, lists, tuples or dicts. With strategy "all", the
      backward of a loss that an attribute holds raises, because the parameters are freed by then.
    - All ranks must have equal parameters before, and run the same units in the same order.
    - The number of rows differs between ranks. Operations that are not elementwise (`full_tensor`, a view,
      Muon) gather the whole tensor, so all ranks must run them.
    - The gradient of a parameter is None if no rank has one.

    Args:
        module: a module with parameters on a device, on the meta device (see `materialize`), or as DTensors
            of tensor parallelism.
        mesh: a mesh of one dimension (shard) or two (replicate, shard). Tensor parallel parameters need
            another, named dimension of the same root mesh. Experts may have a mesh of their own.
        strategy: "all" shards parameters, gradients and optimizer state. "optimizer_gradients" shards
            gradients and optimizer state, and keeps gathered parameters. To shard less, use
            `optim.DistributedOptimizer`, or torch's `DistributedDataParallel`, without `fully_shard`.
        mixed_precision: dtypes; None: those of the parameters.
        reshard_after_forward: for "all", whether to free gathered parameters between forward and backward.
            None: True for all units but the outermost.
        prefetch: units to gather ahead of the running one.
        ignored_params: parameters that stay as they are: they are not sharded or moved, and their gradients
            are not reduced. Pass them to the call for each module around them.
        gradient_divisor: divisor of gradients that are summed over the mesh; None: the mesh's size.

    Returns:
        The same module.

    Raises:
        ValueError: the mesh, the strategy or a parameter is not supported.
        TypeError: `module` is a list, for which torch's FSDP2 makes one unit.

    Sources: ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), FSDP (Zhao et al. 2023, arXiv:2304.11277).

    >>> import os, torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    >>> model.weight.placements
    (Shard(dim=0),)
    >>> model(torch.ones(4, 3)).sum().backward()
    >>> model.weight.grad.to_local().shape
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard takes one module, found a {type(module).__name__}. For one unit of several "
            "modules, call it on the module around them; otherwise call it on each"
        )
    if strategy not in get_args(Strategy):
        raise ValueError(
            f"strategy is {strategy!r}, not one of {', '.join(get_args(Strategy))}. To shard the optimizer's "
            "state alone, use shardproof.optim.DistributedOptimizer(..., shard_gradients=False); to shard "
            "nothing, torch.nn.parallel.DistributedDataParallel. Neither needs fully_shard"
        )
    precision = mixed_precision or MixedPrecision()
    if unit_of(module) is not None:
        raise ValueError(f"this {type(module).__name__} is already a unit of fully_shard")
    ranks, device = MeshRanks.of(mesh), torch.device(mesh.device_type)
    if device.type not in ("cpu", "meta"):
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    found = _parameters_of(module, set(map(id, ignored_params)))
    warn_of_row_major_copies(
        [one.name for one in found if not local_tensor(one.parameter).is_contiguous()], "fully_shard"
    )
    for _, part in _own_modules(module):
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                part._buffers[name] = buffer.to(device)
    classes: dict[tuple[torch.dtype, bool, bool], list[_ModuleParameter]] = {}
    """Parameters that may share a buffer: alike in master dtype, `requires_grad` and `is_meta`."""
    for one in found:
        key = (_master(one, precision), one.parameter.requires_grad, one.parameter.is_meta)
        classes.setdefault(key, []).append(one)
    buffers = [
        one for alike in classes.values() for one in _buffers(alike, ranks, precision, strategy, device)
    ]
    if not buffers and not any(unit_of(part) for part in module.modules()):
        raise ValueError(f"{type(module).__name__} has no parameters to shard")
    unit = ShardedUnit(
        module,
        buffers,
        ranks,
        device=device,
        strategy=strategy,
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        divisor=gradient_divisor or ranks.size,
        prefetch=prefetch,
    )
    module.__dict__[UNIT] = unit
    install(unit)
    return module


class _ModuleParameter:
    """A parameter, its first name, and all modules and names that have it."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.owners: list[tuple[nn.Module, str]] = []


def _own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    for name, child in module.named_children():
        if unit_of(child) is None:
            yield from _own_modules(child, f"{prefix}{name}.")


def _parameters_of(module: nn.Module, ignored: set[int]) -> list[_ModuleParameter]:
    by_id: dict[int, _ModuleParameter] = {}
    seen: set[int] = set()
    for prefix, part in _own_modules(module):
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, parameter in part._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            if getattr(parameter, _IN_UNIT, False) or hasattr(parameter, LOCAL):
                raise ValueError(
                    f"{prefix}{name} is shared with a unit inside of {type(module).__name__}: a shared "
                    "parameter must be in one unit, so call fully_shard on the module around both"
                )
            by_id.setdefault(id(parameter), _ModuleParameter(prefix + name, parameter)).owners.append(
                (part, name)
            )
    return list(by_id.values())


def _master(found: _ModuleParameter, precision: MixedPrecision) -> torch.dtype:
    if precision.master_dtype is not None and found.parameter.is_floating_point():
        return precision.master_dtype
    return found.parameter.dtype


def _buffers(
    found: list[_ModuleParameter],
    ranks: MeshRanks,
    precision: MixedPrecision,
    strategy: Strategy,
    device: torch.device,
) -> list[FlatBuffer]:
    master = _master(found[0], precision)
    is_floating = found[0].parameter.is_floating_point()
    compute = precision.compute_dtype if precision.compute_dtype and is_floating else master
    reduce = precision.reduce_dtype if precision.reduce_dtype and is_floating else compute
    specs = [spec_of(one.parameter, ranks, one.name) for one in found]
    shapes = [spec.outer.local_shape for spec in specs]
    packings = pack(shapes, ranks.shards, CACHE_LINE // min(compute.itemsize, master.itemsize))
    made = []
    for packing in packings:
        members = [(found[index], specs[index]) for index in packing.members]
        parameters = [
            UnitParameter(one.name, one.owners, spec, packing, member, ranks.index)
            for member, (one, spec) in enumerate(members)
        ]
        buffer = FlatBuffer(
            packing,
            ranks,
            parameters,
            master=master,
            compute=compute,
            reduce=reduce,
            keep=strategy != "all",
            device=torch.device("meta") if found[0].parameter.is_meta else device,
        )
        for parameter, (one, _) in zip(parameters, members, strict=True):
            if not one.parameter.is_meta:
                rows = local_tensor(one.parameter).detach()[slice(*parameter.rows)]
                parameter.part(buffer.shard).copy_(rows)
        buffer.bind([one.parameter.requires_grad for one, _ in members])
        for one, _ in members:
            setattr(one.parameter, _IN_UNIT, True)
        made.append(buffer)
    return made


class UnshardHandle:
    """A gather that `unshard` has started."""

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Waits for the gather, and registers the whole parameters in the module."""
        self._unit.gather()
        self._unit.wait_for_gather()
        self._unit.show_whole()


def unshard(module: nn.Module, *, async_op: bool = False) -> UnshardHandle | None:
    """Gathers a unit's own parameters, and registers them in the module as whole tensors. A collective.

    They stay until the end of the unit's next forward or backward, or until `reshard`. Not recursive. A loss
    that is computed with them outside of the unit's forward needs its backward before they are freed.

    The forward of the outermost unit gathers its parameters again, because they may have changed. So
    `unshard` before that forward costs one more gather.

    Args:
        module: a unit.
        async_op: True to return before the gather ends.

    Returns:
        With `async_op`, a handle: its `wait` ends the gather.

    Raises:
        ValueError: the module is not a unit.

    >>> import torch, torch.distributed as dist
    >>> from shardproof.fsdp import fully_shard, reshard
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    >>> unshard(model)
    >>> type(model.weight.data)
    <class 'torch.Tensor'>
    >>> reshard(model)
    >>> model.weight.placements
    (Shard(dim=0),)
    >>> dist.destroy_process_group()
    """
    unit = _unit(module)
    schedule_of(unit)
    unit.adopt_changes()
    unit.forget_old()
    unit.gather()
    handle = UnshardHandle(unit)
    if async_op:
        return handle
    handle.wait()
    return None


def reshard(module: nn.Module) -> None:
    """Registers the sharded parameters of a unit again, and frees the whole ones. Not recursive.

    Args:
        module: a unit.

    Raises:
        ValueError: the module is not a unit.
    """
    unit = _unit(module)
    unit.show_sharded()
    unit.free()


def set_modules_to_forward_prefetch(module: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Sets the units to gather when this unit's forward begins, instead of the next ones of the last forward.

    All ranks must pass the same modules.

    Args:
        module: a unit.
        modules: units, in the order in which to gather them.

    Raises:
        ValueError: a module is not a unit.
    """
    _unit(module).ahead_in_forward = [_unit(other) for other in modules]


def set_modules_to_backward_prefetch(module: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Sets the units to gather when this unit's backward begins, instead of those before it in the forward.

    All ranks must pass the same modules.

    Args:
        module: a unit.
        modules: units, in the order in which to gather them.

    Raises:
        ValueError: a module is not a unit.
    """
    _unit(module).ahead_in_backward = [_unit(other) for other in modules]


def _unit(module: nn.Module) -> ShardedUnit:
    unit = unit_of(module)
    if unit is None:
        raise ValueError(
            f"{type(module).__name__} is not a unit: call shardproof.fsdp.fully_shard on this module first"
        )
    return unit
