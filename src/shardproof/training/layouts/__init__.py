"""Layouts of weights whose memory differs from the model's tensor: fused, padded, stacked, renumbered.

The program declares a layout once, on the module that owns the parameter. It applies to the weight, its
master and every optimizer slot. A checkpoint stores the model's tensor at tensor parallel size 1, so any
layout of a tensor loads into any other.
"""

from __future__ import annotations

from shardproof.engine.state import rename
from shardproof.training.layouts import experts
from shardproof.training.layouts.declarations import (
    fused,
    gated_delta_net,
    latent_attention,
    layers,
    query_key_value,
    shared,
    swiglu,
    vocabulary,
)
from shardproof.training.layouts.parts import Part

__all__ = [
    "Part",
    "experts",
    "fused",
    "gated_delta_net",
    "latent_attention",
    "layers",
    "query_key_value",
    "rename",
    "shared",
    "swiglu",
    "vocabulary",
]
