"""The dtypes of a unit, and the names of the strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["MixedPrecision", "Strategy", "check_strategy"]

Strategy = Literal["all", "optimizer_gradients", "optimizer", "none"]
"""The sharded state, in this order: parameters, gradients and optimizer state (ZeRO-3); gradients and
optimizer state (ZeRO-2); optimizer state (ZeRO-1); none (DDP)."""


def check_strategy(strategy: str) -> Strategy:
    """Returns the strategy of this name.

    Raises:
        ValueError: the strategy is unknown.
    """
    for name in get_args(Strategy):
        if name == strategy:
            return name  # type: ignore[no-any-return]
    raise ValueError(f"strategy is {strategy!r}, not one of {', '.join(get_args(Strategy))}")


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
