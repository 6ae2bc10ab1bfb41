"""Reruns a step with a suspicious result, to distinguish a faulty device from a bad batch."""

from __future__ import annotations

from shardproof.training.rerun.attribution import Attribution, DeviceIdentity, Suspect
from shardproof.training.rerun.injection import FaultInjector, FaultKind
from shardproof.training.rerun.machine import RerunMachine
from shardproof.training.rerun.rejections import Spike, UnexpectedlyLarge, not_finite
from shardproof.training.rerun.replay import ReplayableIterator
from shardproof.training.rerun.result_log import (
    Differences,
    Rejected,
    ResultLog,
    Spread,
    read_rejected,
    read_spreads,
    steps_to_skip,
)
from shardproof.training.rerun.step_effects import Decision, ExitCodes
from shardproof.training.rerun.step_run import relative_difference, reproduced
from shardproof.training.rerun.step_start import BufferState, StepState
from shardproof.training.rerun.transitions import AttributionKind, Mode, State

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
