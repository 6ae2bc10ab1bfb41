"""Optimizers: state by parameter name and slot, options by parameter.

Of each parameter an optimizer stores the tensors ``<key>.<parameter>.<slot>`` and one object
``<key>.<parameter>.@options``: the optimizer's class, the options of its group, the names of the slots that
exist, and the slots that are no tensors. Nothing speaks of groups or positions, so that parameters that are
grouped or ordered in another way load. `optimizer.state` is only looked at: a parameter that has no state yet
has none after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.state.binding import MISSING, Binder
from shardproof.state.collecting import Collector, Hoister
from shardproof.state.names import Names
from shardproof.state.options import Options
from shardproof.state.plain import encode
from shardproof.state.tensors import empty_like_layout, torch_dtype
from shardproof.state.visiting import Place, Visitor, join

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
        out.later.append(lambda: self._collect(place, optimizer, _names(value, place, out), out))

    def bind(self, place: Place, value: Any, to: Binder) -> None:
        """Slots in place where they exist, new ones where they do not; attached at the end."""
        optimizer = _optimizer_of(value, place)
        to.later.append(lambda: _Binding(place, optimizer, _names(value, place, to), to).bind())

    @staticmethod
    def _collect(place: Place, optimizer: torch.optim.Optimizer, names: Names, out: Collector) -> None:
        seen, kind = 0, type(optimizer).__qualname__
        for group in optimizer.param_groups:
            options = Options.encode(group, place.key)
            for parameter in group["params"]:
                key = join(place.key, names[parameter])
                state = optimizer.state.get(parameter)
                seen += state is not None
                slots, values = [], {}
                for slot, item in (state or {}).items():
                    _check_slot(slot, key)
                    if isinstance(item, torch.Tensor):
                        slots.append(slot)
                        out.tensor(f"{key}.{slot}", item, (place.path, f"{names[parameter]}.{slot}"))
                    else:
                        hoist = Hoister(f"{key}.{slot}", out, place.path)
                        values[slot] = encode(item, f"{key}.{slot}", hoist)
                data = {
                    "class": kind,
                    "options": options,
                    "slots": sorted(slots),
                    "values": dict(sorted(values.items())),
                }
                out.encoded(f"{key}.@options", data, (place.path, names[parameter]))
        if len(optimizer.state) > seen:
            _collect_shared(place, optimizer, out)


OPTIMIZER = _Optimizer()


@dataclass
class _Binding:
    """One optimizer that takes what a checkpoint holds."""

    place: Place
    optimizer: torch.optim.Optimizer
    names: Names
    to: Binder
    attach: list[Any] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    """Class that another optimizer's state was of, to the first key that says so."""

    def bind(self) -> None:
        """All parameters, then what the optimizer keeps beside them."""
        for group in self.optimizer.param_groups:
            stored: dict[str, Any] = {}
            for parameter in group["params"]:
                name = self.names[parameter]
                key = join(self.place.key, name)
                data = self.to.object(f"{key}.@options")
                if data is MISSING:
                    self._known_slots(key, parameter)
                    continue
                _check_data(data, key)
                self._check_class(data, key)
                stored[name] = data["options"]
                self._state(key, group, parameter, data)
            self.attach.append(Options(self.place.key, stored).bind(group, self.to))
        self._shared()
        for act in self.attach:
            self.to.later_on(act)

    def _check_class(self, data: Any, key: str) -> None:
        """State of another optimizer is a mismatch, once, however many parameters have it."""
        kind = type(self.optimizer).__qualname__
        found = data.get("class", kind)  # early checkpoints do not say
        if self.to.strict and found != kind and found not in self.others:
            self.others[found] = key
            self.to.mismatch(
                f"{key}.@options", f"state of {kind}", f"state of {found}; strict=False loads it all the same"
            )

    def _known_slots(self, key: str, parameter: torch.Tensor) -> None:
        """Options are left out or missing: what can still be filled in place is."""
        for slot, item in self.optimizer.state.get(parameter, {}).items():
            if isinstance(item, torch.Tensor):
                self.to.tensor(f"{key}.{slot}", item)

    def _state(self, key: str, group: dict[str, Any], parameter: torch.Tensor, data: Any) -> None:
        """The slots of one parameter become those that are stored."""
        current = self.optimizer.state.get(parameter, {})
        new: dict[str, Any] = {}
        keep: set[str] = set()
        for slot in data["slots"]:
            name = f"{key}.{slot}"
            item = current.get(slot)
            found = self.to.catalogue.tensors.get(name)
            if isinstance(item, torch.Tensor):
                keep.add(slot)
                self.to.tensor(name, item)
            elif found is None:
                if self.to.selected(name):
                    self.to.binding.used.add(name)
                    self.to.binding.missing.append(name)
            elif self.to.selected(name):
                dtype, shape = torch_dtype(found[0]), tuple(found[1])
                new[slot] = _new_slot(parameter, group, slot, dtype, shape)
                self.to.fill(name, new[slot])
        values = {
            slot: self.to.rebuild(f"{key}.{slot}", value, partial(current.get, slot))
            for slot, value in data["values"].items()
            if self.to.selected(f"{key}.{slot}")
        }
        dropped = [
            slot
            for slot in current
            if slot not in keep
            and slot not in new
            and slot not in values
            and self.to.selected(f"{key}.{slot}")
        ]
        if new or values or dropped:
            self.attach.append(partial(self._attach, parameter, new, values, dropped))

    def _attach(
        self, parameter: torch.Tensor, new: dict[str, Any], values: dict[str, Any], dropped: list[str]
    ) -> None:
        state = dict(self.optimizer.state.get(parameter, {}))
        for slot in dropped:
            del state[slot]
        state.update(new)
        state.update({slot: value() for slot, value in values.items()})
        if state:
            self.optimizer.state[parameter] = state
        else:
            self.optimizer.state.pop(parameter, None)

    def _shared(self) -> None:
        key = join(self.place.key, "@shared")
        if key in self.to.catalogue.objects:
            data = self.to.object(key)
            if data is not MISSING:
                shared = {name: item for name, item in self.optimizer.state.items() if isinstance(name, str)}
                rebuilt = self.to.rebuild(key, data, lambda: shared)
                self.attach.append(lambda: self.optimizer.state.update(rebuilt()))


