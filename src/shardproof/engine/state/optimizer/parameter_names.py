"""Names of an optimizer's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import itemgetter

import torch

from shardproof.engine.state.module_names import clean_name
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
