"""Page-locked host memory, which devices copy to and from without help of the host."""

from __future__ import annotations

import torch

from shardproof._utils.accelerator import available_accelerator
from shardproof._utils.memcpy import address


def page_locked(nbytes: int, alignment: int = 1) -> memoryview | None:
    """New page-locked memory; None if this process uses no accelerator or the system locks no more memory.

    An accelerator that the process has not used stays unused, since locking would load its driver. The
    allocator may round up to a power of two, and caches freed memory.

    Args:
        nbytes: size, at least 1.
        alignment: the address is a multiple of it.

    >>> page_locked(10_000) is None or len(page_locked(10_000)) == 10_000
    True
    """
    if not _locks_pages():
        return None
    for spare in dict.fromkeys((0, alignment)):
        try:
            memory = (
                torch.empty(nbytes + spare, dtype=torch.uint8, pin_memory=True, device="cpu").numpy().data
            )
        except RuntimeError:  # the limit of locked memory, or of the backend
            return None
        skip = -address(memory) % alignment
        if skip <= spare:
            return memory[skip : skip + nbytes]
    return None


def _locks_pages() -> bool:
    """True if this process already uses an accelerator."""
    accelerator = available_accelerator()
    if accelerator is None:
        return False
    is_used = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return is_used is None or bool(is_used())
