"""Reruns a step with a suspicious result, to distinguish a faulty device from a bad batch.

These are the public names of `shardproof.training.rerun`.
"""

from __future__ import annotations

from shardproof.training.rerun import (
    Attribution,
    AttributionKind,
    BufferState,
    Decision,
    DeviceIdentity,
    Differences,
    ExitCodes,
    FaultInjector,
    FaultKind,
    Mode,
    Rejected,
    ReplayableIterator,
    RerunMachine,
    ResultLog,
    Spike,
    Spread,
    State,
    StepState,
    Suspect,
    UnexpectedlyLarge,
    not_finite,
    read_rejected,
    read_spreads,
    relative_difference,
    reproduced,
    steps_to_skip,
)

__all__ = [
    "Attribution",
    "AttributionKind",
    "BufferState",
    "Decision",
    "DeviceIdentity",
    "Differences",
    "ExitCodes",
    "FaultInjector",
    "FaultKind",
    "Mode",
    "Rejected",
    "ReplayableIterator",
    "RerunMachine",
    "ResultLog",
    "Spike",
    "Spread",
    "State",
    "StepState",
    "Suspect",
    "UnexpectedlyLarge",
    "not_finite",
    "read_rejected",
    "read_spreads",
    "relative_difference",
    "reproduced",
    "steps_to_skip",
]
