"""Schedules the gathers, the reductions and the end of backward for the units of a model.

Hooks report a unit's forward and backward to the schedule.

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
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardproof.training.fsdp.flat_buffer import GradientFlags, Reduction
from shardproof.training.fsdp.lanes import Lane
from shardproof.training.fsdp.unit import ShardedUnit, SharedUnits, units_in


def is_backward() -> bool:
    """True if autograd is running. Then a forward is a recomputation of activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


class UnitSchedule:
    """The forward and backward passes of the units of one model.

    Every decision depends on the order in which units run, and never on which gradients exist. So ranks that
    run the same units in the same order start the same collectives in the same order.

    Note: gathered at once
        At any time the units with whole parameters are the running unit, the units around it, and at most
        `prefetch` units after it (before it, in backward), or those that `set_modules_to_forward_prefetch`
        and `set_modules_to_backward_prefetch` named. The order of the previous forward gives the next
        units; the first forward gathers each unit when it runs. A unit that was gathered ahead and did not
        run is freed at the end of the pass.
    """

    def __init__(self, units: list[ShardedUnit]) -> None:
        self.units = units
        device = units[0].device
        shared = SharedUnits(Lane(device), Lane(device))
        for unit in units:
            unit.shared = shared
            unit.on_gradient = partial(self._note_gradient, unit)
        self._pool = shared.pool
        self._running: list[ShardedUnit] = []
        """Units whose forward is running, the outermost first."""
        self._order: list[ShardedUnit] = []
        self._expected: list[ShardedUnit] = []
        self._cursor = 0
        self._finished: list[ShardedUnit] = []
        """Units whose forward has ended and whose backward has not begun, in the order of the forward."""
        self._to_reduce: dict[ShardedUnit, None] = {}
        self._sent: list[Reduction] = []
        self._ending = False

    def enter(self, unit: ShardedUnit) -> None:
        """Before a unit's forward: gathers its parameters, and begins to gather those of the next units."""
        again = is_backward()
        if not again:
            self._run(unit)
            unit.adopt_changes()
            self._order.append(unit)
        unit.gather()
        unit.wait_for_gather()
        if not again:
            self._gather_ahead(unit)
        if torch.is_grad_enabled():
            self._to_reduce[unit] = None
        unit.show_whole()

    def leave(self, unit: ShardedUnit) -> None:
        """After a unit's forward, also if it raised."""
        again = is_backward()
        if not (again and unit.in_backward):
            unit.show_sharded()
        if again:
            return
        while self._running and self._running.pop() is not unit:
            pass
        outermost = not self._running
        with_grad = torch.is_grad_enabled()
        if with_grad:
            self._finished.append(unit)
        frees = unit.reshard_after_forward if unit.reshard_after_forward is not None else not outermost
        if frees or not with_grad:
            unit.free()
        if outermost:
            self._expected, self._order = self._order, []
            ran = set(self._expected)
            for other in self.units:
                if other not in ran or not with_grad:
                    other.free()

    def enter_backward(self, unit: ShardedUnit) -> None:
        """Before a unit's backward: gathers its parameters again, and begins with those of the next units."""
        self._ensure_end()
        if not unit.in_backward:
            unit.in_backward = True
            self._to_reduce[unit] = None
            unit.gather()
            unit.show_whole()
            found = [index for index, other in enumerate(self._finished) if other is unit]
            if found:
                del self._finished[found[-1] :]
            preceding = self._finished[: -unit.prefetch - 1 : -1] if found else []
            for other in preceding if unit.ahead_in_backward is None else unit.ahead_in_backward:
                other.gather()
        unit.wait_for_gather()

    def leave_backward(self, unit: ShardedUnit) -> None:
        """After a unit's backward: begins to reduce its gradients, and frees its parameters."""
        unit.calls = max(unit.calls - 1, 0)
        if unit.calls == 0:
            self._end_unit(unit)

    def end_backward(self) -> None:
        """At the end of backward: reduces the remaining gradients, and sets those of sharded parameters."""
        for unit in reversed(list(self._to_reduce)):
            self._end_unit(unit)
        for unit in self.units:
            unit.calls = 0
            unit.show_sharded()  # `unshard` may have shown the whole parameters
            unit.free()
        self._set_gradients()
        self._ending = False
        self._finished.clear()

    def _ensure_end(self) -> None:
        if not self._ending:
            self._ending = True
            Variable._execution_engine.queue_callback(self.end_backward)

    def _note_gradient(self, unit: ShardedUnit) -> None:
        """Records a gradient. It may not come by the unit's output, if an attribute refers to the loss."""
        self._ensure_end()
        self._to_reduce.setdefault(unit)

    def _run(self, unit: ShardedUnit) -> None:
        if unit in self._running:  # an interrupt ended its forward without its hook
            first = self._running.index(unit)
            for other in self._running[first:]:
                other.show_sharded()
            del self._running[first:]
        self._running.append(unit)
        if len(self._running) == 1:
            self._begin()

    def _begin(self) -> None:
        """Begins a forward of the whole model. Drops the gradients of a pass that failed."""
        if self._ending:
            self._pool.finish()
            for unit in self.units:
                for buffer in unit.buffers:
                    buffer.drop_gradients()
                unit.in_backward, unit.calls = False, 0
                unit.show_sharded()
            self._ending = False
            self._finished.clear()
            self._to_reduce.clear()
            self._sent.clear()
        self._cursor = 0
        self._order = []
        del self._finished[: -4 * len(self.units)]  # forwards without a backward
        for unit in self.units:
            unit.forget_old()

    def _gather_ahead(self, unit: ShardedUnit) -> None:
        try:
            self._cursor = self._expected.index(unit, self._cursor) + 1
        except ValueError:  # the order of units has changed
            following = []
        else:
            following = self._expected[self._cursor : self._cursor + unit.prefetch]
        for other in following if unit.ahead_in_forward is None else unit.ahead_in_forward:
            other.adopt_changes()
            other.gather()

    def _end_unit(self, unit: ShardedUnit) -> None:
        unit.in_backward = False
        unit.show_sharded()
        unit.free()
        if unit in self._to_reduce:
            del self._to_reduce[unit]
            if unit.sync:
                self._sent += unit.reduce()

    def _set_gradients(self) -> None:
        sent, self._sent = self._sent, []
        flags = GradientFlags(sent)
        self._pool.finish()
        flags.wait()
        for reduction in sent:
            arrived = flags.arrived(reduction)
            for parameter in reduction.buffer.parameters:
                if parameter.member in arrived and parameter.sharded.requires_grad:
                    parameter.gradient(reduction.result)


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
