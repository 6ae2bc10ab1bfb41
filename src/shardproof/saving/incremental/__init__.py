"""Incremental saves: chunks that an earlier step stores are referred to, not written again.

The plain save needs three things of this package. The coordinator asks `BaseChoice` for the base, a rank
gives `BaseDigests` to its shard writer, and `place_chunks` takes unwritten chunks from `Base`.
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
