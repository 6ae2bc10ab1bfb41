"""The steps of a run: save, restore, retention, prune. `Checkpointer` loads torch when first used.

Names that are imported here and not listed in `__all__` are for the command line and its reports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardproof.checkpointer.damage import Damage
from shardproof.checkpointer.doctor import Examination as Examination
from shardproof.checkpointer.doctor import Finding as Finding
from shardproof.checkpointer.doctor import compare_tiers as compare_tiers
from shardproof.checkpointer.doctor import examine_run as examine_run
from shardproof.checkpointer.doctor import probe_storage as probe_storage
from shardproof.checkpointer.doctor import scrub_run as scrub_run
from shardproof.checkpointer.judge import Verdict as Verdict
from shardproof.checkpointer.judge import judge as judge
from shardproof.checkpointer.marks import Pin, read_settled
from shardproof.checkpointer.marks import read_node_mark as read_node_mark
from shardproof.checkpointer.node_findings import find_missing_copies as find_missing_copies
from shardproof.checkpointer.policies import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    Retention,
    RetentionPolicy,
    SavedStep,
)
from shardproof.checkpointer.preemption import Preempted, Preemption
from shardproof.checkpointer.prune import PrunePlan as PrunePlan
from shardproof.checkpointer.prune import plan_prune as plan_prune
from shardproof.checkpointer.prune import prune as prune
from shardproof.checkpointer.retention import Leftover, delete_steps, leftovers, plan_removal, remove_leftover
from shardproof.checkpointer.run_options import Incremental, NodeLocal, SecondTier
from shardproof.checkpointer.run_watch import RunWatch as RunWatch
from shardproof.checkpointer.run_watch import WatchedSave as WatchedSave
from shardproof.checkpointer.save_interval import IntervalAdvice as IntervalAdvice
from shardproof.checkpointer.scan import StepInfo as StepInfo
from shardproof.checkpointer.scan import interval_advice as interval_advice
from shardproof.checkpointer.scan import scan_run as scan_run
from shardproof.checkpointer.schedules import Every, Schedule
from shardproof.checkpointer.step_folders import SETTLED_NAME, StepFolder, is_ours, parse_folder, parse_step

if TYPE_CHECKING:
    from shardproof.checkpointer.checkpointer import Checkpointer
    from shardproof.checkpointer.restored_step import RestoredStep
    from shardproof.checkpointer.step_selection import PassedOver

__all__ = [
    "SETTLED_NAME",
    "Checkpointer",
    "Damage",
    "Every",
    "Incremental",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "Leftover",
    "NodeLocal",
    "PassedOver",
    "Pin",
    "Preempted",
    "Preemption",
    "RestoredStep",
    "Retention",
    "RetentionPolicy",
    "SavedStep",
    "Schedule",
    "SecondTier",
    "StepFolder",
    "delete_steps",
    "is_ours",
    "leftovers",
    "parse_folder",
    "parse_step",
    "plan_removal",
    "read_settled",
    "remove_leftover",
]


_LAZY = {"Checkpointer": "checkpointer", "PassedOver": "step_selection", "RestoredStep": "restored_step"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
