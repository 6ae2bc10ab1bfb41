"""Stand-ins for the device of Megatron-Core's HybridDeviceOptimizer, on the CPU.

The optimizer asks `Tensor.is_cuda` which parameters are on the device, and copies a fraction of them to the
CPU with `Tensor.cpu` and `Tensor.pin_memory`. Here, every tensor is on the device, except for the results of
`Tensor.cpu` and what is made from them. Everything that the optimizer computes is its own code.
"""

from __future__ import annotations

from typing import Any

import megatron_stubs
import torch

__all__ = ["install", "is_on_host"]

_MADE_FROM = ("clone", "detach", "float", "pin_memory")


def install(*, fused: bool) -> None:
    """Puts the stand-ins in place. `fused` is that of `megatron_stubs.install`."""
    megatron_stubs.install(fused=fused)
    if torch.cuda.is_available():
        return
    torch.Tensor.is_cuda = property(lambda tensor: not is_on_host(tensor))
    torch.Tensor.pin_memory = lambda tensor, *args: tensor
    torch.Tensor.cpu = lambda tensor, *args, **options: _marked(tensor.clone())
    for name in _MADE_FROM:
        setattr(torch.Tensor, name, _keeping_its_mark(getattr(torch.Tensor, name)))


def is_on_host(tensor: torch.Tensor) -> bool:
    """True for a copy of the optimizer's CPU side."""
    return getattr(tensor, "on_host", False)


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


def _keeping_its_mark(method: Any) -> Any:
    def made(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = method(tensor, *args, **options)
        return _marked(result) if is_on_host(tensor) else result

    return made
