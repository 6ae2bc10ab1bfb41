"""Scalars of this rank's saves and loads for TensorBoard, by step.

These are the public names of `shardproof.engine.events.tensorboard`.
"""

from __future__ import annotations

from shardproof.engine.events.tensorboard import Writer, write_to

__all__ = ["Writer", "write_to"]
