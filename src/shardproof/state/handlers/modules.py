"""Modules: parameters, persistent buffers and extra state, by name."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.state.binder import MISSING, Binder
from shardproof.state.collector import Collector
from shardproof.state.dtensor import local_tensor
from shardproof.state.fabric_wrappers import without_fabric
from shardproof.state.flat_parameters import FlatPart, flat_parts, flat_state, is_flat
from shardproof.state.layout import Layout, local_layout
from shardproof.state.local_shards import FlatShard, LocalShards
from shardproof.state.module_names import EXTRA_STATE, PARALLEL, NamedModule, inside
from shardproof.state.storage_owner import declare_fsdp2_owners
from shardproof.state.tensors import check_memory, empty_like_layout, local_of, storage_of
from shardproof.state.visitor import Place, VisitedModule, Visitor, check_name

__all__ = ["MODULE", "flat_parts_of", "named"]


class _Module:
    """Handles `torch.nn.Module`.

    A module whose own `state_dict` returns `LocalShards` or `FlatShard` describes its sharding itself. A load
    fills their memory, and then calls the module's ``state_loaded()``, if its type has this method.
    """

    def collect(self, place: Place, value: torch.nn.Module, collector: Collector) -> None:
        """Adds each tensor under its name, and extra state as an object."""
        module, state = _state_of(value, place, collector)
        for name, item in state.items():
            key = _key_of_tensor(module, name, place)
            if isinstance(item, (LocalShards, FlatShard)):
                described, anchor = _own_shards_of(item, module.layout(name), key)
                collector.local_shards(key, described, (place.path, name), anchor)
            elif not isinstance(item, torch.Tensor) or _is_extra(name):
                collector.object(key, item, (place.path, name))
            elif (layout := module.layout(name)) is not None:
                sharded, local = _local_shards_of(item, layout, key)
                collector.local_shards(key, sharded, (place.path, name), local)
            else:
                collector.tensor(key, item, (place.path, name))
        declare_fsdp2_owners(part for _, part in module.parts)
        collector.modules.append(_visited(place, module, state, collector))

    def bind(self, place: Place, value: torch.nn.Module, binder: Binder) -> None:
        """Fills tensors in place. Values that the state dict computes go through `load_state_dict`."""
        module, state = _state_of(value, place, binder, load=True)
        is_live = _live_memory_of(module.module)
        computed: dict[str, Callable[[], Any]] = {}
        for name, item in state.items():
            key = _key_of_tensor(module, name, place)
            if _is_extra(name):
                self._bind_extra(module.module, name, key, item, binder)
            elif isinstance(item, (LocalShards, FlatShard)):
                binder.local_shards(key, *_own_shards_of(item, module.layout(name), key))
            elif not isinstance(item, torch.Tensor):
                data = binder.object(key)
                if data is not MISSING:
                    computed[name] = binder.rebuild(key, data, partial(_same, item))
            elif (layout := module.layout(name)) is not None:
                local_of(item, key)
                # The checkpoint does not store padding, so a copy preserves it.
                target = item if is_live(item) else item.detach().clone()
                if binder.local_shards(key, *_local_shards_of(target, layout, key)) and target is not item:
                    computed[name] = partial(_same, target)
            elif is_live(item) or item.is_meta:
                binder.tensor(key, item)  # raises for a meta tensor, which has no memory
            else:
                fresh = empty_like_layout(item, item.dtype)
                if binder.tensor(key, fresh):
                    computed[name] = partial(_same, fresh)
        if computed:
            binder.on_finish(lambda: _load(module.module, state, computed))
        loaded = getattr(type(module.module), "state_loaded", None)
        if callable(loaded):
            binder.on_finish(partial(loaded, module.module))
        binder.modules.append(_visited(place, module, state, binder))

    @staticmethod
    def _bind_extra(module: torch.nn.Module, name: str, key: str, current: Any, binder: Binder) -> None:
        data = binder.object(key)
        if data is not MISSING:
            owner = inside(module.get_submodule(name.rpartition(".")[0]))
            rebuilt = binder.rebuild(key, data, lambda: current)
            binder.on_finish(lambda: owner.set_extra_state(rebuilt()))


MODULE = _Module()


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers of data parallelism, compilation and Fabric, in any order."""
    while True:
        module = without_fabric(module)
        if isinstance(module, PARALLEL):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        else:
            return module


