"""A unit: a module that `fully_shard` was called on, its options, its flat buffers, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NoReturn

import torch
from torch import nn

from shardproof.training.fsdp.flat_buffer import FlatBuffer, GradientPool, Reduction
from shardproof.training.fsdp.lanes import Done, Lane
from shardproof.training.fsdp.row_layout import MeshRanks
from shardproof.training.fsdp.unit_parameter import UnitParameter

UNIT = "_shardproof_fsdp"
"""Attribute of a module: its unit."""

Strategy = Literal["all", "optimizer_gradients"]
"""The sharded state: parameters, gradients and optimizer state (ZeRO-3), or gradients and optimizer state
(ZeRO-2)."""


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Dtypes of floating point parameters and gradients. None does not change a dtype.

    Example:
        >>> MixedPrecision(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32).cast_inputs
        True
    """

    compute_dtype: torch.dtype | None = None
    """Dtype of gathered parameters, and so of forward and backward. None: the master dtype."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are accumulated without sync, and reduced. None: the compute dtype."""
    master_dtype: torch.dtype | None = None
    """Dtype of sharded parameters and gradients, which the optimizer gets. None: the parameter's own."""
    cast_inputs: bool = True
    """True to cast floating point inputs of a unit to the compute dtype."""
    output_dtype: torch.dtype | None = None
    """Dtype of floating point tensors in the unit's output. None: unchanged."""


@dataclass(slots=True, eq=False)
class SharedUnits:
    """The lanes and the gradient memory that the units of one model share."""

    gathers: Lane
    reductions: Lane
    pool: GradientPool = field(default_factory=GradientPool)


class ShardedUnit:
    """One module's own parameters, sharded together. `fully_shard` describes its options.

    A unit that only schedules others has no buffers.
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
        self.on_gradient: Callable[[], None]
        """Called after each gradient. The schedule sets it at the first forward."""
        self.ahead_in_forward: list[ShardedUnit] | None = None
        """Units to gather when the forward begins; None for those after it in the previous forward."""
        self.ahead_in_backward: list[ShardedUnit] | None = None
        """Units to gather when the backward begins; None for those before it in the forward."""
        self.sync = True
        self.may_have_changed = True
        """True if parameters may have changed since the last gather; False only within `no_sync`."""
        self.calls = 0
        """Number of forwards whose backward will report its end and has not."""
        self.in_backward = False
        self.has_gathered = False
        self._running: list[Done] = []
        for buffer in buffers:
            for parameter in buffer.parameters:
                parameter.on_gradient = partial(self._arrived, buffer)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"{type(self.module).__name__} is a unit of fully_shard, which copy.deepcopy cannot copy, nor "
            "AveragedModel, which calls it. Copy the model first, then call fully_shard on both"
        )

    @property
    def parameters(self) -> list[UnitParameter]:
        """The parameters of all buffers."""
        return [parameter for buffer in self.buffers for parameter in buffer.parameters]

    def adopt_changes(self) -> None:
        """Copies the values of parameters that were replaced (see `FlatBuffer.adopt`)."""
        for buffer in self.buffers:
            if not all(parameter.is_bound() for parameter in buffer.parameters):
                self._forget()
                buffer.adopt()

    def gather(self) -> None:
        """Starts to gather the parameters, unless they are gathered."""
        if self.has_gathered:
            return
        self.has_gathered = True
        self._running = [buffer.gather(self.shared.gathers) for buffer in self.buffers]

    def wait_for_gather(self) -> None:
        """Orders later reads of the parameters after their gather."""
        for buffer, done in zip(self.buffers, self._running, strict=False):
            with buffer.guard:  # a collective's thread, or the wait for it, raises the version too
                done.wait()
        self._running = []

    def set_sync(self, required: bool) -> None:
        """Sets whether backward reduces gradients."""
        self.sync, self.may_have_changed = required, True

    def forget_old(self) -> None:
        """Drops the parameters of an earlier gather, if they may have changed."""
        if self.may_have_changed:
            self._forget()
        self.may_have_changed = self.sync

    def _forget(self) -> None:
        self.wait_for_gather()
        self.has_gathered = False

    def free(self) -> None:
        """Frees the gathered parameters, unless the strategy keeps them."""
        if self.has_gathered and self.strategy == "all":
            self._forget()
            for buffer in self.buffers:
                buffer.free()

    def show_whole(self) -> None:
        """Registers the gathered parameters in the module."""
        for parameter in self.parameters:
            parameter.show_whole()

    def show_sharded(self) -> None:
        """Registers the sharded parameters again, except for tensors that other code registered."""
        for parameter in self.parameters:
            if parameter.current() is parameter.whole:
                parameter.show_sharded()

    def reduce(self) -> list[Reduction]:
        """Starts to reduce the gradients of all trainable parameters.

        It does so even if this rank has no gradients, because other ranks may have some.
        """
        pool, lane = self.shared.pool, self.shared.reductions
        reductions: list[Reduction] = []
        for buffer in self.buffers:
            if not buffer.trainable:
                buffer.drop_gradients()
                continue
            self._provide_memory(buffer)
            pool.make_room()
            reductions.append(Reduction(buffer, self.divisor, lane, pool.give_back))
            pool.launched(reductions[-1])
        return reductions

    def _provide_memory(self, buffer: FlatBuffer) -> None:
        if buffer.gradients is None:
            buffer.gradients = self.shared.pool.take(buffer.packing.size, buffer.reduce, buffer.device)

    def _arrived(self, buffer: FlatBuffer, parameter: UnitParameter, gradient: torch.Tensor) -> None:
        self._provide_memory(buffer)
        buffer.add_gradient(parameter, gradient)
        self.on_gradient()


def unit_of(module: nn.Module) -> ShardedUnit | None:
    """The unit of a module; None if `fully_shard` was not called on it."""
    unit: ShardedUnit | None = module.__dict__.get(UNIT)
    return unit


def units_in(module: nn.Module) -> list[ShardedUnit]:
    """All units in a module, its own first, in the order of registration."""
    units = [unit for part in module.modules() if (unit := unit_of(part)) is not None]
    if not units:
        raise ValueError(
            f"{type(module).__name__} has no units: call shardproof.fsdp.fully_shard on it first"
        )
    return units


def set_requires_gradient_sync(module: nn.Module, required: bool) -> None:
    """Sets whether backward reduces gradients, for all units in a module.

    While it does not, each rank sums whole gradients, which `zero_grad` does not clear. The next backward
    that reduces them sets `.grad`. In the meantime no code may write to parameters, because the units gather
    them only once. All ranks must pass the same value.

    Args:
        module: a module with units.
        required: True to reduce gradients, as a new unit does.

    Raises:
        ValueError: the module has no units.
    """
    for unit in units_in(module):
        unit.set_sync(required)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulates the gradients of backward without communication (see `set_requires_gradient_sync`).

    Args:
        module: a module with units.

    Example::

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
