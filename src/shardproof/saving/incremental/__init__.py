"""Incremental saves: a step refers to unchanged chunks of an earlier step, and does not write them again.

A plain save uses this package in three places. The coordinator gets the base from `BaseChoice`, a rank passes
`BaseDigests` to its shard writer, and `place_chunks` finds unwritten chunks in `Base`.
"""

from __future__ import annotations

from shardproof.saving.incremental.base_choice import BaseChoice, CachedBase, FindBase
from shardproof.saving.incremental.base_chunks import Base, BaseDigests, match_base, no_base, with_folders

__all__ = [
    "Base",
    "BaseChoice",
    "BaseDigests",
    "CachedBase",
    "FindBase",
    "match_base",
    "no_base",
    "with_folders",
]
