"""Optimizers: state by parameter name and slot, options by parameter.

Of each parameter an optimizer stores the tensors ``<key>.<parameter>.<slot>`` and one object
``<key>.<parameter>.@options``: the optimizer's class, the options of its group, the names of the slots that
exist, and the slots that are no tensors. Nothing speaks of groups or positions, so that parameters that are
grouped or ordered in another way load. A slot is laid out as its parameter is, so that a layout declared on
the parameter holds for all of them. `optimizer.state` is only looked at: a parameter that has no state yet
has none after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.state.binder import Binder
from shardproof.state.collector import Collector, Hoister
from shardproof.state.dtensor import local_tensor
from shardproof.state.handlers.modules import named
from shardproof.state.module_names import NamedModule
from shardproof.state.optimizer.bind import EXTRA, SHARED, OptimizerBinding
from shardproof.state.optimizer.group_options import Options
from shardproof.state.optimizer.parameter_names import Names
from shardproof.state.optimizer.slot_layouts import SlotLayouts
from shardproof.state.optimizer.slot_sources import slots_of
from shardproof.state.optimizer.slots import LocalRange, ParameterSlots, SlotKeeper
from shardproof.state.optimizer.zero_redundancy import is_zero_redundancy
from shardproof.state.plain.encode import encode
from shardproof.state.records import Stepped
from shardproof.state.visitor import Place, Visitor, check_name, join

__all__ = ["OPTIMIZER", "OptimizerState"]


class OptimizerState:
    """An optimizer together with the names of its parameters, where its module is not in the state tree.

    It also says that the state by parameter is all there is to keep of an optimizer that has a state_dict of
    its own.

    Args:
        optimizer: the optimizer.
        modules: whose parameters it trains. Names of several modules are prefixed with the position.
        names: instead of modules, the parameters by name, for example ``model.named_parameters()``.

    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> state = {"optimizer": OptimizerState(optimizer, model)}
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *modules: torch.nn.Module,
        names: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        if names is not None and modules:
            raise TypeError("give modules or names, not both")
        self.optimizer = optimizer
        self.modules = modules
        self.names = None if names is None else dict(names.items() if isinstance(names, Mapping) else names)


class _Optimizer:
    """Handles `torch.optim.Optimizer` and `OptimizerState`, once all modules of the tree are known."""

    def collect(self, place: Place, value: Any, out: Collector) -> None:
        """The slots that exist, and the options."""
        optimizer = _optimizer_of(value, place)
        out.later.append(
            lambda: _collect(place, optimizer, _names(value, place, out), _modules(value, out), out)
        )

    def bind(self, place: Place, value: Any, to: Binder) -> None:
        """Slots in place where they exist, new ones where they do not; attached at the end."""
        optimizer = _optimizer_of(value, place)

        def bind() -> None:
            layouts = SlotLayouts.of(_modules(value, to), to.modules)
            OptimizerBinding(place, optimizer, _names(value, place, to), layouts, to).bind()

        to.later.append(bind)


OPTIMIZER = _Optimizer()


def _collect(
    place: Place,
    optimizer: torch.optim.Optimizer,
    names: Names,
    modules: Iterable[NamedModule],
    out: Collector,
) -> None:
    layouts = SlotLayouts.of(modules, ())
    options = _OptionsObjects(place.key)
    stepped: list[torch.Tensor] = []
    for slots in slots_of(optimizer):
        parameter = slots.parameter
        name = names[parameter]
        key, origin = join(place.key, name), (place.path, name)
        layout = layouts.of_slots(parameter)
        stepped.append(parameter)
        for slot, item in slots.tensors.items():
            of_key = _key_of(key, slot)
            local_shards = layout.sharded(item, of_key)
            if local_shards is None:
                assert isinstance(item, torch.Tensor)
                out.tensor(of_key, item, origin)
            else:
                out.local_shards(of_key, local_shards, origin)
            stepped.append(item.buffer if isinstance(item, LocalRange) else item)
        values = {}
        for slot, item in slots.values.items():
            of_key = _key_of(key, slot)
            values[slot] = encode(item, of_key, Hoister(of_key, out, place.path))
        out.common_object(f"{key}.@options", options.of(slots, values), origin)
    out.stepped.append(Stepped(optimizer, tuple(stepped), tuple(map(local_tensor, stepped))))
    _collect_shared(place, optimizer, out)


