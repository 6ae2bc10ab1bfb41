"""Which parameters are updated on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["DeviceSplit"]


@dataclass(slots=True)
class DeviceSplit:
    """Deals parameters to CPU and device so that the CPU has a fraction of the elements, spread over all.

    Parameters are asked for in the order of the optimizer's groups, and of each group's list. One goes to the
    CPU if at least half of it is needed there for the CPU to have its fraction of the elements so far. Hence
    the CPU's share never is off by more than half of the largest parameter, layers take part alike, and
    parameters that are added later move none that were there. Global shapes decide, and nothing else: ranks
    that list the same parameters deal them alike, however small their own shards are.

    Args:
        fraction: of the elements, from 0 (all on the device) to 1 (all on the CPU).

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
    """Elements of those on the CPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"cpu_fraction is {self.fraction}; it is a part of the elements, from 0 to 1")

    def on_cpu(self, parameter: torch.Tensor) -> bool:
        """The side of the next parameter. A parameter of no elements is dealt as one of one element."""
        elements = max(1, math.prod(parameter.shape))
        self.seen += elements
        chosen = self.fraction > 0 and 2 * self.taken + elements <= 2 * self.fraction * self.seen
        self.taken += elements * chosen
        return chosen
