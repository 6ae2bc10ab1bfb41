"""The device that tests marked `gpu` run on: a GPU, or the simulated device of `tests/simulated`."""

from __future__ import annotations

import torch

__all__ = ["first_device", "late_one"]


def first_device() -> torch.device:
    """The accelerator's first device."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, 0)


def late_one(device: torch.device, products: int, side: int) -> torch.Tensor:
    """A scalar one that the device has only after matrix products. The simulated device is late by itself."""
    if device.type == "simulated":
        side = 16
    spin = torch.ones(side, side, device=device)
    for _ in range(products):
        spin = spin @ spin / side
    return spin[0, 0]