def _same(value: Any) -> Any:
    return value


def _key_of_tensor(module: NamedModule, name: str, place: Place) -> str:
    """The key of a value in the state dict of the module at a place."""
    clean = module.clean(name)
    if "@" in clean:
        check_name(clean, place.key, place.path)
    return f"{place.key}.{clean}" if place.key else clean


def _is_extra(name: str) -> bool:
    return name == EXTRA_STATE or name.endswith(f".{EXTRA_STATE}")


def named(module: torch.nn.Module, visitor: Visitor[Any]) -> NamedModule:
    """The module inside wrappers, with its names. Each walk computes the names once."""
    inner = _unwrapped(module)
    if id(inner) not in visitor.named:
        visitor.named[id(inner)] = NamedModule(inner)
    return visitor.named[id(inner)]


def flat_parts_of(
    module: NamedModule, path: str, visitor: Visitor[Any], *, load: bool = False
) -> list[FlatPart]:
    """The parameters of FSDP1 in a module, none for other modules. Each walk computes them once.

    Raises:
        StructureError: see `flat_parts`.
    """
    known = id(module.module)
    if known not in visitor.flat:
        visitor.flat[known] = flat_parts(module, path, load=load) if is_flat(module) else []
    return visitor.flat[known]


def _state_of(
    value: torch.nn.Module, place: Place, visitor: Visitor[Any], *, load: bool = False
) -> tuple[NamedModule, Mapping[str, Any]]:
    module = named(value, visitor)
    _refuse_collective(module, place)
    if parts := flat_parts_of(module, place.path, visitor, load=load):
        return module, flat_state(module, parts)
    if type(module.module).state_dict is torch.nn.Module.state_dict:
        return module, module.module.state_dict(keep_vars=True)
    return module, module.module.state_dict()  # an overridden state_dict may take no arguments


def _refuse_collective(module: NamedModule, place: Place) -> None:
    """Raises for a module whose state_dict is a collective: collecting must not communicate."""
    kind = getattr(sys.modules.get("megatron_fsdp.megatron_fsdp"), "MegatronFSDP", None)
    if kind is not None and any(isinstance(part, kind) for _, part in module.parts):
        raise StructureError(
            f"{place.path} holds MegatronFSDP, whose state_dict is a collective. Save "
            "shardproof.frameworks.megatron_fsdp.module_state(model) instead",
            key=place.key,
        )


def _visited(
    place: Place, module: NamedModule, state: Mapping[str, Any], visitor: Visitor[Any]
) -> VisitedModule:
    """The module for optimizers."""
    return VisitedModule(place.key, module, state, flat_parts_of(module, place.path, visitor))


def _live_memory_of(module: torch.nn.Module) -> Callable[[torch.Tensor], bool]:
    """Returns a predicate: True if a tensor of the state dict is memory of the module."""
    live = [*module.parameters(), *module.buffers()]
    objects = set(map(id, live))
    storages: set[int] = set()

    def is_live(tensor: torch.Tensor) -> bool:
        if id(tensor) in objects:
            return True
        if not storages:
            storages.update(storage_of(local_tensor(item)) for item in live if not item.is_meta)
        return not tensor.is_meta and storage_of(local_tensor(tensor)) in storages

    return is_live


def _local_shards_of(tensor: torch.Tensor, layout: Layout, key: str) -> tuple[LocalShards, torch.Tensor]:
    """The pieces of a tensor with a declared layout, and its local tensor."""
    local = local_of(tensor, key)
    return local_layout(tensor, layout, key).pieces(local), local


def _own_shards_of(
    shards: LocalShards | FlatShard, layout: Layout | None, key: str
) -> tuple[LocalShards, torch.Tensor | None]:
    """The pieces that a module describes itself, and the memory that identifies a tied tensor without any."""
    if isinstance(shards, LocalShards):
        return shards, None
    check_memory(shards.buffer, key)
    if layout is None:
        return shards.sharded(), shards.buffer
    return layout.range(shards.buffer, shards.start, shards.stop), shards.buffer


def _load(
    module: torch.nn.Module, state: Mapping[str, Any], computed: Mapping[str, Callable[[], Any]]
) -> None:
    filled = OrderedDict(state)
    filled.update({name: value() for name, value in computed.items()})
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        filled._metadata = metadata  # type: ignore[attr-defined]
    module.load_state_dict(filled)
