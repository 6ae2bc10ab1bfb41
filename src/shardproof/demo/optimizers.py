"""The demo's optimizers: the same update rule, and three ways to keep its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardproof import optim
from shardproof.demo.layout import Layout
from shardproof.demo.parallel import Place, average_gradients

__all__ = ["clip_gradients", "finish_gradients", "make_optimizer"]

LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)


def make_optimizer(model: nn.Module, layout: Layout, place: Place) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves norms and gains alone."""
    if layout.optimizer == "distributed":
        return optim.DistributedOptimizer(
            model,
            torch.optim.AdamW,
            param_groups=lambda _name, parameter: _options(parameter),
            process_group=place.data_group,
            lr=LEARNING_RATE,
            betas=BETAS,
        )
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": group, **_options(group[0])} for group in (matrices, vectors)]
    if layout.optimizer == "hybrid":
        return optim.HybridDeviceOptimizer(
            groups, torch.optim.AdamW, cpu_fraction=layout.cpu_fraction, lr=LEARNING_RATE, betas=BETAS
        )
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)


def _options(parameter: torch.Tensor) -> dict[str, Any]:
    return {"weight_decay": 0.1 if parameter.ndim > 1 else 0.0}


def finish_gradients(model: nn.Module, layout: Layout, place: Place) -> None:
    """Their mean over the data-parallel ranks, unless backward or the optimizer's step takes it."""
    if layout.sharding == "none" and layout.optimizer != "distributed":
        average_gradients(model, place)


def clip_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, most: float) -> None:
    """Scale all gradients so that their joint norm is `most` at most."""
    if isinstance(optimizer, optim.DistributedOptimizer):
        optimizer.clip_grad_norm_(most)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), most)
