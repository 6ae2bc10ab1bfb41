"""Collects the state of optimizers by parameter name and slot, and the options by parameter.

For each parameter there are the tensors ``<key>.<parameter>.<slot>`` and one object
``<key>.<parameter>.@options``. The object has the optimizer's class, the options of the parameter's group,
the names of its slots, the slots that are not tensors, and the key of the optimizer. It has no groups or
positions, so a load may group or order parameters differently. A slot has the layout of its parameter.
`optimizer.state` does not change: a parameter without state has none after a save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.state.binder import Binder
from shardproof.state.collector import Collector, Hoister
from shardproof.state.dtensor import local_tensor
from shardproof.state.flat_parameters import is_in_flat
from shardproof.state.handlers.modules import named
from shardproof.state.module_names import NamedModule
from shardproof.state.optimizer.bind import EXTRA, SHARED, OptimizerBinding
from shardproof.state.optimizer.flat_slots import FlatSlots
from shardproof.state.optimizer.group_options import GroupOptions
from shardproof.state.optimizer.hybrid_device import HybridDeviceSlots, is_hybrid_device
from shardproof.state.optimizer.parameter_names import Names
from shardproof.state.optimizer.slot_layouts import SlotLayouts
from shardproof.state.optimizer.slot_sources import receiver, slots_of
from shardproof.state.optimizer.slots import OPTIONS, LocalRange, ParameterSlots, SlotProvider
from shardproof.state.optimizer.zero_redundancy import is_zero_redundancy
from shardproof.state.plain.encode import encode
from shardproof.state.records import Stepped
from shardproof.state.subclasses import inner_tensors
from shardproof.state.visitor import Place, Visitor, check_name, join

__all__ = ["OPTIMIZER", "OptimizerState"]


class OptimizerState:
    """An optimizer with the names of its parameters, for an optimizer whose module is not in the state tree.

    Use it also for an optimizer that overrides `state_dict`, to declare that it has no state besides slots.

    Args:
        optimizer: the optimizer.
        modules: the modules whose parameters it trains. With several, the position prefixes each name.
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
    """Handles `torch.optim.Optimizer` and `OptimizerState`, after the walk has visited all modules."""

    def collect(self, place: Place, value: Any, collector: Collector) -> None:
        optimizer = _optimizer_of(value, place)

        def collect() -> None:
            source = _source(optimizer, place, collector)
            names = _names(value, source, place, collector)
            _collect(place, optimizer, source, names, _modules(value, collector), collector)

        collector.later.append(collect)

    def bind(self, place: Place, value: Any, binder: Binder) -> None:
        """Fills existing slots in place, and creates others. Attaches them at the end of the load."""
        optimizer = _optimizer_of(value, place)

        def bind() -> None:
            layouts = SlotLayouts.of(_modules(value, binder), binder.modules)
            source: Any = _source(optimizer, place, binder)
            OptimizerBinding(place, source, _names(value, source, place, binder), layouts, binder).bind()
            if source is not optimizer:
                binder.on_finish(source.apply)

        binder.later.append(bind)


OPTIMIZER = _Optimizer()


def _collect(
    place: Place,
    optimizer: torch.optim.Optimizer,
    source: torch.optim.Optimizer | FlatSlots | HybridDeviceSlots,
    names: Names,
    modules: Iterable[NamedModule],
    collector: Collector,
) -> None:
    layouts = SlotLayouts.of(modules, ())
    options = _OptionsObjects(place.key)
    stepped: list[torch.Tensor] = []
    for slots in slots_of(source):
        parameter = slots.parameter
        name = names[parameter]
        key, origin = join(place.key, name), (place.path, name)
        layout = layouts.of_slots(parameter)
        stepped += [*inner_tensors(parameter), *slots.weights]
        for slot, item in slots.tensors.items():
            slot_key = _key_of(key, slot)
            local_shards = layout.sharded(item, slot_key)
            if local_shards is None:
                assert isinstance(item, torch.Tensor)
                collector.tensor(slot_key, item, origin)
            else:
                collector.local_shards(slot_key, local_shards, origin)
            stepped += [item.buffer] if isinstance(item, LocalRange) else inner_tensors(item)
        values = {}
        for slot, item in slots.values.items():
            slot_key = _key_of(key, slot)
            values[slot] = encode(item, slot_key, Hoister(slot_key, collector, place.path))
        collector.common_object(
            f"{key}.{OPTIONS}", options.of(slots, values, names.torch_name(parameter), name), origin
        )
    stepper = getattr(optimizer, "stepper", optimizer) if isinstance(optimizer, SlotProvider) else optimizer
    collector.stepped.append(Stepped(stepper, tuple(stepped), tuple(map(local_tensor, stepped))))
    if source is optimizer:
        _collect_shared(place, optimizer, collector)


