"""One model's units in time: which is gathered next, when gradients leave, and what ends a backward."""

from __future__ import annotations

from functools import partial

import torch
from torch.autograd import Variable

from shardproof.fsdp.lanes import Lane
from shardproof.fsdp.reduce import GradientFlags, Reduction
from shardproof.fsdp.unit import SharedUnits, Unit

__all__ = ["Schedule", "is_backward"]


def is_backward() -> bool:
    """Whether autograd is running: then a forward is one that activation checkpointing does again."""
    return bool(torch._C._current_graph_task_id() != -1)


class Schedule:
    """The forward and backward passes of the units of one model.

    Every decision here follows from the order in which units run, never from which gradients there are, so
    ranks that run the same units in the same order start the same collectives in the same order.

    Note: gathered at once
        At any time whole parameters are held by the units around the one that runs, by it, and by at most
        `prefetch` units after it (before it, in backward). A unit ahead is known from the last forward; the
        first forward gathers each unit when it is needed. What was gathered ahead and did not run is freed at
        the end of the pass.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        device = units[0].device
        shared = SharedUnits(Lane(device), Lane(device))
        for unit in units:
            unit.shared = shared
            unit.on_gradient = partial(self._note_gradient, unit)
        self._pool = shared.pool
        self._running: list[Unit] = []
        """Units whose forward has begun and is not over, the outermost first."""
        self._order: list[Unit] = []
        self._expected: list[Unit] = []
        self._cursor = 0
        self._finished: list[Unit] = []
        """Units whose forward is over and whose backward is to come, in that order."""
        self._to_reduce: dict[Unit, None] = {}
        self._sent: list[Reduction] = []
        self._ending = False

    def enter(self, unit: Unit) -> None:
        """Before a unit's forward: its parameters are gathered, and the next units' on their way."""
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

    def leave(self, unit: Unit) -> None:
        """After a unit's forward, also one that raised."""
        again = is_backward()
        if not (again and unit.in_backward):
            unit.show_sharded()
        if again:
            return
        while self._running and self._running.pop() is not unit:
            pass
        outermost = not self._running
        learning = torch.is_grad_enabled()
        if learning:
            self._finished.append(unit)
        frees = unit.reshard_after_forward if unit.reshard_after_forward is not None else not outermost
        if frees or not learning:
            unit.free()
        if outermost:
            self._expected, self._order = self._order, []
            ran = set(self._expected)
            for other in self.units:
                if other not in ran or not learning:
                    other.free()

    def enter_backward(self, unit: Unit) -> None:
        """Before the first gradient passes a unit: its parameters are gathered again, and the next units'."""
        self._await_end()
        if not unit.in_backward:
            unit.in_backward = True
            self._to_reduce[unit] = None
            unit.gather()
            unit.show_whole()
            self._gather_before(unit)
        unit.wait_for_gather()

    def leave_backward(self, unit: Unit) -> None:
        """After the gradient has passed a unit: its own gradients leave, its parameters are freed."""
        unit.calls = max(unit.calls - 1, 0)
        if unit.calls == 0:
            self._end_unit(unit)

    def end_backward(self) -> None:
        """At the end of backward: the rest is reduced, and sharded parameters get their gradients."""
        for unit in reversed(list(self._to_reduce)):
            self._end_unit(unit)
        for unit in self.units:
            unit.calls = 0
            unit.free()
        self._give_gradients()
        self._ending = False
        self._finished.clear()

    def _await_end(self) -> None:
        if not self._ending:
            self._ending = True
            Variable._execution_engine.queue_callback(self.end_backward)

    def _note_gradient(self, unit: Unit) -> None:
        """A gradient arrived, maybe not by way of the unit's output: a loss that an attribute keeps."""
        self._await_end()
        self._to_reduce.setdefault(unit)

    def _run(self, unit: Unit) -> None:
        if unit in self._running:  # that forward ended without a word (KeyboardInterrupt)
            place = self._running.index(unit)
            for other in self._running[place:]:
                other.show_sharded()
            del self._running[place:]
        self._running.append(unit)
        if len(self._running) == 1:
            self._begin()

    def _begin(self) -> None:
        """A new forward of the whole model; what a failed pass left is dropped."""
        if self._ending:
            self._pool.finish()
            for unit in self.units:
                unit.drop_gradients()
                unit.in_backward, unit.calls = False, 0
                unit.show_sharded()
            self._ending = False
            self._finished.clear()
            self._to_reduce.clear()
            self._sent.clear()
        self._cursor = 0
        self._order = []
        del self._finished[: -4 * len(self.units)]  # forwards whose backward never came
        for unit in self.units:
            unit.forget_old()

    def _gather_ahead(self, unit: Unit) -> None:
        try:
            self._cursor = self._expected.index(unit, self._cursor) + 1
        except ValueError:  # another order than last time
            return
        for other in self._expected[self._cursor : self._cursor + unit.prefetch]:
            other.adopt_changes()
            other.gather()

    def _gather_before(self, unit: Unit) -> None:
        places = [place for place, other in enumerate(self._finished) if other is unit]
        if places:
            del self._finished[places[-1] :]
            for other in self._finished[: -unit.prefetch - 1 : -1]:
                other.gather()

    def _end_unit(self, unit: Unit) -> None:
        if unit.in_backward:
            unit.in_backward = False
            unit.show_sharded()
        unit.free()
        if unit in self._to_reduce:
            del self._to_reduce[unit]
            if unit.sync:
                self._sent += unit.reduce()

    def _give_gradients(self) -> None:
        sent, self._sent = self._sent, []
        agreement = GradientFlags(sent)
        self._pool.finish()
        agreement.wait()
        for reduction in sent:
            arrived = agreement.arrived(reduction)
            for parameter in reduction.buffer.parameters:
                if parameter.member in arrived and parameter.sharded.requires_grad:
                    parameter.gradient(reduction.result)
