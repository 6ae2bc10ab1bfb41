"""Gradients as the program or autograd leaves them at a parameter, and taken from there."""

from __future__ import annotations

import torch

from shardproof.optim.distributed.flat import Weight
from shardproof.state.dtensor import is_dtensor, local_tensor

__all__ = ["forget", "taken", "waiting"]


def waiting(weight: Weight) -> bool:
    """Whether the parameter has a gradient."""
    return weight.parameter.grad is not None or _decoupled(weight) is not None


def forget(weight: Weight) -> None:
    """It has none any more."""
    weight.parameter.grad = None
    if _decoupled(weight) is not None:
        weight.parameter.decoupled_grad = None  # type: ignore[attr-defined]


def taken(weight: Weight) -> torch.Tensor:
    """What this rank holds of the gradient, laid out as its parameter, which has none any more.

    Raises:
        ValueError: it has no place in a flat buffer.
    """
    gradient = _decoupled(weight)
    if gradient is None:
        gradient = weight.parameter.grad
    assert gradient is not None
    forget(weight)
    if gradient.is_sparse:
        raise ValueError(
            f"{weight.name} has a sparse gradient, which has no place in a flat buffer. Use sparse=False in "
            "its embedding, or leave it out of param_groups"
        )
    if is_dtensor(gradient) and is_dtensor(weight.parameter):
        placements = weight.parameter.placements
        if gradient.placements != placements:
            gradient = gradient.redistribute(placements=placements)
    local = local_tensor(gradient)
    if local.shape != weight.data.shape:
        raise ValueError(
            f"{weight.name} has local shape {list(weight.data.shape)}, and a gradient of local shape "
            f"{list(local.shape)}"
        )
    return local


def _decoupled(weight: Weight) -> torch.Tensor | None:
    """The gradient in a dtype of its own, where the program has put one there."""
    return getattr(weight.parameter, "decoupled_grad", None)
