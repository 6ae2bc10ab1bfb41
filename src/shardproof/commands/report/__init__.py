"""Contents and differences of checkpoints and runs, as values: without torch and without a terminal."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardproof.commands.report.description import Stored, describe
from shardproof.commands.report.detail import ObjectDetail, TensorDetail, detail, spelled
from shardproof.commands.report.difference import Difference, ValueDifference, diff
from shardproof.commands.report.difference import most_changed_first as most_changed_first
from shardproof.commands.report.measures import Measure as Measure
from shardproof.commands.report.summary import Folded, Summary, fold, summarise, tensor_bytes
from shardproof.commands.report.tensor_statistics import measure_tensors
from shardproof.runs.checkpointer import PrunePlan, StepInfo, interval_advice, plan_prune, scan_run

if TYPE_CHECKING:
    from shardproof.commands.report.html_file import HTML_START as HTML_START
    from shardproof.commands.report.html_file import JSON_START as JSON_START
    from shardproof.commands.report.html_file import html_of as html_of
    from shardproof.commands.report.html_file import json_of as json_of
    from shardproof.commands.report.page_difference import difference_facts as difference_facts
    from shardproof.commands.report.page_facts import checkpoint_facts as checkpoint_facts
    from shardproof.commands.report.page_facts import run_facts as run_facts

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

_OF_PAGES = {
    **dict.fromkeys(("HTML_START", "JSON_START", "html_of", "json_of"), "html_file"),
    **dict.fromkeys(("checkpoint_facts", "run_facts"), "page_facts"),
    "difference_facts": "page_difference",
}
"""Names to the modules that are loaded when they are first used: other commands start faster without them."""


def __getattr__(name: str) -> Any:
    if name in _OF_PAGES:
        return getattr(importlib.import_module(f"{__name__}.{_OF_PAGES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
