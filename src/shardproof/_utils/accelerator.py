"""The accelerator of this process, the devices of process groups, and page-locked memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardproof._utils.memcpy import address


def available_accelerator() -> torch.device | None:
    """The accelerator; None if this machine has none. Loads its driver.

    >>> device = available_accelerator()
    >>> (device is not None) == torch.accelerator.is_available()
    True
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def is_on_accelerator(device: torch.device) -> bool:
    """True if this device, which has tensors, is an accelerator.

    >>> is_on_accelerator(torch.device("cpu"))
    False
    """
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 without an accelerator; later versions name the device of the build
        return False
    return accelerator is not None and accelerator.type == device.type


def device_of_group(group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors a process group sends and reduces: the CPU if it can."""
    kinds = [entry.partition(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


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
    accelerator = available_accelerator()
    if accelerator is None:
        return None
    is_used = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_used is not None and not is_used():  # this process does not use it yet
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
