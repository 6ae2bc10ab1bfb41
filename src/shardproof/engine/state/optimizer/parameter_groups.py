"""The names of an optimizer's parameters, and the options of its groups (learning rate, ...) by parameter.

Classes and functions among the options are no data. They are stored by name, for people, and a load leaves
those of the target. It reports a target that has another class or function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch

from shardproof.engine.state.binder import Binder
from shardproof.engine.state.module_names import clean_name
from shardproof.engine.state.optimizer.slots import EXECUTION_OPTIONS, OPTIONS, options_of
from shardproof.engine.state.plain_decode import decode
from shardproof.engine.state.plain_encode import encode
from shardproof.engine.state.plain_types import by_name, has_names, with_names, with_targets
from shardproof.engine.state.tensors import local_of
from shardproof.engine.state.visitor import Place, VisitedModule, check_name, join
from shardproof.errors import StructureError

_NAME = itemgetter(0)
"""Sort key. Several parameters may have one name, and tensors cannot be compared."""


class Names:
    """Parameter to name. Raises for a parameter without a name.

    Several parameters have the same name if they are parts (experts) or copies of one tensor of the model.
    """

    def __init__(self, names: Mapping[int, str], place: Place, owner: VisitedModule | None = None) -> None:
        self._names = names
        self._place = place
        self._owner = owner
        """The module of all parameters; None if there are several, or none."""

    def __getitem__(self, parameter: torch.Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise StructureError(
                f"{self._place.path} trains a parameter of shape {list(parameter.shape)} that belongs to no "
                "module of the state tree. Put the module into the tree, or use "
                "shardproof.OptimizerState(optimizer, module)",
                key=self._place.key,
            )
        if "@" in name:
            check_name(name, self._place.key, self._place.path)
        return name

    def all_of(self, parameter: torch.Tensor) -> list[str]:
        """All names of a parameter. A tied parameter has several; the first is `self[parameter]`."""
        first = self[parameter]
        return [first, *(name for name in self._tied.get(id(parameter), ()) if name != first)]

    def torch_name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter in torch's state dicts: the first in the order of its module."""
        tied = self._tied.get(id(parameter))
        return tied[0] if tied else self[parameter]

    @cached_property
    def _tied(self) -> dict[int, list[str]]:
        """The names of each tied parameter of the owner, in the order of the module."""
        if self._owner is None:
            return {}
        items = self._owner.stored() if self._owner.state else self._owner.parameters()
        pairs = [(id(item), name) for name, item in items]
        if len({parameter for parameter, _ in pairs}) == len(pairs):
            return {}
        names: defaultdict[int, list[str]] = defaultdict(list)
        for parameter, name in pairs:
            names[parameter].append(self._owner.module.clean(name))
        return {parameter: several for parameter, several in names.items() if len(several) > 1}

    @staticmethod
    def given(names: Mapping[str, torch.Tensor], place: Place) -> Names:
        """Names from the program."""
        return Names(_by_identity(sorted(names.items())), place)

    @staticmethod
    def of_modules(modules: Sequence[VisitedModule], place: Place) -> Names:
        """Names in the modules that the program gives. The key of each prefixes its names."""
        names: dict[int, str] = {}
        for owner in modules:
            for parameter, name in _of_module(owner).items():
                names.setdefault(parameter, join(owner.key, name))
        return Names(names, place, modules[0] if len(modules) == 1 else None)

    @staticmethod
    def of_tree(optimizer: torch.optim.Optimizer, modules: Sequence[VisitedModule], place: Place) -> Names:
        """Names in the modules of the tree, relative to the module that owns all parameters.

        If the parameters belong to several modules, each module's key prefixes its names. If they belong to
        no module, the names are the optimizer's ``param_names``.
        """
        wanted = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        owners: list[tuple[str, dict[int, str]]] = []
        for owner in sorted(modules, key=lambda owner: owner.key):
            names = _of_module(owner)
            if all(parameter in names for parameter in wanted):
                return Names(names, place, owner)
            if any(parameter in names for parameter in wanted):
                owners.append((owner.key, names))
        named: dict[int, str] = {}
        for key, names in owners:
            for parameter, name in names.items():
                named.setdefault(parameter, join(key, name))
        own = [
            (clean_name(name), parameter)
            for group in (() if owners else optimizer.param_groups)
            if "param_names" in group
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        ]
        return Names(named | _by_identity(own), place)


def _of_module(owner: VisitedModule) -> dict[int, str]:
    """Parameter to name. A tied parameter gets the first of its keys in order, which is the stored one."""
    clean = owner.module.clean
    named = _by_identity(sorted([(clean(name), item) for name, item in owner.stored()], key=_NAME))
    listed = [
        (clean(name), parameter) for name, parameter in owner.parameters() if id(parameter) not in named
    ]
    return named | _by_identity(sorted(listed, key=_NAME))


def _by_identity(named: Sequence[tuple[str, torch.Tensor]]) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), name)
    return names


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
