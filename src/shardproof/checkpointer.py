"""The steps of a run: save, restore, retention, prune. `Checkpointer` loads torch when first used.

These are the public names of `shardproof.runs.checkpointer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.runs.checkpointer import (
    SETTLED_NAME,
    Damage,
    Every,
    Incremental,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    Leftover,
    NodeLocal,
    Pin,
    Preempted,
    Preemption,
    Retention,
    RetentionPolicy,
    SavedStep,
    Schedule,
    SecondTier,
    StepFolder,
    delete_steps,
    is_ours,
    leftovers,
    parse_folder,
    parse_step,
    plan_removal,
    read_settled,
    remove_leftover,
)

if TYPE_CHECKING:
    from shardproof.runs.checkpointer import Checkpointer, PassedOver, RestoredStep

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


def __getattr__(name: str) -> Any:
    """A name that its package loads when it is first used."""
    from shardproof.runs import checkpointer

    if name in ["Checkpointer", "PassedOver", "RestoredStep"]:
        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
