"""Layouts of weights whose memory differs from the model's tensor: fused, padded, stacked, renumbered.

The program declares a layout once, on the module that owns the parameter. It applies to the weight, its
master and every optimizer slot. A checkpoint stores the model's tensor at tensor parallel size 1, so any
layout of a tensor loads into any other.
"""

from __future__ import annotations

from shardproof.layouts import experts
from shardproof.layouts.fused import fused, gated_delta_net, latent_attention, query_key_value, swiglu
from shardproof.layouts.parts import Part
from shardproof.layouts.pipeline import layers, shared
from shardproof.layouts.vocabulary import vocabulary
from shardproof.state import rename

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
