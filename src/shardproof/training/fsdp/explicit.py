"""Explicit control of when units gather and free their parameters, with the names of torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardproof.training.fsdp.hooks import schedule_of
from shardproof.training.fsdp.unit import ShardedUnit, unit_of


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
