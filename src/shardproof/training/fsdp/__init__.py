"""Fully sharded data parallel over flat buffers, with uneven shards whose layout follows from arithmetic."""

from __future__ import annotations

from shardproof.training.fsdp.sharded_model import (
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
    materialize,
)
from shardproof.training.fsdp.sharding import (
    UnshardHandle,
    fully_shard,
    reshard,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    unshard,
)
from shardproof.training.fsdp.unit import MixedPrecision, Strategy, no_sync, set_requires_gradient_sync

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
