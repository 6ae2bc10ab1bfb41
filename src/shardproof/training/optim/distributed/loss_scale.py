"""Loss scales prevent the underflow of fp16 gradients (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LossScale:
    """A factor on the loss. The optimizer divides the gradients by it.

    Args:
        value: the factor.
    """

    def __init__(self, value: float) -> None:
        if not value > 0.0:
            raise ValueError(f"loss scale is {value}: it must be above 0")
        self.value = float(value)

    def update(self, found_inf: bool) -> None:
        """Called once a step. A fixed scale does not change."""

    def describe(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"value": self.value}

    def receive(self, state: Mapping[str, Any]) -> None:
        """Loads the value of `describe`. A fixed scale does not change."""


class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite, and shrinks if they are not.

    Args:
        initial: the first value.
        growth: factor after `interval` consecutive finite steps.
        backoff: factor after a step whose gradients were not finite.
        interval: number of steps.
        minimum: smallest value.

    >>> scale = DynamicLossScale(8.0, interval=2)
    >>> scale.update(found_inf=True); scale.value
    4.0
    >>> scale.update(False); scale.update(False); scale.value
    8.0
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        minimum: float = 1.0,
    ) -> None:
        super().__init__(initial)
        if growth < 1.0 or not 0.0 < backoff < 1.0 or interval < 1:
            raise ValueError(
                f"growth is {growth}, backoff {backoff}, interval {interval}: growth must be at least 1, "
                "backoff between 0 and 1, interval at least 1"
            )
        self.growth = growth
        self.backoff = backoff
        self.interval = interval
        self.minimum = minimum
        self.finite_steps = 0
        """Number of consecutive finite steps."""

    def update(self, found_inf: bool) -> None:
        """Called once a step, with the same argument on all ranks."""
        if found_inf:
            self.value = max(self.value * self.backoff, self.minimum)
            self.finite_steps = 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.interval:
            self.value *= self.growth
            self.finite_steps = 0

    def describe(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"value": self.value, "finite_steps": self.finite_steps}

    def receive(self, state: Mapping[str, Any]) -> None:
        """Loads the value of `describe`, of a dynamic or a fixed scale."""
        self.value = float(state["value"])
        self.finite_steps = int(state.get("finite_steps", 0))
