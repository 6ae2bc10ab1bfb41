"""A unit: a module that `fully_shard` was called on, its flat buffers, and when its gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from shardproof.fsdp.flat_buffer import FlatBuffer
from shardproof.fsdp.lanes import Done, Lane
from shardproof.fsdp.mesh_ranks import MeshRanks
from shardproof.fsdp.precision import MixedPrecision, Strategy
from shardproof.fsdp.reduce import GradientPool, Reduction
from shardproof.fsdp.unit_parameter import UnitParameter

__all__ = ["UNIT", "SharedUnits", "Unit", "no_sync", "set_requires_gradient_sync", "unit_of", "units_in"]

UNIT = "_shardproof_fsdp"
"""Attribute of a module: its unit."""


@dataclass(slots=True, eq=False)
class SharedUnits:
    """What the units of one model share."""

    gathers: Lane
    reductions: Lane
    pool: GradientPool = field(default_factory=GradientPool)


class Unit:
    """One module's own parameters, sharded together.

    Args:
        module: that they belong to.
        buffers: that hold them; none of a unit that only holds others together.
        ranks: over which they are sharded.
        device: that it computes on.
        strategy: what of them is sharded.
        precision: dtypes.
        reshard_after_forward: whether gathered parameters are freed between forward and backward; None: yes
            unless the unit is outermost, whose backward comes at once.
        divisor: what sums of gradients are divided by.
        prefetch: units gathered ahead.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: list[FlatBuffer],
        ranks: MeshRanks,
        *,
        device: torch.device,
        strategy: Strategy,
        precision: MixedPrecision,
        reshard_after_forward: bool | None,
        divisor: float,
        prefetch: int,
    ) -> None:
        self.module, self.buffers, self.ranks = module, buffers, ranks
        self.strategy, self.precision, self.prefetch = strategy, precision, prefetch
        self.reshard_after_forward, self.divisor = reshard_after_forward, divisor
        self.device = device
        self.shared = SharedUnits(Lane(device), Lane(device))
        self.on_gradient: Callable[[], None] = _unnoticed
        self.sync = True
        self.may_have_changed = True
        """Whether parameters may be others than at the last gather: always, but within `no_sync`."""
        self.calls = 0
        """Forwards whose backward is to come and says when it is over."""
        self.in_backward = False
        self.has_gathered = False
        self._running: list[Done] = []
        self._memory: dict[FlatBuffer, torch.Tensor] = {}
        for buffer in buffers:
            for parameter in buffer.parameters:
                parameter.on_gradient = partial(self._arrived, buffer)

    @property
    def parameters(self) -> list[UnitParameter]:
        """Of all buffers."""
        return [parameter for buffer in self.buffers for parameter in buffer.parameters]

    @property
    def keeps(self) -> bool:
        """Whether gathered parameters are kept all the time."""
        return self.strategy != "all"

    def adopt_changes(self) -> None:
        """Notices parameters that were replaced since, and takes their values (see `FlatBuffer.adopt`)."""
        for buffer in self.buffers:
            if not all(parameter.is_bound() for parameter in buffer.parameters):
                self._forget()
                buffer.adopt()

    def gather(self) -> None:
        """Starts to gather the parameters, if they are not there."""
        if self.has_gathered:
            return
        self.has_gathered = True
        self._running = [buffer.gather(self.shared.gathers) for buffer in self.buffers]

    def wait_for_gather(self) -> None:
        """What comes after may read the parameters."""
        for buffer, done in zip(self.buffers, self._running, strict=False):
            with buffer.guard:  # a collective's thread, or the wait for it, counts a write too
                done.wait()
        self._running = []

    def set_sync(self, required: bool) -> None:
        """Says whether backward reduces gradients from now on."""
        self.sync, self.may_have_changed = required, True

    def forget_old(self) -> None:
        """Says that what was gathered for an earlier forward is not to be used, if it may have changed."""
        if self.may_have_changed:
            self._forget()
        self.may_have_changed = self.sync

    def _forget(self) -> None:
        self.wait_for_gather()
        self.has_gathered = False

    def free(self) -> None:
        """Frees the gathered parameters, if they are not kept."""
        if self.has_gathered and not self.keeps:
            self._forget()
            for buffer in self.buffers:
                buffer.free()

    def show_whole(self) -> None:
        """Gives the module its gathered parameters."""
        for parameter in self.parameters:
            parameter.show_whole()

    def show_sharded(self) -> None:
        """Gives the module its sharded parameters back; what somebody else put there stays."""
        for parameter in self.parameters:
            if parameter.current() is parameter.whole:
                parameter.show_sharded()

    def reduce(self) -> list[Reduction]:
        """Starts to reduce the gradients of all trainable parameters.

        Whether or not any arrived: other ranks may have some.

        Returns:
            What is on its way.
        """
        pool, lane = self.shared.pool, self.shared.reductions
        reductions: list[Reduction] = []
        for buffer in self.buffers:
            if not buffer.trainable:
                buffer.drop_gradients()
                continue
            if buffer.gradients is None:
                buffer.gradients = self._memory_for(buffer)
            pool.make_room()
            give_back: Callable[[torch.Tensor], None] = pool.give_back
            if self.strategy == "optimizer":
                give_back = partial(self._take_back, buffer)
            reductions.append(Reduction(buffer, self.divisor, lane, give_back))
            pool.launched(reductions[-1])
        return reductions

    def drop_gradients(self) -> None:
        """Forgets gradients that arrived, after a backward that failed."""
        for buffer in self.buffers:
            buffer.drop_gradients()

    def _memory_for(self, buffer: FlatBuffer) -> torch.Tensor:
        """Strategy "optimizer" has memory of its own for every gradient, the others share a few."""
        own = self._memory.pop(buffer, None)
        if own is not None:
            return own
        return self.shared.pool.take(buffer.packing.size, buffer.reduce, buffer.device)

    def _take_back(self, buffer: FlatBuffer, memory: torch.Tensor) -> None:
        self._memory[buffer] = memory

    def _arrived(self, buffer: FlatBuffer, parameter: UnitParameter, gradient: torch.Tensor) -> None:
        memory = buffer.gradients
        if memory is None:
            memory = self._memory_for(buffer)
        buffer.add_gradient(parameter, gradient, memory)
        self.on_gradient()


