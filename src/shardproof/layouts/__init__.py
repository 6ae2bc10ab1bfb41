"""Layouts of weights that lie otherwise in memory than in the model: fused, padded, stacked, renumbered.

A layout is declared once on the module that owns the parameter, and holds for the weight, its master and
every optimizer slot alike. The order in a checkpoint is that of the model's own tensor at tensor parallel
size 1, so any layout of a tensor loads into any other.
"""

from __future__ import annotations

from shardproof.layouts import experts
from shardproof.layouts.attention import gated_delta_net, latent_attention, query_key_value
from shardproof.layouts.fused import fused, swiglu
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