def _source(
    optimizer: torch.optim.Optimizer, place: Place, visitor: Visitor[Any]
) -> torch.optim.Optimizer | FlatSlots | HybridDeviceSlots:
    """Where the slots are described: the optimizer itself, or a description of its state by parameter."""
    is_hybrid = is_hybrid_device(optimizer)
    if any(is_in_flat(item) for group in optimizer.param_groups for item in group["params"]):
        if is_hybrid:
            raise StructureError(
                f"{place.path}: Megatron-Core's HybridDeviceOptimizer trains flat parameters of FSDP1, whose "
                "parts it cannot step. Use fully_shard (FSDP2) and shardproof.optim.HybridDeviceOptimizer",
                key=place.key,
            )
        parts = [part for of_module in visitor.flat.values() for part in of_module]
        return FlatSlots(optimizer, parts, place)
    return HybridDeviceSlots(optimizer, receiver) if is_hybrid else optimizer


def _collect_shared(place: Place, optimizer: torch.optim.Optimizer, collector: Collector) -> None:
    """Collects state that belongs to no parameter."""
    if isinstance(optimizer, SlotProvider):
        if extra := optimizer.describe_shared():
            collector.object(join(place.key, EXTRA), extra, place.path)
        return
    if is_zero_redundancy(optimizer):
        return  # `owned_slots` refuses such state
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    shared = {name: item for name, item in optimizer.state.items() if name not in parameters}
    unknown = [name for name in shared if not isinstance(name, str)]
    if unknown:
        raise StructureError(
            f"{place.path} holds state of a {type(unknown[0]).__name__} that is in none of its groups. "
            "Remove it from optimizer.state, or add the parameter to a group",
            key=place.key,
        )
    if shared:
        collector.object(join(place.key, SHARED), shared, place.path)


def _optimizer_of(value: Any, place: Place) -> torch.optim.Optimizer:
    """The optimizer. Raises if it may have state besides slots, which a save would lose."""
    if isinstance(value, OptimizerState):
        return value.optimizer
    assert isinstance(value, torch.optim.Optimizer)
    kind = type(value)
    if isinstance(value, SlotProvider) or is_zero_redundancy(value):
        return value
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        raise StructureError(
            f"{place.path}: {kind.__qualname__} overrides state_dict, so it may have more state than slots "
            "by parameter. If it has not, save shardproof.OptimizerState(optimizer, model)",
            key=place.key,
        )
    return value


def _names(value: Any, source: Any, place: Place, visitor: Visitor[Any]) -> Names:
    if isinstance(value, OptimizerState):
        if value.names is not None:
            return Names.given(value.names, place)
        if value.modules:
            return Names.of_modules([named(module, visitor) for module in value.modules], place)
    return Names.of_tree(source, visitor.modules, place)


def _modules(value: Any, visitor: Visitor[Any]) -> list[NamedModule]:
    """The modules that may declare layouts of this optimizer's parameters."""
    given = value.modules if isinstance(value, OptimizerState) else ()
    return [
        *(named(module, visitor) for module in given),
        *(owner.module for owner in visitor.modules),
    ]


def _key_of(key: str, slot: Any) -> str:
    """The key of a slot of the parameter whose key is given."""
    if not isinstance(slot, str):
        raise StructureError(f"{key}: the slot name {slot!r} is not a string", key=key)
    if "@" in slot:
        check_name(slot, key, key)
    return f"{key}.{slot}"


class _OptionsObjects:
    """The ``@options`` objects of parameters. Parameters with equal objects share one.

    Args:
        key: key of the optimizer.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._options: dict[int, Any] = {}
        """Encoded options of a group, by their id."""
        self._objects: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(
        self, slots: ParameterSlots, values: Mapping[str, Any], torch_name: str, name: str
    ) -> dict[str, Any]:
        """The object of one parameter.

        Args:
            slots: slots of the parameter. The caller must hold all of them, so that ids are unique.
            values: the encoded slots that are not tensors.
            torch_name: name of the parameter in torch's state dicts.
            name: name of the parameter in the checkpoint.
        """
        identity = slots.kind, id(slots.options), *slots.tensors
        is_shared = not values and torch_name == name
        if is_shared and identity in self._objects:
            return self._objects[identity]
        if id(slots.options) not in self._options:
            self._options[id(slots.options)] = GroupOptions.encode(slots.options, self._key)
        data = {
            "class": slots.kind,
            "optimizer": self._key,
            "options": self._options[id(slots.options)],
            "slots": sorted(slots.tensors),
            "values": dict(sorted(values.items())),
        }
        if torch_name != name:
            data["torch_name"] = torch_name
        return self._objects.setdefault(identity, data) if is_shared else data