def _unnoticed() -> None:
    raise AssertionError("a gradient arrived before the unit's first forward")


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made of a module, if it did."""
    unit = module.__dict__.get(UNIT)
    assert unit is None or isinstance(unit, Unit)
    return unit


def units_in(module: nn.Module) -> list[Unit]:
    """All units of a module, its own first, in the order of registration.

    Raises:
        ValueError: there is none.
    """
    units = [unit for part in module.modules() if (unit := unit_of(part)) is not None]
    if not units:
        raise ValueError(
            f"{type(module).__name__} has no units: call shardproof.fsdp.fully_shard on it first"
        )
    return units


def set_requires_gradient_sync(module: nn.Module, required: bool) -> None:
    """Says whether backward reduces gradients, for all units in a module.

    Where it does not, gradients are summed whole on every rank, and `.grad` is given by the next backward
    that does: `zero_grad` knows nothing of them. Parameters must not be written to until it is called again,
    because what was gathered once is used all the time. All ranks must say the same.

    Args:
        module: with units.
        required: True is the state in the beginning.

    Raises:
        ValueError: it has no units.
    """
    for unit in units_in(module):
        unit.set_sync(required)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backward within accumulates gradients without communication (see `set_requires_gradient_sync`).

        with no_sync(model):
            for part in parts[:-1]:
                loss(model(part)).backward()
        loss(model(parts[-1])).backward()

    Raises:
        ValueError: the module has no units.
    """
    units = units_in(module)
    before = [unit.sync for unit in units]
    set_requires_gradient_sync(module, False)
    try:
        yield
    finally:
        for unit, sync in zip(units, before, strict=True):
            unit.set_sync(sync)
