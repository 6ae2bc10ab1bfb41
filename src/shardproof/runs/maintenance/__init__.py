"""Works on stored checkpoints without a state: verifies, repairs, and makes standalone copies."""

from __future__ import annotations

from shardproof.runs.maintenance.copy import StandalonePlan, make_standalone, plan_standalone
from shardproof.runs.maintenance.repair import plan_repair as plan_repair
from shardproof.runs.maintenance.repair import repair, whole_attempts
from shardproof.runs.maintenance.shard_files import copy_shard_file as copy_shard_file
from shardproof.runs.maintenance.shard_files import read_whole_index as read_whole_index
from shardproof.runs.maintenance.shard_files import verify_files_here as verify_files_here
from shardproof.runs.maintenance.verify import VerifyReport, verify, verify_any, verify_foreign

__all__ = [
    "StandalonePlan",
    "VerifyReport",
    "make_standalone",
    "plan_standalone",
    "repair",
    "verify",
    "verify_any",
    "verify_foreign",
    "whole_attempts",
]
