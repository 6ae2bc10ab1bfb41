"""Optimizers whose state is sharded over ranks or split between CPU and device.

Each wraps a torch optimizer class and describes its state without communication (see
`shardproof.state.optimizer.slots`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardproof.optim.distributed import DistributedOptimizer as DistributedOptimizer
    from shardproof.optim.distributed import DynamicLossScale as DynamicLossScale
    from shardproof.optim.distributed import LossScale as LossScale
    from shardproof.optim.hybrid import HybridDeviceOptimizer as HybridDeviceOptimizer
    from shardproof.optim.schema import Factory as Factory
    from shardproof.optim.schema import Spec as Spec
    from shardproof.optim.schema import slot_schema as slot_schema
    from shardproof.state import LocalRange as LocalRange
    from shardproof.state import ParameterSlots as ParameterSlots
    from shardproof.state import Receipt as Receipt
    from shardproof.state import StoredSlot as StoredSlot
    from shardproof.state import StoredWrapper as StoredWrapper

_HOMES = {
    "DistributedOptimizer": "shardproof.optim.distributed",
    "DynamicLossScale": "shardproof.optim.distributed",
    "Factory": "shardproof.optim.schema",
    "HybridDeviceOptimizer": "shardproof.optim.hybrid",
    "LocalRange": "shardproof.state",
    "LossScale": "shardproof.optim.distributed",
    "ParameterSlots": "shardproof.state",
    "Receipt": "shardproof.state",
    "Spec": "shardproof.optim.schema",
    "StoredSlot": "shardproof.state",
    "StoredWrapper": "shardproof.state",
    "slot_schema": "shardproof.optim.schema",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
