"""Optimizers whose state is sharded over ranks or split between CPU and device.

These are the public names of `shardproof.training.optim`.
"""

from __future__ import annotations

from shardproof.training.optim import (
    DistributedOptimizer,
    DynamicLossScale,
    Factory,
    HybridDeviceOptimizer,
    LocalRange,
    LossScale,
    ParameterSlots,
    Receipt,
    Spec,
    StoredSlot,
    StoredWrapper,
    slot_schema,
)

__all__ = [
    "DistributedOptimizer",
    "DynamicLossScale",
    "Factory",
    "HybridDeviceOptimizer",
    "LocalRange",
    "LossScale",
    "ParameterSlots",
    "Receipt",
    "Spec",
    "StoredSlot",
    "StoredWrapper",
    "slot_schema",
]
