"""Boxes in a tensor's index space, and arithmetic on many of them at once. It needs numpy only.

These are the public names of `shardproof.engine.geometry`.
"""

from __future__ import annotations

from shardproof.engine.geometry import (
    Boxes,
    IndexMap,
    TilingFault,
    axis_weights,
    compose,
    cut,
    deduplicate,
    flat_range_boxes,
    flat_range_of,
    flat_range_pairs,
    flat_shard,
    intersect,
    overlapping_pairs,
    row_major_strides,
    split_axes,
    stable_order,
    tiling_faults,
)

__all__ = [
    "Boxes",
    "IndexMap",
    "TilingFault",
    "axis_weights",
    "compose",
    "cut",
    "deduplicate",
    "flat_range_boxes",
    "flat_range_of",
    "flat_range_pairs",
    "flat_shard",
    "intersect",
    "overlapping_pairs",
    "row_major_strides",
    "split_axes",
    "stable_order",
    "tiling_faults",
]
