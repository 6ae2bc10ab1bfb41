"""Selects the parameters that are updated on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["DeviceSplit"]


@dataclass(slots=True)
class DeviceSplit:
    """Assigns parameters to CPU and device, so that the CPU has a fraction of the elements of every layer.

    `on_cpu` is called for each parameter in the order of the optimizer's groups. A parameter goes to the CPU
    if the CPU lacks at least half of its elements to have the fraction of all elements so far. So the CPU's
    share differs from the fraction by at most half of the largest parameter, and later parameters do not move
    earlier ones. Only global shapes count, so every rank with the same parameters assigns them equally.

    Args:
        fraction: part of the elements on the CPU, from 0 to 1.

    Raises:
        ValueError: the fraction is outside [0, 1].

    >>> sides = DeviceSplit(0.5)
    >>> [sides.on_cpu(torch.zeros(4)) for _ in range(6)]
    [True, False, True, False, True, False]
    """

    fraction: float
    seen: int = 0
    """Elements of all parameters so far."""
    taken: int = 0
    """Elements of the parameters on the CPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"cpu_fraction is {self.fraction}, not a number from 0 to 1")

    def on_cpu(self, parameter: torch.Tensor) -> bool:
        """Return True if the next parameter goes to the CPU. An empty parameter counts as one element."""
        elements = max(1, math.prod(parameter.shape))
        self.seen += elements
        chosen = self.fraction > 0 and 2 * self.taken + elements <= 2 * self.fraction * self.seen
        self.taken += elements * chosen
        return chosen
