"""Works on stored checkpoints without a state: verifies, repairs, and makes standalone copies.

These are the public names of `shardproof.runs.maintenance`.
"""

from __future__ import annotations

from shardproof.runs.maintenance import VerifyReport, repair, verify

__all__ = ["VerifyReport", "repair", "verify"]
