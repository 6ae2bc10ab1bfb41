"""Work on stored checkpoints without a state: verify one, repair one, copy one to stand alone."""

from __future__ import annotations

from shardproof.maintenance.copy import make_standalone
from shardproof.maintenance.repair import repair
from shardproof.maintenance.verify import VerifyReport, verify

__all__ = ["VerifyReport", "make_standalone", "repair", "verify"]
