"""Binds an optimizer to the optimizer state of a checkpoint.

Note: masters
    Some optimizers have master weights and others do not. So a master may be filled without a stored one, and
    a stored one may be unused:

    - The target has a master, and none is stored. If the stored weight has the master's dtype (the saved run
      had no masters), it fills the master. Otherwise the optimizer copies the loaded parameter.
    - The target has no master, and one is stored. If the parameter has the master's dtype and the stored
      weight does not, the master fills the parameter, because the weight is the rounded master. Otherwise the
      master is unused. It is also unused if the load does not select the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from shardproof.engine.state.binder import MISSING, Binder
from shardproof.engine.state.dtensor import local_tensor
from shardproof.engine.state.optimizer.parameter_groups import GroupOptions, Names
from shardproof.engine.state.optimizer.slot_sources import receiver
from shardproof.engine.state.optimizer.slots import (
    EMPTY_GROUP,
    MASTER,
    OPTIONS,
    LocalRange,
    Receipt,
    Receiver,
    SlotLayout,
    SlotLayouts,
    SlotProvider,
    StoredSlot,
)
from shardproof.engine.state.optimizer.state_dict_keys import translate_state_dict
from shardproof.engine.state.subclass_binding import is_empty_shard, stored_wrapper
from shardproof.engine.state.tensors import empty_like_layout, local_of, torch_dtype
from shardproof.engine.state.visitor import Place, check_name, join
from shardproof.errors import StructureError

SHARED = "@shared"
"""Segment of the state in `optimizer.state` of a torch optimizer that belongs to no parameter."""
EXTRA = "@extra"
"""Segment of the state of a `SlotProvider` that belongs to no parameter. Other optimizers ignore it."""


@dataclass
class OptimizerBinding:
    """The binding of one optimizer."""

    place: Place
    optimizer: torch.optim.Optimizer
    names: Names
    layouts: SlotLayouts
    binder: Binder
    attach: list[Callable[[], Any]] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)
    """Classes of other optimizers for which there is a mismatch already."""
    provider: SlotProvider | None = field(init=False)
    """The optimizer if it is a `SlotProvider`."""

    def __post_init__(self) -> None:
        # Checked once, because `isinstance` is slow for a protocol.
        self.provider = self.optimizer if isinstance(self.optimizer, SlotProvider) else None

    @cached_property
    def receive(self) -> Receiver:
        """The optimizer's receiver of stored slots. Lazy, because some optimizers have none and raise."""
        return receiver(self.optimizer)

    @torch.inference_mode(False)
    def bind(self) -> None:
        """Binds all parameters, then the state that belongs to none. New tensors are no inference tensors."""
        self._translate()
        self.binder.binding.used.update(self.binder.keys_below(join(self.place.key, EMPTY_GROUP)))
        for number, group in enumerate(self.optimizer.param_groups):
            stored: dict[str, Any] = {}
            """Stored options, by the name of the parameter, or of a group that has none."""
            if not group["params"]:
                name = f"{EMPTY_GROUP}{number}"
                key = join(self.place.key, name)
                options = self.binder.catalogue.objects.get(key, MISSING)
                if options is not MISSING and self.binder.selected(key):
                    stored[name] = options
            for parameter in group["params"]:
                name = self.names[parameter]
                key = join(self.place.key, name)
                for slot in self.optimizer.state.get(parameter, ()) if self.provider is None else ():
                    if isinstance(slot, str) and "@" in slot:  # it looks like a reserved key
                        check_name(slot, key, key)
                data = self.binder.object(f"{key}.{OPTIONS}")
                if data is MISSING:
                    self._bind_existing_slots(key, parameter)
                    continue
                is_state = isinstance(data, dict) and {"options", "slots", "values"} <= data.keys()
                if not is_state or not isinstance(data.get("class", ""), str):
                    raise StructureError(
                        f"{key}.{OPTIONS} in the checkpoint is not the state of an optimizer", key=key
                    )
                stored[name] = data["options"]
                self._parameter(key, group, parameter, data)
            self.attach.append(GroupOptions(self.place.key, stored).bind(group, self.binder))
        self._bind_shared()
        for act in self.attach:
            self.binder.on_finish(act)

    def _translate(self) -> None:
        """Gives a stored state dict of a torch optimizer the keys of a live optimizer."""
        catalogue, key = self.binder.catalogue, self.place.key
        members = [group["params"] for group in self.optimizer.param_groups]
        names = (self.names[parameter] for group in members for parameter in group)
        if any(join(key, f"{name}.{OPTIONS}") in catalogue.objects for name in names):
            return
        groups = [[self.names.all_of(parameter) for parameter in group] for group in members]
        translated = translate_state_dict(catalogue, key, groups, self.binder.keys_below)
        if translated is not None:
            catalogue, stored_keys, missing = translated
            self.binder.translate(catalogue, stored_keys)
            self.binder.binding.missing += filter(self.binder.selected, missing)

    def _parameter(self, key: str, group: dict[str, Any], parameter: torch.Tensor, data: Any) -> None:
        """Binds the stored slots of one parameter."""
        layout = self.layouts.of_slots(parameter)
        stored, unselected = self._stored(key, layout, data)
        if MASTER in stored and not self._has_more_precision(parameter, stored[MASTER]):
            del stored[MASTER]
            self.binder.binding.used.add(f"{key}.{MASTER}")
        receipt = self.receive(parameter, group, stored)
        found = data.get("class", receipt.kind)  # early checkpoints do not store the class
        if self.binder.strict and found != receipt.kind and found not in self.reported:
            self.reported.add(found)
            expected, found = f"state of {receipt.kind}", f"state of {found}; strict=False loads it anyway"
            self.binder.mismatch(f"{key}.{OPTIONS}", expected, found)
        if self.provider is not None and unselected:
            raise StructureError(
                f"{key}: include and exclude leave out {', '.join(sorted(unselected))} of this parameter, "
                f"but not its other slots. {type(self.optimizer).__qualname__} needs all slots of a "
                "parameter or none",
                key=key,
            )
        filled = {
            slot
            for slot, destination in receipt.tensors.items()
            if self._fill(layout, f"{key}.{slot}", slot, destination, slot in stored)
        }
        if self.provider is None:  # the rank that owns the parameter uses the other slots
            for slot, like in stored.items():
                self.binder.binding.used.update(
                    [f"{key}.{slot}"] if like.wrapper is None else like.wrapper.keys
                )
        if MASTER in stored and MASTER not in receipt.tensors:
            self.binder.binding.used.add(f"{key}.{MASTER}")
            if parameter.dtype == stored[MASTER].dtype:
                # See "masters" above. The copy preserves padding, which the checkpoint does not store.
                local_of(parameter, key)
                exact = empty_like_layout(parameter, parameter.dtype)
                _copy(exact, parameter)
                if self._fill(layout, f"{key}.{MASTER}", MASTER, exact, True):
                    self.binder.on_finish(partial(_copy, parameter, exact))
        current: Mapping[str, Any] = (
            {} if self.provider is not None else self.optimizer.state.get(parameter, {})
        )
        values = {
            slot: self.binder.rebuild(f"{key}.{slot}", value, partial(current.get, slot))
            for slot, value in data["values"].items()
            if self.binder.selected(f"{key}.{slot}")
        }
        unchanged = {slot for slot in current if not self.binder.selected(f"{key}.{slot}")}
        self.attach.append(partial(_attach, receipt, values, frozenset(filled | unchanged)))

    def _stored(self, key: str, layout: SlotLayout, data: Any) -> tuple[dict[str, StoredSlot], set[str]]:
        """The stored and selected slots, and the names of those that are not selected."""
        stored: dict[str, StoredSlot] = {}
        unselected = set()
        for slot in data["slots"]:
            name = f"{key}.{slot}"
            found = self.binder.catalogue.tensors.get(name)
            if not self.binder.selected(name):
                unselected.add(slot)
            elif (wrapper := stored_wrapper(name, self.binder.catalogue)) is not None:
                stored[slot] = StoredSlot(wrapper.dtype, tuple(local_tensor(layout.parameter).shape), wrapper)
            elif found is None:
                self.binder.binding.used.add(name)
                self.binder.binding.missing.append(name)
            else:
                stored[slot] = layout.stored(torch_dtype(found[0]), tuple(found[1]), name)
        return stored, unselected

    def _fill(
        self,
        layout: SlotLayout,
        key: str,
        slot: str,
        destination: torch.Tensor | LocalRange,
        is_stored: bool,
    ) -> bool:
        """Adds a destination for a slot. The stored weight fills a master that is not stored."""
        if not is_stored:
            weight = self.layouts.weights.get(id(layout.parameter), "")
            found = self.binder.catalogue.tensors.get(weight)
            dtype = destination.buffer.dtype if isinstance(destination, LocalRange) else destination.dtype
            if slot != MASTER or found is None or torch_dtype(found[0]) != dtype:
                return False
            key = weight
        if not isinstance(destination, LocalRange) and is_empty_shard(
            key, destination, self.binder.catalogue
        ):
            return True
        local_shards = layout.sharded(destination, key)
        if local_shards is not None:
            return self.binder.local_shards(key, local_shards)
        assert isinstance(destination, torch.Tensor)
        return self.binder.tensor(key, destination)

    def _has_more_precision(self, parameter: torch.Tensor, master: StoredSlot) -> bool:
        """True if the stored master has more precision than the stored weight, and the weight is selected."""
        if parameter.dtype != master.dtype:
            return True
        weight = self.layouts.weights.get(id(parameter), "")
        found = self.binder.catalogue.tensors.get(weight)
        return found is not None and self.binder.selected(weight) and torch_dtype(found[0]) != master.dtype

    def _bind_existing_slots(self, key: str, parameter: torch.Tensor) -> None:
        """Binds existing slots in place if the options are missing or not selected."""
        if self.provider is not None:
            return
        layout = self.layouts.of_slots(parameter)
        for slot, item in self.optimizer.state.get(parameter, {}).items():
            if isinstance(item, torch.Tensor):
                self._fill(layout, f"{key}.{slot}", slot, item, True)

    def _bind_shared(self) -> None:
        extra, shared = join(self.place.key, EXTRA), join(self.place.key, SHARED)
        if extra in self.binder.catalogue.objects:
            data = self.binder.object(extra)
            if data is not MISSING and self.provider is not None:
                rebuilt = self.binder.rebuild(extra, data)
                provider = self.provider
                self.attach.append(lambda: provider.receive_shared(rebuilt()))
        if shared in self.binder.catalogue.objects and self.provider is None:
            data = self.binder.object(shared)
            if data is not MISSING:
                state = self.optimizer.state
                present = {name: item for name, item in state.items() if isinstance(name, str)}
                filled = self.binder.rebuild(shared, data, lambda: present)
                self.attach.append(lambda: state.update(filled()))


def _attach(receipt: Receipt, values: Mapping[str, Callable[[], Any]], filled: frozenset[str]) -> None:
    receipt.attach({slot: value() for slot, value in values.items()}, filled)


@torch.no_grad()
def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    local_tensor(destination).copy_(local_tensor(source))
