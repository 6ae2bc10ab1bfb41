"""Ready answers to the question whether a result is to be rejected.

A rejection is any function from a value (a number or a tensor) to a bool. One that judges by earlier values
has three methods more, which the machine calls where they are there: ``accept(value)`` once a step, with the
result of the run that counted, and ``state_dict`` and ``load_state_dict``, for its values to be part of the
checkpoint. A call does not change it: while a step is run again, the same question has the same answer.

Of a DTensor the part that this rank holds is judged.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from shardproof.state import local_tensor

__all__ = ["Spike", "UnexpectedlyLarge", "not_finite"]


def not_finite(value: Any) -> bool:
    """Whether a number, or any element of a tensor, is NaN or infinite.

    Args:
        value: a number, or a tensor of any shape, dtype and device.

    >>> not_finite(1.0), not_finite(torch.tensor([1.0, math.inf]))
    (False, True)
    """
    if isinstance(value, torch.Tensor):
        judged = _judged(value)
        if judged.numel() == 1 and judged.is_floating_point():
            return not math.isfinite(judged.item())  # a loss, at each step: far quicker
        return not bool(judged.isfinite().all())
    return not math.isfinite(value)


class _Window:
    """The last finite values that were accepted, as floats, oldest first."""

    def __init__(self, threshold: float, window: int = 100) -> None:
        if not threshold > 0.0:
            raise ValueError(f"the threshold is {threshold}: give a number above 0")
        if window < 2:
            raise ValueError(f"a window of {window} values says nothing: give at least 2")
        self.threshold = threshold
        self.window = window
        self._values: deque[float] = deque(maxlen=window)

    def number(self, value: Any) -> float:
        """The one number that stands for `value`; NaN where any element is NaN."""
        if not isinstance(value, torch.Tensor):
            return float(value)
        judged = _judged(value)
        return float(judged.max()) if judged.numel() else 0.0

    def accept(self, value: Any) -> None:
        """Take in the result of the run that counted; one that is not finite is left out."""
        number = self.number(value)
        if math.isfinite(number):
            self._values.append(number)

    def state_dict(self) -> dict[str, Any]:
        """The values, as plain data."""
        return {"values": list(self._values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved values; of more than the window holds, the last ones."""
        self._values = deque(map(float, state["values"]), maxlen=self.window)


class UnexpectedlyLarge(_Window):
    """Rejects a value whose magnitude is above `threshold` times the largest of the last `window` values.

    Of a tensor the element of the largest magnitude counts. Until `window` values have been accepted nothing
    is rejected but what is not finite, which always is.

    Args:
        threshold: factor above the running maximum.
        window: accepted values that the maximum is taken over.

    Raises:
        ValueError: a threshold of 0 or less, or a window of less than 2 values.

    >>> large = UnexpectedlyLarge(10.0, window=2)
    >>> for norm in (1.0, 3.0):
    ...     large.accept(norm)
    >>> large(30.0), large(30.5), large(math.nan)
    (False, True, True)
    """

    def number(self, value: Any) -> float:
        """The largest magnitude."""
        if not isinstance(value, torch.Tensor):
            return abs(float(value))
        judged = _judged(value)
        return float(judged.abs().max()) if judged.numel() else 0.0

    def __call__(self, value: Any) -> bool:
        """Whether `value` is rejected."""
        number = self.number(value)
        if not math.isfinite(number):
            return True
        return len(self._values) == self.window and number > self.threshold * max(self._values)


class Spike(_Window):
    """Rejects a value more than `threshold` standard deviations above the mean of the last `window` values.

    Of a tensor the largest element counts. Until `window` values have been accepted nothing is rejected but
    what is not finite, which always is. Deviations below a millionth of the mean count as that much: where
    values hardly change, rounding is no spike.

    Args:
        threshold: in standard deviations of the values in the window.
        window: accepted values that mean and deviation are taken over.

    Raises:
        ValueError: a threshold of 0 or less, or a window of less than 2 values.

    >>> spike = Spike(6.0, window=4)
    >>> for loss in (2.1, 1.9, 2.0, 2.0):
    ...     spike.accept(loss)
    >>> spike(2.3), spike(2.6), spike(0.1)
    (False, True, False)
    """

    def __call__(self, value: Any) -> bool:
        """Whether `value` is rejected."""
        number = self.number(value)
        if not math.isfinite(number):
            return True
        if len(self._values) < self.window:
            return False
        mean = math.fsum(self._values) / self.window
        deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in self._values) / self.window)
        return number - mean > self.threshold * max(deviation, 1e-6 * abs(mean))


def _judged(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds, without its graph; floats of 8 bits, which lack operations, are widened."""
    own = local_tensor(value.detach())
    return own.float() if own.element_size() == 1 else own
