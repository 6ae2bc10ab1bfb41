"""Replica checks: ranks hash their replicas of a box, and the coordinator compares the digests.

The plain save calls this package twice. Each rank calls `hash_replicas` before its caller continues, and the
coordinator calls `compare_replicas` before the commit.
"""

from __future__ import annotations

from shardproof.saving.replica_check.replica_digests import (
    CheckReplicas,
    chosen_slices,
    compare_replicas,
    hash_replicas,
    warn_of_divergences,
)

__all__ = ["CheckReplicas", "chosen_slices", "compare_replicas", "hash_replicas", "warn_of_divergences"]
