"""An optimizer that shards its state, and optionally gradients, over data-parallel ranks (ZeRO-1 and 2)."""

from __future__ import annotations

from shardproof.training.optim.distributed.loss_scale import DynamicLossScale, LossScale
from shardproof.training.optim.distributed.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "DynamicLossScale", "LossScale"]
