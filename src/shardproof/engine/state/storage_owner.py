"""Declares the buffer that owns the storage of a parameter.

torch counts the writes to a tensor in a version counter. A parameter that is a part of a larger buffer has
its own counter, which a write to the buffer does not increment. Code that puts parameters into a buffer
declares the buffer here, so that a save can also watch the buffer's counter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

_OWNER = "_shardproof_storage_owner"


def declare_storage_owner(part: torch.Tensor, owner: torch.Tensor) -> None:
    """Declare that all writes to the storage of `part` go through `part`, `owner`, or a view of either.

    Args:
        part: the tensor that an optimizer steps: a parameter (possibly a DTensor), or a range of a buffer.
        owner: a tensor that covers the whole storage.

    >>> flat = torch.zeros(4)
    >>> parameter = torch.nn.Parameter(flat[:2])
    >>> declare_storage_owner(parameter, flat)
    >>> storage_owner(parameter) is flat
    True
    """
    setattr(part, _OWNER, owner)


def storage_owner(part: torch.Tensor) -> torch.Tensor | None:
    """The declared owner of the storage of `part`."""
    owner: torch.Tensor | None = getattr(part, _OWNER, None)
    return owner


def declare_fsdp2_owners(modules: Iterable[torch.nn.Module]) -> None:
    """Declare the padded buffers of torch's `fully_shard` (FSDP2).

    If the ranks do not divide a dimension evenly, FSDP2 puts the local tensor into a buffer with padding.
    torch has no public name for that buffer. If this torch has it under another name, the function declares
    nothing, and saves stage the parameter.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return
    for module in modules:
        if not isinstance(module, kind):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for item in getattr(group, "fsdp_params", ()):
                owner = getattr(item, "_sharded_param_data", None)
                if isinstance(owner, torch.Tensor):
                    declare_storage_owner(item.sharded_param, owner)