def _collect_shared(place: Place, optimizer: torch.optim.Optimizer, out: Collector) -> None:
    """State that belongs to no parameter, under names of the optimizer's own."""
    if isinstance(optimizer, SlotKeeper):
        if extra := optimizer.describe_shared():
            out.object(join(place.key, EXTRA), extra, place.path)
        return
    if is_zero_redundancy(optimizer):
        return  # what its share keeps beside the parameters is refused where the share is described
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    shared = {name: item for name, item in optimizer.state.items() if name not in known}
    strange = [name for name in shared if not isinstance(name, str)]
    if strange:
        raise StructureError(
            f"{place.path} holds state of a {type(strange[0]).__name__} that is in none of its groups. "
            "Remove it from optimizer.state, or add the parameter to a group",
            key=place.key,
        )
    if shared:
        out.object(join(place.key, SHARED), shared, place.path)


def _optimizer_of(value: Any, place: Place) -> torch.optim.Optimizer:
    """The optimizer, unless keeping its state by parameter would lose part of it."""
    if isinstance(value, OptimizerState):
        return value.optimizer
    assert isinstance(value, torch.optim.Optimizer)
    kind = type(value)
    if isinstance(value, SlotKeeper) or is_zero_redundancy(value):
        return value
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        raise StructureError(
            f"{place.path}: {kind.__qualname__} has a state_dict of its own, so its state may be more than "
            "slots by parameter. If it is not, hand over shardproof.OptimizerState(optimizer, model)",
            key=place.key,
        )
    return value


def _names(value: Any, place: Place, visitor: Visitor[Any]) -> Names:
    if isinstance(value, OptimizerState):
        if value.names is not None:
            return Names.given(value.names, place)
        if value.modules:
            return Names.of_modules([named(module, visitor) for module in value.modules], place)
        return Names.of_tree(value.optimizer, visitor.modules, place)
    return Names.of_tree(value, visitor.modules, place)


def _modules(value: Any, visitor: Visitor[Any]) -> list[NamedModule]:
    """The modules that may have declared how parameters of this optimizer are laid out."""
    given = value.modules if isinstance(value, OptimizerState) else ()
    return [
        *(named(module, visitor) for module in given),
        *(owner.module for owner in visitor.modules),
    ]


def _key_of(key: str, slot: Any) -> str:
    """The key of a slot of the parameter whose key is given."""
    if not isinstance(slot, str):
        raise StructureError(f"{key}: the state has a slot named {slot!r}, which makes no key", key=key)
    if "@" in slot:
        check_name(slot, key, key)
    return f"{key}.{slot}"


class _OptionsObjects:
    """What is stored as ``@options`` of parameters: one object for all that have the same.

    Args:
        key: of the optimizer.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._options: dict[int, Any] = {}
        """By identity of a group's options, encoded."""
        self._alike: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(self, slots: ParameterSlots, values: Mapping[str, Any]) -> dict[str, Any]:
        """Of one parameter.

        Args:
            slots: of the parameter; they outlive this.
            values: its encoded slots that are no tensors.
        """
        alike = slots.kind, id(slots.options), *slots.tensors
        if not values and alike in self._alike:
            return self._alike[alike]
        if id(slots.options) not in self._options:
            self._options[id(slots.options)] = Options.encode(slots.options, self._key)
        data = {
            "class": slots.kind,
            "options": self._options[id(slots.options)],
            "slots": sorted(slots.tensors),
            "values": dict(sorted(values.items())),
        }
        return data if values else self._alike.setdefault(alike, data)
