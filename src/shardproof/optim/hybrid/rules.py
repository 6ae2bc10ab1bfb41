"""The update rules of the two sides: factories of the sub-optimizers, and their class names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardproof.optim.schema import Factory, Spec

__all__ = ["Rules"]

_DEVICE_ONLY = frozenset(("capturable",))
"""Options of torch's optimizers that a step on the CPU does not support."""


class Rules:
    """The classes of the device's and the CPU's optimizers, with their options.

    Args:
        device: class of the device's side, or a callable like it.
        cpu: class of the CPU's side. It gets the options that it accepts.
        options: keyword arguments of the device's class.

    Raises:
        ValueError: a class whose step requires a closure (L-BFGS).

    >>> Rules(torch.optim.AdamW, torch.optim.SGD, {"lr": 0.1, "betas": (0.9, 0.99)}).on_cpu.options
    {'lr': 0.1}
    """

    def __init__(
        self,
        device: Callable[..., torch.optim.Optimizer],
        cpu: Callable[..., torch.optim.Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        self.on_device = Factory(device, options)
        self.defaults = _checked_defaults(self.on_device)
        on_both = {name: item for name, item in options.items() if name not in _DEVICE_ONLY}
        self._schemas: dict[Any, Mapping[str, Spec]] = {}
        self.not_of_cpu = _DEVICE_ONLY
        """Options of a group that the CPU's side does not accept."""
        if cpu is device:
            self.on_cpu = Factory(device, on_both)
        else:
            self.on_cpu = Factory(cpu, {}).accepting(on_both)
            self.not_of_cpu |= self.defaults.keys() - _checked_defaults(self.on_cpu).keys()
        self._kinds = {False: self.on_device.kind, True: self.on_cpu.kind}
        if self._kinds[False] != self._kinds[True] and self._alike():
            self._kinds[True] = self._kinds[False]

    def kind(self, on_cpu: bool) -> str:
        """Class name of the update rule of a side.

        Two classes with the same slots (such as a fused class and torch's) count as one rule, the device's.
        """
        return self._kinds[on_cpu]

    def schema(self, on_cpu: bool, options: Mapping[str, Any], dtype: torch.dtype) -> Mapping[str, Spec]:
        """The slots that a side creates; empty if its class is not elementwise."""
        key = (on_cpu, dtype, tuple(sorted((name, _option_key(item)) for name, item in options.items())))
        if key not in self._schemas:
            factory = self.on_cpu if on_cpu else self.on_device
            try:
                self._schemas[key] = Factory(factory.make, {**factory.options, **options}).schema(dtype)
            except ValueError:
                self._schemas[key] = {}
        return self._schemas[key]

    def _alike(self) -> bool:
        slots = [self.schema(on_cpu, {}, torch.float32).keys() for on_cpu in (False, True)]
        return bool(slots[0]) and slots[0] == slots[1]


def _option_key(option: Any) -> str:
    """A key that differs between options with different slots. The value of a tensor does not matter."""
    return "tensor" if isinstance(option, torch.Tensor) else repr(option)


def _checked_defaults(factory: Factory) -> dict[str, Any]:
    optimizer = factory.trial()
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__qualname__} calls its closure several times a step, which two sides cannot "
            "do together: use an optimizer that steps from a gradient"
        )
    return dict(optimizer.defaults)
