"""Gradient accumulation: when gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardproof.fsdp.unit import units_in

__all__ = ["no_sync", "set_requires_gradient_sync"]


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
