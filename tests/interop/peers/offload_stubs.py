"""Stand-ins for the device of Megatron-Core's HybridDeviceOptimizer, on the CPU.

The optimizer asks `Tensor.is_cuda` which parameters are on the device, and copies a fraction of them to the
CPU with `Tensor.cpu` and `Tensor.pin_memory`. While it does so, and only then, every tensor is on the device
here, except for the results of `Tensor.cpu` and what is made from them. All that the optimizer computes is
its own code. Memory cannot be pinned without an accelerator: `pinned` has the kinds of the tensors that the
optimizer would pin.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

__all__ = ["install", "pinned"]

pinned: list[str] = []
"""Names of the classes of tensors on which `pin_memory` was called."""
_MADE_FROM = ("clone", "detach", "float")


def install() -> None:
    """Puts the stand-ins in place, beside those of `megatron_stubs`."""
    if torch.cuda.is_available():
        return
    torch.cuda.get_device_capability = lambda device=None: (8, 0)  # torch asks it for tensors on a device
    optimizers = importlib.import_module("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    kind = optimizers.HybridDeviceOptimizer
    split = kind._get_sub_optimizer_param_groups
    if hasattr(split, "__wrapped__"):
        return

    @functools.wraps(split)
    def on_device(self: Any, fraction: float) -> Any:
        with _device():
            return split(self, fraction)

    kind._get_sub_optimizer_param_groups = on_device


@contextmanager
def _device() -> Iterator[None]:
    stubs: dict[str, Any] = {
        "is_cuda": property(lambda tensor: not _is_on_host(tensor)),
        "pin_memory": _pinned,
        "cpu": lambda tensor: _marked(tensor.clone()),
    }
    stubs |= {name: _keeping_its_mark(getattr(torch.Tensor, name)) for name in _MADE_FROM}
    with mock.patch.multiple(torch.Tensor, **stubs):
        yield


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    pinned.append(type(tensor).__name__)
    return tensor


def _is_on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "on_host", False)


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


def _keeping_its_mark(method: Any) -> Any:
    def made(tensor: torch.Tensor) -> torch.Tensor:
        result = method(tensor)
        return _marked(result) if _is_on_host(tensor) else result

    return made
