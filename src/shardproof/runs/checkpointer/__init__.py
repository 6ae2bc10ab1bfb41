"""The steps of a run: save, restore, retention, prune. `Checkpointer` loads torch when first used.

Names that are imported here and not listed in `__all__` are for the command line and its reports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardproof.runs.checkpointer.doctor import Examination as Examination
from shardproof.runs.checkpointer.doctor import Finding as Finding
from shardproof.runs.checkpointer.doctor import compare_tiers as compare_tiers
from shardproof.runs.checkpointer.doctor import examine_run as examine_run
from shardproof.runs.checkpointer.doctor import probe_storage as probe_storage
from shardproof.runs.checkpointer.doctor import scrub_run as scrub_run
from shardproof.runs.checkpointer.judge import Damage
from shardproof.runs.checkpointer.judge import Verdict as Verdict
from shardproof.runs.checkpointer.judge import judge as judge
from shardproof.runs.checkpointer.node_findings import find_missing_copies as find_missing_copies
from shardproof.runs.checkpointer.policies import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    Retention,
    RetentionPolicy,
    SavedStep,
)
from shardproof.runs.checkpointer.preemption import Preempted, Preemption
from shardproof.runs.checkpointer.prune import PrunePlan as PrunePlan
from shardproof.runs.checkpointer.prune import plan_prune as plan_prune
from shardproof.runs.checkpointer.prune import prune as prune
from shardproof.runs.checkpointer.retention import (
    Leftover,
    delete_steps,
    leftovers,
    plan_removal,
    remove_leftover,
)
from shardproof.runs.checkpointer.run_options import Incremental, NodeLocal, SecondTier
from shardproof.runs.checkpointer.scan import RunWatch as RunWatch
from shardproof.runs.checkpointer.scan import StepInfo as StepInfo
from shardproof.runs.checkpointer.scan import WatchedSave as WatchedSave
from shardproof.runs.checkpointer.scan import interval_advice as interval_advice
from shardproof.runs.checkpointer.scan import save_seconds as save_seconds
from shardproof.runs.checkpointer.scan import saves_since as saves_since
from shardproof.runs.checkpointer.scan import scan_run as scan_run
from shardproof.runs.checkpointer.schedules import Every, Schedule
from shardproof.runs.checkpointer.schedules import IntervalAdvice as IntervalAdvice
from shardproof.runs.checkpointer.schedules import best_interval as best_interval
from shardproof.runs.checkpointer.step_folders import (
    SETTLED_NAME,
    Pin,
    StepFolder,
    is_ours,
    parse_folder,
    parse_step,
    read_settled,
)
from shardproof.runs.checkpointer.step_folders import read_node_mark as read_node_mark

if TYPE_CHECKING:
    from shardproof.runs.checkpointer.checkpointer import Checkpointer
    from shardproof.runs.checkpointer.restore import RestoredStep
    from shardproof.runs.checkpointer.step_selection import PassedOver
    from shardproof.runs.checkpointer.step_selection import plan_restore as plan_restore

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


_LAZY = {
    "Checkpointer": "checkpointer",
    "PassedOver": "step_selection",
    "RestoredStep": "restore",
    "plan_restore": "step_selection",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
