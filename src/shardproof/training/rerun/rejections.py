"""Functions that decide whether a result is rejected.

A rejection is any function from a value (a number or a tensor) to a bool. A rejection that depends on earlier
values has three more methods. The machine calls ``accept(value)`` once a step, with the result of the run
whose results are used. ``state_dict`` and ``load_state_dict`` save and restore its state in checkpoints. A
call does not change the state, so it returns the same for the same value in each run of a step.

For a DTensor, the rejections of this module check the local tensor.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from shardproof.engine.state import local_tensor


def not_finite(value: Any) -> bool:
    """Return True if a number, or any element of a tensor, is NaN or infinite.

    Args:
        value: a number, or a tensor of any shape, dtype and device.

    >>> not_finite(1.0), not_finite(torch.tensor([1.0, math.inf]))
    (False, True)
    """
    if isinstance(value, torch.Tensor):
        local = _local_values(value)
        if local.numel() == 1 and local.is_floating_point():
            return not math.isfinite(local.item())  # faster, for the loss of each step
        return not bool(local.isfinite().all())
    return not math.isfinite(value)


class _Window:
    """The last finite values that were accepted, as floats, oldest first."""

    def __init__(self, threshold: float, window: int = 100) -> None:
        if not threshold > 0.0:
            raise ValueError(f"threshold is {threshold}: it must be above 0")
        if window < 2:
            raise ValueError(f"window is {window}: it must be at least 2 values")
        self.threshold = threshold
        self.window = window
        self._values: deque[float] = deque(maxlen=window)

    def number(self, value: Any) -> float:
        """The largest element of `value`; NaN if any element is NaN."""
        value = _local_values(value)
        if not isinstance(value, torch.Tensor):
            return float(value)
        return float(value.max()) if value.numel() else 0.0

    def accept(self, value: Any) -> None:
        """Add the result of the run whose results are used, unless it is not finite."""
        number = self.number(value)
        if math.isfinite(number):
            self._values.append(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the values as plain data."""
        return {"values": list(self._values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved values, the last `window` of them."""
        self._values = deque(map(float, state["values"]), maxlen=self.window)


class UnexpectedlyLarge(_Window):
    """Rejects a value whose magnitude is above `threshold` times the largest of the last `window` values.

    For a tensor, the largest magnitude of its elements counts. A value that is not finite is always rejected.
    Other values are rejected only after `window` values have been accepted.

    Args:
        threshold: factor above the running maximum.
        window: number of accepted values for the maximum.

    Raises:
        ValueError: a threshold of 0 or less, or a window of less than 2 values.

    >>> large = UnexpectedlyLarge(10.0, window=2)
    >>> for norm in (1.0, 3.0):
    ...     large.accept(norm)
    >>> large(30.0), large(30.5), large(math.nan)
    (False, True, True)
    """

    def number(self, value: Any) -> float:
        """The largest magnitude of the elements of `value`."""
        return super().number(abs(_local_values(value)))

    def __call__(self, value: Any) -> bool:
        """Return True if `value` is rejected."""
        number = self.number(value)
        if not math.isfinite(number):
            return True
        return len(self._values) == self.window and number > self.threshold * max(self._values)


class Spike(_Window):
    """Rejects a value more than `threshold` standard deviations above the mean of the last `window` values.

    For a tensor, the largest element counts. A value that is not finite is always rejected. Other values are
    rejected only after `window` values have been accepted. The deviation is at least a millionth of the mean,
    so that rounding is not a spike if values hardly change.

    Args:
        threshold: in standard deviations of the values in the window.
        window: number of accepted values for mean and deviation.

    Raises:
        ValueError: a threshold of 0 or less, or a window of less than 2 values.

    >>> spike = Spike(6.0, window=4)
    >>> for loss in (2.1, 1.9, 2.0, 2.0):
    ...     spike.accept(loss)
    >>> spike(2.3), spike(2.6), spike(0.1)
    (False, True, False)
    """

    def __call__(self, value: Any) -> bool:
        """True if `value` is rejected."""
        number = self.number(value)
        if not math.isfinite(number):
            return True
        if len(self._values) < self.window:
            return False
        mean = math.fsum(self._values) / self.window
        deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in self._values) / self.window)
        return number - mean > self.threshold * max(deviation, 1e-6 * abs(mean))


def _local_values(value: Any) -> Any:
    """A number itself; a local tensor without its graph. 8-bit floats, which lack operations, become fp32."""
    if not isinstance(value, torch.Tensor):
        return value
    own = local_tensor(value.detach())
    return own.float() if own.element_size() == 1 else own
