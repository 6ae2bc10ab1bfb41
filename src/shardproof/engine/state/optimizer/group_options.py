"""The options of an optimizer's groups (learning rate, betas, ...), stored by parameter.

Classes and functions among them are no data. They are stored by name, for people, and a load leaves those of
the target. It reports a target that has another class or function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardproof.engine.state.binder import Binder
from shardproof.engine.state.optimizer.slots import EXECUTION_OPTIONS, OPTIONS, options_of
from shardproof.engine.state.plain.by_name import by_name, has_names, with_names, with_targets
from shardproof.engine.state.plain.decode import decode
from shardproof.engine.state.plain.encode import encode
from shardproof.engine.state.tensors import local_of
from shardproof.engine.state.visitor import join
from shardproof.errors import StructureError


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The stored options of the parameters of one target group."""

    key: str
    """Key of the optimizer."""
    stored: Mapping[str, Any]
    """Parameter name to its encoded options."""

    @staticmethod
    def encode(group: Mapping[str, Any], key: str) -> Any:
        """The encoded options of a group. A learning rate in a tensor is stored as its value."""
        return encode(with_names(dict(sorted(options_of(group).items()))), f"{key}.{OPTIONS}")

    def bind(self, group: dict[str, Any], binder: Binder) -> Callable[[], None]:
        """Returns a function that sets the group's options. Different options in one group are a mismatch."""
        agreed: dict[str, list[Any]] = {}
        source: dict[str, str] = {}
        refused: set[str] = set()
        for parameter, options in self.stored.items():
            for name, value in options.items():
                if name in EXECUTION_OPTIONS:
                    continue
                first = agreed.setdefault(name, [value])[0]
                source.setdefault(name, parameter)
                if value == first:
                    continue
                if _is_tensor(value) and _is_tensor(first):
                    agreed[name].append(value)  # compared when they are read
                elif name not in refused:
                    refused.add(name)
                    if binder.strict:
                        binder.mismatch(
                            join(self.key, f"{parameter}.{OPTIONS}"),
                            f"{name}={first!r} as for {source[name]}, which is in the same group",
                            f"{name}={value!r}",
                        )
        values = {
            name: [binder.rebuild(f"{self.key}.{OPTIONS}.{name}", value) for value in stored]
            for name, stored in agreed.items()
            if name not in refused
        }
        for name in values:
            _check_present(group.get(name), f"{self.key}.{OPTIONS}.{name}")
            if has_names(agreed[name]) and binder.strict:
                with_targets(
                    {name: decode(agreed[name][0])}, group, partial(self._report, source[name], binder)
                )

        def apply() -> None:
            for name, stored in values.items():
                value, *others = [read() for read in stored]
                if not all(torch.equal(value, other) for other in others):
                    raise StructureError(
                        f"{self.key}: the checkpoint has different values of {name} for parameters that are "
                        "in one group of the target. Give each value a group of its own",
                        key=self.key,
                    )
                value = with_targets(value, group.get(name), lambda *_difference: None)  # reported above
                if not has_names(value):  # the target has them all
                    group[name] = _in_target_form(group.get(name), value)

        return apply

    def _report(
        self, parameter: str, binder: Binder, path: tuple[Any, ...], target: str, stored: str
    ) -> None:
        """Records that the target has another class or function in an option."""
        option = ".".join(map(str, path))
        binder.mismatch(
            join(self.key, f"{parameter}.{OPTIONS}"),
            f"{option}={target}",
            f"{option}={stored}; strict=False keeps that of the target",
        )


def _is_tensor(encoded: Any) -> bool:
    """True if an encoded option is stored as a tensor."""
    return isinstance(encoded, dict) and "$tensor" in encoded


def _check_present(present: Any, path: str) -> None:
    """Raises if a tensor among the target's options has no memory to fill."""
    if isinstance(present, torch.Tensor):
        local_of(present, path)
    elif isinstance(present, tuple):
        for item in present:
            _check_present(item, path)


def _in_target_form(present: Any, stored: Any) -> Any:
    """The stored option in the target's form. Fills a tensor in place, and returns a number for a number."""
    if isinstance(present, torch.Tensor):
        with torch.no_grad():
            if isinstance(stored, torch.Tensor):
                present.copy_(stored)
            else:
                present.fill_(stored)
        return present
    if by_name(present) is not None:
        return present
    if isinstance(stored, torch.Tensor) and isinstance(present, (int, float)):
        return stored.item()
    if isinstance(present, tuple) and isinstance(stored, tuple) and len(present) == len(stored):
        return tuple(_in_target_form(mine, theirs) for mine, theirs in zip(present, stored, strict=True))
    return stored
