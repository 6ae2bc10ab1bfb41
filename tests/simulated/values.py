"""Tensors of one value, on the device and in page-locked memory."""

from __future__ import annotations

import torch

from tests.accelerator import first_device

__all__ = ["COUNT", "all_are", "device_memory", "page_locked"]

COUNT = 1000
"""Elements of each, float32."""


def device_memory(value: float) -> torch.Tensor:
    """A tensor on the device, filled when this returns."""
    tensor = torch.full((COUNT,), float(value), device=first_device())
    torch.accelerator.synchronize(first_device())
    return tensor


def page_locked(value: float) -> torch.Tensor:
    """A tensor in page-locked memory of the host."""
    return torch.empty(COUNT, pin_memory=True).fill_(value)


def all_are(tensor: torch.Tensor, value: float) -> bool:
    """Whether all elements have this value. The host waits for the current stream."""
    return tensor.tolist() == [value] * COUNT
