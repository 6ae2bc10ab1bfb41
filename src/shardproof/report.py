"""Contents and differences of checkpoints and runs, as values: without torch and without a terminal.

These are the public names of `shardproof.commands.report`.
"""

from __future__ import annotations

from shardproof.commands.report import (
    Difference,
    Folded,
    ObjectDetail,
    PrunePlan,
    StepInfo,
    Stored,
    Summary,
    TensorDetail,
    ValueDifference,
    describe,
    detail,
    diff,
    fold,
    interval_advice,
    measure_tensors,
    plan_prune,
    scan_run,
    spelled,
    summarise,
    tensor_bytes,
)

__all__ = [
    "Difference",
    "Folded",
    "ObjectDetail",
    "PrunePlan",
    "StepInfo",
    "Stored",
    "Summary",
    "TensorDetail",
    "ValueDifference",
    "describe",
    "detail",
    "diff",
    "fold",
    "interval_advice",
    "measure_tensors",
    "plan_prune",
    "scan_run",
    "spelled",
    "summarise",
    "tensor_bytes",
]
