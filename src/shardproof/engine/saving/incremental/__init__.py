"""Incremental saves: a step refers to unchanged chunks of an earlier step, and does not write them again.

`IncrementalOption` plugs into the steps of a save. The coordinator gets the base from `BaseChoice`, a rank
passes `BaseDigests` to `write_changed`, and `place_with_base` finds unwritten chunks in `Base`.
"""

from __future__ import annotations

from shardproof.engine.saving.incremental.base_chunks import Base, BaseDigests, match_base, place_with_base
from shardproof.engine.saving.incremental.incremental_option import BaseCache, FindBase, IncrementalOption

__all__ = [
    "Base",
    "BaseCache",
    "BaseDigests",
    "FindBase",
    "IncrementalOption",
    "match_base",
    "place_with_base",
]
