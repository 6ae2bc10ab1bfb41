"""The dtypes of a unit, and the strategies by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["MixedPrecision", "Strategy", "check_strategy"]

Strategy = Literal["all", "optimizer_gradients", "optimizer", "none"]
"""What is sharded: parameters, gradients and optimizer state (ZeRO-3); gradients and optimizer state
(ZeRO-2); optimizer state (ZeRO-1); nothing (DDP)."""


def check_strategy(strategy: str) -> Strategy:
    """The strategy of this name.

    Raises:
        ValueError: there is none.
    """
    for known in get_args(Strategy):
        if known == strategy:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"there is no strategy {strategy!r}: choose one of {', '.join(get_args(Strategy))}")


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Dtypes of floating point parameters and gradients; None leaves what there is.

    >>> MixedPrecision(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32).cast_inputs
    True
    """

    compute_dtype: torch.dtype | None = None
    """Of gathered parameters, so of forward and backward. None: the master dtype."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are accumulated without sync, sent and summed. None: the compute dtype."""
    master_dtype: torch.dtype | None = None
    """Of sharded parameters and their gradients, which the optimizer sees. None: the parameter's own."""
    cast_inputs: bool = True
    """Whether floating point tensors among a unit's inputs are cast to the compute dtype."""
    output_dtype: torch.dtype | None = None
    """Of floating point tensors in the unit's output. None: as they come."""
