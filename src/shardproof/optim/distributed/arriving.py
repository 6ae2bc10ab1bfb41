"""Gradients as the program or autograd leaves them at a parameter, and taken from there."""

from __future__ import annotations

import torch

from shardproof.optim.distributed.flat_buckets import Weight
from shardproof.optim.parameter_values import gradient_of, local_gradient

__all__ = ["forget", "taken", "waiting"]


def waiting(weight: Weight) -> bool:
    """Whether the parameter has a gradient."""
    return gradient_of(weight.parameter) is not None


def forget(weight: Weight) -> None:
    """It has none any more."""
    weight.parameter.grad = None
    if getattr(weight.parameter, "decoupled_grad", None) is not None:
        weight.parameter.decoupled_grad = None  # type: ignore[attr-defined]


def taken(weight: Weight) -> torch.Tensor:
    """What this rank holds of the gradient, laid out as its parameter, which has none any more.

    Raises:
        ValueError: it has no place in a flat buffer.
    """
    gradient = gradient_of(weight.parameter)
    assert gradient is not None
    forget(weight)
    if gradient.is_sparse:
        raise ValueError(
            f"{weight.name} has a sparse gradient, which has no place in a flat buffer. Use sparse=False in "
            "its embedding, or leave it out of param_groups"
        )
    return local_gradient(gradient, weight.parameter, weight.name)
