"""The two sides: the parameters that each one updates, and its update rule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.engine.state import is_sharded
from shardproof.training.optim.schema import Factory, Spec

_DEVICE_ONLY = frozenset(("capturable",))
"""Options of torch's optimizers that a step on the CPU does not support."""


@dataclass(slots=True)
class DeviceSplit:
    """Assigns parameters to CPU and device, so that the CPU has a fraction of the elements of every layer.

    `on_cpu` is called for each parameter in the order of the optimizer's groups. A parameter goes to the CPU
    if the CPU lacks at least half of its elements to have the fraction of all elements so far. So the CPU's
    share differs from the fraction by at most half of the largest parameter, and later parameters do not move
    earlier ones. Only global shapes count, so every rank with the same parameters assigns them equally.

    Args:
        fraction: part of the elements on the CPU, from 0 to 1.

    Raises:
        ValueError: the fraction is outside [0, 1].

    >>> sides = DeviceSplit(0.5)
    >>> [sides.on_cpu(torch.zeros(4)) for _ in range(6)]
    [True, False, True, False, True, False]
    """

    fraction: float
    seen: int = 0
    """Elements of all parameters so far."""
    taken: int = 0
    """Elements of the parameters on the CPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"cpu_fraction is {self.fraction}, not a number from 0 to 1")

    def on_cpu(self, parameter: torch.Tensor) -> bool:
        """Return True if the next parameter goes to the CPU. An empty parameter counts as one element."""
        elements = max(1, math.prod(parameter.shape))
        self.seen += elements
        chosen = self.fraction > 0 and 2 * self.taken + elements <= 2 * self.fraction * self.seen
        self.taken += elements * chosen
        return chosen


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
        self._schemas: dict[Any, Mapping[str, Spec] | ValueError] = {}
        self.not_of_cpu = _DEVICE_ONLY
        """Options of a group that the CPU's side does not accept."""
        if cpu is device:
            self.on_cpu = Factory(device, on_both)
        else:
            self.on_cpu = Factory(cpu, {}).accepting(on_both)
            self.not_of_cpu |= self.defaults.keys() - _checked_defaults(self.on_cpu).keys()
        self._kinds = {False: self.on_device.kind, True: self.on_cpu.kind}
        if self._kinds[False] != self._kinds[True]:
            here, there = (schema.keys() for schema in self.default_schemas())
            if here and here == there:
                self._kinds[True] = self._kinds[False]

    def kind(self, on_cpu: bool) -> str:
        """Class name of the update rule of a side.

        Two classes with the same slots (such as a fused class and torch's) count as one rule, the device's.
        """
        return self._kinds[on_cpu]

    def schema(self, on_cpu: bool, options: Mapping[str, Any], like: torch.Tensor) -> Mapping[str, Spec]:
        """The slots that a side creates for a tensor; empty if its class is not elementwise."""
        found = self._schema_or_error(on_cpu, options, like)
        return {} if isinstance(found, ValueError) else found

    def default_schemas(self) -> tuple[Mapping[str, Spec], Mapping[str, Spec]]:
        """The slots of the device's and of the CPU's class, with their default options."""
        like = torch.empty(0, dtype=torch.float32, device="cpu")
        return self.schema(False, {}, like), self.schema(True, {}, like)

    def check_shard(
        self, on_cpu: bool, options: Mapping[str, Any], parameter: torch.Tensor, like: torch.Tensor
    ) -> None:
        """Checks that a side may step a rank's part of a parameter without the other parts."""
        if not is_sharded(parameter):
            return
        found = self._schema_or_error(on_cpu, options, like)
        if isinstance(found, ValueError):
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} is sharded ({parameter.placements}), and a "  # type: ignore[attr-defined]
                f"rank cannot step its part alone: {found}"
            ) from found

    def _schema_or_error(
        self, on_cpu: bool, options: Mapping[str, Any], like: torch.Tensor
    ) -> Mapping[str, Spec] | ValueError:
        # The value of a tensor does not matter for the slots.
        texts = {
            name: "tensor" if isinstance(item, torch.Tensor) else repr(item) for name, item in options.items()
        }
        device = torch.device("cpu") if like.is_meta else like.device
        key = (on_cpu, like.dtype, device, tuple(sorted(texts.items())))
        if key not in self._schemas:
            factory = self.on_cpu if on_cpu else self.on_device
            try:
                self._schemas[key] = Factory(factory.make, {**factory.options, **options}).schema(
                    like.dtype, device
                )
            except ValueError as error:
                self._schemas[key] = error
        return self._schemas[key]


def _checked_defaults(factory: Factory) -> dict[str, Any]:
    optimizer = factory.trial()
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__qualname__} calls its closure several times a step, which two sides cannot "
            "do together: use an optimizer that steps from a gradient"
        )
    return dict(optimizer.defaults)
