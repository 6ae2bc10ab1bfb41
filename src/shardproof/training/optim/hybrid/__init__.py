"""An optimizer that updates a fraction of the parameters on the CPU and the rest on the device."""

from __future__ import annotations

from shardproof.training.optim.hybrid.optimizer import HybridDeviceOptimizer

__all__ = ["HybridDeviceOptimizer"]
