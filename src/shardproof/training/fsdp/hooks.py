"""Hooks that report a unit's forward and backward to the schedule.

Note: compiled modules
    `torch.compile` compiles the forward of a unit and not its hooks, which communicate and replace
    parameters. They run before and after the compiled code, so a unit that is compiled alone has no graph
    break.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardproof.training.fsdp.schedule import UnitSchedule, is_backward
from shardproof.training.fsdp.unit import ShardedUnit, units_in

_SCHEDULE = "_shardproof_schedule"


def install(unit: ShardedUnit) -> None:
    """Installs the hooks in the unit's module."""
    unit.module.register_forward_pre_hook(partial(_before_forward, unit), prepend=True, with_kwargs=True)
    unit.module.register_forward_hook(partial(_after_forward, unit), always_call=True)
    unit.module.register_state_dict_pre_hook(partial(_restore_sharded, unit))  # type: ignore[no-untyped-call]
    unit.module.register_load_state_dict_pre_hook(partial(_restore_sharded, unit))  # type: ignore[no-untyped-call]
    unit.module.register_load_state_dict_post_hook(partial(_restore_sharded, unit))  # type: ignore[no-untyped-call]
    unit.module.__dict__["_apply"] = partial(_apply, unit)


def schedule_of(unit: ShardedUnit) -> UnitSchedule:
    """The schedule of the outermost module around this unit. The first forward makes it."""
    schedule = unit.__dict__.get(_SCHEDULE)
    if schedule is None:
        units = units_in(unit.module)
        schedule = UnitSchedule(units)
        for inner in units:
            inner.__dict__[_SCHEDULE] = schedule
    assert isinstance(schedule, UnitSchedule)
    return schedule


@_disable_dynamo
def _before_forward(unit: ShardedUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
    schedule_of(unit).enter(unit)
    if unit.precision.cast_inputs and unit.precision.compute_dtype is not None:
        args, kwargs = tree_map_only(
            torch.Tensor, partial(_cast, unit.precision.compute_dtype), (args, kwargs)
        )
    if torch.is_grad_enabled():
        args, kwargs = _watch_inputs(unit, (args, kwargs))
    return args, kwargs


@_disable_dynamo
def _after_forward(unit: ShardedUnit, module: nn.Module, args: Any, output: Any) -> Any:
    schedule_of(unit).leave(unit)
    if unit.precision.output_dtype is not None:
        output = tree_map_only(torch.Tensor, partial(_cast, unit.precision.output_dtype), output)
    if torch.is_grad_enabled():
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(_before_backward, unit))  # type: ignore[no-untyped-call]
    return output


def _restore_sharded(unit: ShardedUnit, *details: Any) -> None:
    """Restores sharded parameters after a failed pass, and adopts those that `assign=True` replaced."""
    unit.show_sharded()
    unit.adopt_changes()


def _before_backward(unit: ShardedUnit, gradient: torch.Tensor) -> None:
    schedule_of(unit).enter_backward(unit)


def _watch_inputs(unit: ShardedUnit, inputs: Any) -> Any:
    leaves, structure = tree_flatten(inputs)
    positions = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not positions:
        return inputs
    if not is_backward():
        unit.calls += 1
    passed = _LeaveBackward.apply(unit, *(leaves[k] for k in positions))  # type: ignore[no-untyped-call]
    for k, tensor in zip(positions, passed, strict=True):
        leaves[k] = tensor
    return tree_unflatten(leaves, structure)


class _LeaveBackward(torch.autograd.Function):
    """The identity on a unit's inputs. Its forward runs first in the unit, so its backward runs last."""

    @staticmethod
    def forward(ctx: Any, unit: ShardedUnit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        schedule_of(ctx.unit).leave_backward(ctx.unit)
        return (None, *gradients)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _apply(unit: ShardedUnit, function: Any, recurse: bool = True) -> nn.Module:
    """Makes the flat buffers adopt the parameters that `to_empty`, `to` and others replace."""
    apply: Any = type(unit.module)._apply
    unit.show_sharded()
    apply(unit.module, function, recurse)
    unit.adopt_changes()
    return unit.module
