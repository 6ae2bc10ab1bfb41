"""Works on stored checkpoints without a state: verifies, repairs, and makes standalone copies.

These are the public names of `shardproof.runs.maintenance`.
"""

from __future__ import annotations

from shardproof.runs.maintenance import (
    StandalonePlan,
    VerifyReport,
    make_standalone,
    plan_standalone,
    repair,
    verify,
    verify_any,
    verify_foreign,
    whole_attempts,
)

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
