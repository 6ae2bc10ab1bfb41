"""Fully sharded data parallel over flat buffers, with uneven shards whose layout follows from arithmetic.

These are the public names of `shardproof.training.fsdp`.
"""

from __future__ import annotations

from shardproof.training.fsdp import (
    MixedPrecision,
    Strategy,
    UnshardHandle,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    materialize,
    no_sync,
    reshard,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_requires_gradient_sync,
    unshard,
)

__all__ = [
    "MixedPrecision",
    "Strategy",
    "UnshardHandle",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "materialize",
    "no_sync",
    "reshard",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_requires_gradient_sync",
    "unshard",
]
