"""Contents and differences of checkpoints and runs, as values: without torch and without a terminal."""

from __future__ import annotations

from shardproof.checkpointer import PrunePlan, StepInfo, interval_advice, plan_prune, scan_run
from shardproof.report.description import Stored, describe
from shardproof.report.detail import ObjectDetail, TensorDetail, detail, spelled
from shardproof.report.difference import Difference, diff
from shardproof.report.summary import Folded, Summary, fold, summarise, tensor_bytes

__all__ = [
    "Difference",
    "Folded",
    "ObjectDetail",
    "PrunePlan",
    "StepInfo",
    "Stored",
    "Summary",
    "TensorDetail",
    "describe",
    "detail",
    "diff",
    "fold",
    "interval_advice",
    "plan_prune",
    "scan_run",
    "spelled",
    "summarise",
    "tensor_bytes",
]
