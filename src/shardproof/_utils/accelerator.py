"""The accelerator of this process."""

from __future__ import annotations

import torch


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
