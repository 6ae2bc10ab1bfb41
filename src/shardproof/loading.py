"""Reading checkpoints: into a live state, or by slices.

These are the public names of `shardproof.engine.loading`.
"""

from __future__ import annotations

from shardproof.engine.loading import Checkpoint, LoadReport, StoredTensor, load, open

__all__ = ["Checkpoint", "LoadReport", "StoredTensor", "load", "open"]
