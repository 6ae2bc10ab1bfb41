"""Optimizers whose state is sharded over ranks or split between CPU and device.

Each wraps a torch optimizer class and describes its state without communication (see
`shardproof.engine.state.optimizer.slots`).
"""

from __future__ import annotations

from shardproof.engine.state import LocalRange, ParameterSlots, Receipt, StoredSlot, StoredWrapper
from shardproof.training.optim.distributed import DistributedOptimizer, DynamicLossScale, LossScale
from shardproof.training.optim.hybrid import HybridDeviceOptimizer
from shardproof.training.optim.schema import Factory, Spec, slot_schema

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