def _collect_shared(place: Place, optimizer: torch.optim.Optimizer, out: Collector) -> None:
    """State that belongs to no parameter, under names of the optimizer's own."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    shared = {name: item for name, item in optimizer.state.items() if name not in known}
    strange = [name for name in shared if not isinstance(name, str)]
    if strange:
        raise StructureError(
            f"{place.path} holds state of a {type(strange[0]).__name__} that is in none of its groups. "
            "Remove it from optimizer.state, or add the parameter to a group",
            key=place.key,
        )
    out.object(join(place.key, "@shared"), shared, place.path)


def _new_slot(
    parameter: torch.Tensor, group: dict[str, Any], slot: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Memory for a slot that the target has not made yet, where the target's group would have made it.

    As in torch's own `Optimizer.load_state_dict`, step counts lie on the CPU unless the group computes with
    them on the device, and all else lies where the parameter does.
    """
    if slot == "step" and not shape:
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty((), dtype=dtype, device=parameter.device if on_device else "cpu")
    if not shape and parameter.shape != ():
        return torch.empty((), dtype=dtype, device=parameter.device)
    return empty_like_layout(parameter, dtype, shape)


def _optimizer_of(value: Any, place: Place) -> torch.optim.Optimizer:
    """The optimizer, unless keeping its state by parameter would lose part of it."""
    if isinstance(value, OptimizerState):
        return value.optimizer
    assert isinstance(value, torch.optim.Optimizer)
    kind = type(value)
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        raise StructureError(
            f"{place.path}: {kind.__qualname__} has a state_dict of its own, so its state may be more than "
            "slots by parameter. If it is not, hand over shardproof.OptimizerState(optimizer, model)",
            key=place.key,
        )
    return value


def _names(value: Any, place: Place, visitor: Visitor) -> Names:
    if isinstance(value, OptimizerState):
        if value.names is not None:
            return Names.given(value.names, place)
        if value.modules:
            return Names.of_modules(value.optimizer, value.modules, place)
        return Names.of_tree(value.optimizer, visitor.modules, place)
    return Names.of_tree(value, visitor.modules, place)


def _check_slot(slot: Any, key: str) -> None:
    if not isinstance(slot, str) or slot.startswith("@"):
        raise StructureError(f"{key}: the state has a slot named {slot!r}, which makes no key", key=key)


def _check_data(data: Any, key: str) -> None:
    if not (isinstance(data, dict) and {"options", "slots", "values"} <= data.keys()) or not isinstance(
        data.get("class", ""), str
    ):
        raise StructureError(f"{key}.@options in the checkpoint is not what an optimizer stores", key=key)
