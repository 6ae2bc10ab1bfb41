"""Boxes in a tensor's index space, and arithmetic on many of them at once. It needs numpy only.

`Boxes` holds boxes of one number of dimensions, `BoxTable` boxes of different ones. The functions cut,
intersect and compare boxes, prove that they tile tensors, and map them from local to global arrays
(`IndexMap`).
"""

from __future__ import annotations

from shardproof.engine.geometry.boxes import (
    Boxes,
    cut,
    intersect,
    overlapping_pairs,
    row_major_strides,
    stable_order,
)
from shardproof.engine.geometry.index_map import (
    IndexMap,
    axis_weights,
    compose,
    flat_range_boxes,
    flat_range_of,
    flat_range_pairs,
    flat_shard,
    split_axes,
)
from shardproof.engine.geometry.table import BoxTable as BoxTable  # not listed in __all__: internal
from shardproof.engine.geometry.table import consecutive as consecutive
from shardproof.engine.geometry.table import row_pointers as row_pointers
from shardproof.engine.geometry.tiling import TilingFault, deduplicate, tiling_faults

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
