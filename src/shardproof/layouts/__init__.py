"""Layouts of weights whose memory differs from the model's tensor: fused, padded, stacked, renumbered.

These are the public names of `shardproof.training.layouts`.
"""

from __future__ import annotations

from shardproof.layouts import experts
from shardproof.training.layouts import (
    Part,
    fused,
    gated_delta_net,
    latent_attention,
    layers,
    query_key_value,
    rename,
    shared,
    swiglu,
    vocabulary,
)

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
