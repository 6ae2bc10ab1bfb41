"""Experts as separate modules, as numbered parameters, side by side in one weight, or stacked.

These are the public names of `shardproof.training.layouts.experts`.
"""

from __future__ import annotations

from shardproof.training.layouts.experts import grouped, numbered, sequential, stacked

__all__ = ["grouped", "numbered", "sequential", "stacked"]
