"""Replica checks: ranks hash their replicas of a box, and the coordinator compares the digests.

`ReplicaOption` plugs into the steps of a save. Each rank hashes before its caller continues, and the
coordinator compares before the commit.
"""

from __future__ import annotations

from shardproof.engine.saving.replica_check.replica_digests import (
    CheckReplicas,
    chosen_slices,
    compare_replicas,
    hash_replicas,
)
from shardproof.engine.saving.replica_check.replica_option import ReplicaCache, ReplicaOption

__all__ = [
    "CheckReplicas",
    "ReplicaCache",
    "ReplicaOption",
    "chosen_slices",
    "compare_replicas",
    "hash_replicas",
]
