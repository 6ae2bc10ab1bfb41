"""Options of a group of the program, as the sub-optimizers are told them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from shardproof.state import options_of

__all__ = ["GroupLink"]


class GroupLink:
    """Keeps one group of a sub-optimizer at what the program's group says.

    Options that the optimizer's step itself changes (some keep a count or an estimate in the group) stay what
    the step made them, until the program sets another value.

    Args:
        group: the program's.
        inner: the sub-optimizer's, made from `group`.
        on_cpu: the inner group's side.
        without: options that this side does not have.
    """

    def __init__(
        self, group: dict[str, Any], inner: dict[str, Any], *, on_cpu: bool, without: Collection[str]
    ) -> None:
        self._group = group
        self._inner = inner
        self._on_cpu = on_cpu
        self._without = frozenset(without)
        self._told: dict[str, Any] = {}

    def tell(self) -> None:
        """Hand over what the program (a scheduler) has changed since the last time."""
        for name, item in options_of(self._group, self._without).items():
            if name in self._told and _same(item, self._told[name]):
                continue
            if self._on_cpu and isinstance(item, torch.Tensor) and item.device.type != "cpu":
                raise ValueError(
                    f"the option {name} is a tensor on {item.device}, which the CPU side could only read by "
                    "waiting for the device: give a number, or a tensor on the CPU"
                )
            self._inner[name] = self._told[name] = item

    def hear(self) -> None:
        """Show the program what the step has changed."""
        for name, item in self._told.items():
            found = self._inner.get(name)
            if not _same(found, item):
                self._group[name] = self._told[name] = found


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same option; tensors, which change in place, are themselves alone."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one is other or bool(one == other)
