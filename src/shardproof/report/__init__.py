"""Contents and differences of checkpoints and runs, as values: without torch and without a terminal."""

from __future__ import annotations

from shardproof.checkpointer import PrunePlan, StepInfo, interval_advice, plan_prune, scan_run
from shardproof.report.description import Stored, describe
from shardproof.report.detail import ObjectDetail, TensorDetail, detail, spelled
from shardproof.report.difference import Difference, ValueDifference, diff
from shardproof.report.measures import Measure as Measure
from shardproof.report.summary import Folded, Summary, fold, summarise, tensor_bytes
from shardproof.report.tensor_statistics import measure_tensors

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
