"""Contents and differences of checkpoints and runs, as values: without torch and without a terminal."""

from __future__ import annotations

from shardproof.commands.report.description import Stored, describe
from shardproof.commands.report.detail import ObjectDetail, TensorDetail, detail, spelled
from shardproof.commands.report.difference import Difference, ValueDifference, diff
from shardproof.commands.report.measures import Measure as Measure
from shardproof.commands.report.summary import Folded, Summary, fold, summarise, tensor_bytes
from shardproof.commands.report.tensor_statistics import measure_tensors
from shardproof.runs.checkpointer import PrunePlan, StepInfo, interval_advice, plan_prune, scan_run

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
