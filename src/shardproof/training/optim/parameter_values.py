"""Reads gradients and refreshes masters, for both optimizers."""

from __future__ import annotations

import torch

from shardproof.engine.state import local_tensor


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient to step with: ``decoupled_grad``, of any dtype, where it is set, else ``grad``."""
    gradient: torch.Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if gradient is None else gradient


def local_gradient(
    gradient: torch.Tensor, parameter: torch.Tensor, name: str = "a parameter"
) -> torch.Tensor:
    """The local part of a gradient, with the placements of its parameter.

    A `DTensor` class whose rows do not follow from its placements has the method ``_shardproof_rows_of``.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> local_gradient(torch.zeros(2), weight)
    tensor([0., 0.])
    """
    local, expected = local_tensor(gradient), local_tensor(parameter)
    if local is not gradient and expected is not parameter:  # both are DTensors
        if (rows_of := getattr(parameter, "_shardproof_rows_of", None)) is not None:
            local = local_tensor(rows_of(gradient))
        elif gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            local = local_tensor(gradient.redistribute(parameter.device_mesh, parameter.placements))  # type: ignore[attr-defined]
    if local.shape != expected.shape:
        raise ValueError(
            f"{name} has local shape {list(expected.shape)}, "
            f"and a gradient of local shape {list(local.shape)}"
        )
    return local


def refreshed(master: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a master that follows writes to its parameter.

    An element keeps the master's value if that value rounds to the parameter's. Otherwise it takes the
    parameter's value.

    >>> refreshed(torch.tensor([1.001, 1.001]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    tensor([1.0010, 2.0000])
    """
    return torch.where(master.to(parameter.dtype) == parameter, master, parameter.to(master.dtype))
