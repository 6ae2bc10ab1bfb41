"""Optimizers whose state is sharded over ranks or split between CPU and device.

Each wraps a torch optimizer class and describes its state without communication (see
`shardproof.state.optimizer.slots`).
"""

from __future__ import annotations

from shardproof.optim.distributed import DistributedOptimizer, DynamicLossScale, LossScale
from shardproof.optim.hybrid import HybridDeviceOptimizer
from shardproof.optim.schema import Factory, Spec, slot_schema
from shardproof.state import LocalRange, ParameterSlots, Receipt, StoredSlot, StoredWrapper

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
