"""Modules: parameters, persistent buffers and extra state, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardproof.engine.state.binder import MISSING, Binder
from shardproof.engine.state.collector import Collector
from shardproof.engine.state.dtensor import local_tensor
from shardproof.engine.state.flat_parameters import FlatPart, flat_parts, flat_state, is_flat
from shardproof.engine.state.framework_modules import refuse_collective, without_fabric
from shardproof.engine.state.handlers.module_hooks import LoadHooks, is_uninitialized, method_of, refuse_hooks
from shardproof.engine.state.layout import Layout, local_layout
from shardproof.engine.state.local_shards import FlatShard, LocalShards
from shardproof.engine.state.model_parts import refuse_undeclared
from shardproof.engine.state.module_names import EXTRA_STATE, PARALLEL, NamedModule, inside
from shardproof.engine.state.plain_decode import references
from shardproof.engine.state.subclasses import is_wrapper
from shardproof.engine.state.tensors import (
    check_memory,
    declare_fsdp2_owners,
    empty_like_layout,
    local_of,
    storage_of,
    torch_dtype,
)
from shardproof.engine.state.visitor import Place, VisitedModule, Visitor, check_name, join
from shardproof.errors import KeyMismatchError, StructureError


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
            elif is_uninitialized(item):
                raise StructureError(
                    f"{key} is not initialized, so it has no shape. Run a forward pass of the module first",
                    key=key,
                )
            else:
                collector.tensor(key, item, (place.path, name))
        declare_fsdp2_owners(part for _, part in module.parts)
        collector.modules.append(_visited(place, module, state, collector))

    def bind(self, place: Place, value: torch.nn.Module, binder: Binder) -> None:
        """Fills tensors in place. Load hooks, and values that the state dict computes, follow at the end."""
        module, state = _state_of(value, place, binder, load=True)
        hooks = None if is_flat(module) else _hooks_of(module, place, state)
        _Filling(module, place, state, binder, hooks).bind()
        loaded = getattr(type(module.module), "state_loaded", None)
        if callable(loaded):
            binder.on_finish(partial(loaded, module.module))
        binder.modules.append(_visited(place, module, state, binder))


class _Filling:
    """The destinations of one module, and its state dict at the end of the load.

    FSDP1 has no `hooks`, because its state dict is a collective.
    """

    def __init__(
        self,
        module: NamedModule,
        place: Place,
        state: Mapping[str, Any],
        binder: Binder,
        hooks: LoadHooks | None,
    ) -> None:
        self.module = module
        self.place = place
        self.state = state
        self.binder = binder
        self.hooks = hooks
        self.is_live = _live_memory_of(module.module)
        self.computed: dict[str, Callable[[], Any]] = {}
        """Name to the value at the end, for values that are not memory of the module."""
        self.is_selected = False
        """True if the load selects a value of the module."""
        self.keys: dict[str, str] = {}
        """Key by name, of the values of the state dict."""
        self.adapted: dict[str, str] = {}
        """Key by name, of the stored values that only the hooks get."""
        self.filled: set[int] = set()
        """Ids of the tensors of the module that the load fills."""
        self.absent: set[str] = set()
        """Names of the values that the checkpoint lacks, and that hooks may supply."""

    def bind(self) -> None:
        """Binds the values of the state dict."""
        for name, item in self.state.items():
            key = self.keys[name] = _key_of_tensor(self.module, name, self.place)
            if self.binder.selected(key):
                self.is_selected = True
                if not self._leave_to_hooks(name, key, item):
                    self._bind(name, key, item)
        if self.hooks is not None and self.hooks.adapting:
            self._read_stored_only()
            # A tied tensor needs one of its keys only.
            self.absent = {name for name in self.absent if id(self.state[name]) not in self.filled}
            if not self.binder.strict:
                self.binder.binding.missing += [self.keys[name] for name in self.absent]
        if self.computed or (self.hooks is not None and self.hooks.exist and self.is_selected):
            self.binder.on_finish(self._finish)

    def _bind(self, name: str, key: str, item: Any) -> None:
        module, binder = self.module, self.binder
        if isinstance(item, (LocalShards, FlatShard)):
            binder.local_shards(key, *_own_shards_of(item, module.layout(name), key))
        elif not isinstance(item, torch.Tensor) or _is_extra(name):
            data = binder.object(key)
            if data is not MISSING:
                self.computed[name] = binder.rebuild(key, data, partial(_same, item))
        elif (layout := module.layout(name)) is not None:
            local_of(item, key)
            # The checkpoint does not store padding, so a copy preserves it.
            target = item if self.is_live(item) else item.detach().clone()
            if binder.local_shards(key, *_local_shards_of(target, layout, key)) and target is not item:
                self.computed[name] = partial(_same, target)
        elif self.is_live(item) or item.is_meta:
            binder.tensor(key, item)  # raises for a meta tensor, which has no memory
            self.filled.add(id(item))
        else:
            fresh = empty_like_layout(item, item.dtype)
            if binder.tensor(key, fresh):
                self.computed[name] = partial(_same, fresh)

    def _leave_to_hooks(self, name: str, key: str, item: Any) -> bool:
        """True if a load hook gets the stored value, or supplies one that is not stored."""
        found = self.binder.catalogue.tensors.get(key)
        if is_uninitialized(item):
            if found is None:
                raise StructureError(
                    f"{key} is not initialized, so it has no shape, and the checkpoint does not have it. Run "
                    "a forward pass of the module before the load, or exclude the key",
                    key=key,
                )
        elif self.hooks is None or not self.hooks.adapt(name):
            return False
        elif found is None:
            is_absent = key not in self.binder.catalogue.objects
            if is_absent:
                self.absent.add(name)
            return is_absent
        elif not isinstance(item, torch.Tensor) or is_wrapper(item) or tuple(found[1]) == tuple(item.shape):
            return False
        self.computed[name] = partial(_same, self.binder.fresh(key, item.dtype, tuple(found[1]), None))
        return True

    def _read_stored_only(self) -> None:
        """Reads the stored values that the module lacks, below modules whose hooks may adapt them."""
        assert self.hooks is not None
        binder, known = self.binder, set(self.keys.values())
        tensors, objects = binder.catalogue.tensors, binder.catalogue.objects
        for prefix in self.hooks.adapting:
            above = _key_of_tensor(self.module, f"{prefix}_", self.place).removesuffix("_")
            keys = binder.keys_below(above)
            known |= {one for key in keys if key in objects for one, _ in references(objects[key])}
            for key in keys:
                if key in known or "@" in key or not binder.selected(key):
                    continue
                known.add(key)
                binder.binding.adapted.add(key)
                name = prefix + key.removeprefix(above)
                self.adapted[name] = key
                if key in tensors:
                    dtype, shape = tensors[key]
                    fresh = binder.fresh(key, torch_dtype(dtype), tuple(shape), None)
                    self.computed[name] = partial(_same, fresh)
                else:
                    self.computed[name] = binder.rebuild(key, binder.object(key))

    def _finish(self) -> None:
        """Gives the module the values that are not in its memory yet, and calls its load hooks."""
        computed = {name: value() for name, value in self.computed.items()}
        if self.hooks is None:
            for name, value in computed.items():
                inside(self.module.module.get_submodule(name.rpartition(".")[0])).set_extra_state(value)
            return
        absent = set(self.binder.binding.missing)
        memory = (torch.Tensor, LocalShards, FlatShard)
        state = {
            name: item
            for name, item in self.state.items()
            if name not in self.absent
            and self.keys[name] not in absent
            and (isinstance(item, memory) or self.binder.selected(self.keys[name]))
        }
        metadata = getattr(self.state, "_metadata", {})
        if _describes_itself(self.state):
            self.hooks.give({**state, **computed}, computed, metadata)
            return
        unknown = {} if self.binder.strict else self._unexpected()
        missing, unexpected = self.hooks.run({**unknown, **state, **computed}, metadata)
        if self.binder.strict:
            self._check_loaded(missing, [name for name in unexpected if name in computed])

    def _unexpected(self) -> dict[str, Any]:
        """Stored tensors that the load does not read, without memory, for hooks that list unexpected keys."""
        above, binder = join(self.place.key, ""), self.binder
        return {
            key.removeprefix(above): torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
            for key in binder.keys_below(above)
            if key not in binder.binding.used and "@" not in key and binder.selected(key)
            for dtype, shape in [binder.catalogue.tensors.get(key, ("uint8", ()))]
        }

    def _check_loaded(self, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Raises if values are neither stored nor supplied by hooks, or stored and not used.

        A stored value that the module lacks may belong to another rank, such as one of another pipeline
        stage. So the ranks compare those that all hooks left unused.
        """
        tensors = dict(self.module.tensors()) if missing else {}
        missing = [
            name
            for name in missing
            if name in self.absent or (name in tensors and id(tensors[name]) not in self.filled)
        ]
        if not missing and all(name in self.adapted for name in unexpected):
            self.binder.binding.leftover.update(self.adapted[name] for name in unexpected)
        else:
            lines = [f"{self.place.path}: the state dict does not fit the module after its load hooks."]
            for title, names in (("missing", missing), ("unexpected", unexpected)):
                if names:
                    lines.append(f"  {title} ({len(names)}): {', '.join(names[:20])}")
            lines.append("strict=False ignores these keys.")
            raise KeyMismatchError(
                "\n".join(lines), missing=list(missing), unexpected=list(unexpected), mismatched=[]
            )


def _describes_itself(state: Mapping[str, Any]) -> bool:
    """True for the state dict of a module that describes its shards."""
    return any(isinstance(item, (LocalShards, FlatShard)) for item in state.values())


def _hooks_of(module: NamedModule, place: Place, state: Mapping[str, Any]) -> LoadHooks:
    """The load hooks of a module. A module that describes its shards itself has ``state_loaded`` instead."""
    if _describes_itself(state):
        refuse_hooks(
            module.parts,
            place,
            load=True,
            why="Its state_dict returns shards, which hooks cannot load. Define state_loaded() on its class",
            replaced=getattr(type(module.module), "replaced_hooks", ()),
        )
        return LoadHooks.none(module.module, place.path)
    return LoadHooks.of(module, place.path)


MODULE = _Module()


def _unwrapped(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The wrappers of data parallelism, compilation and Fabric, in any order, and the module inside."""
    modules = [without_fabric(module)]
    while True:
        module = modules[-1]
        if isinstance(module, PARALLEL):
            inner = module.module
        elif "_orig_mod" in module._modules:
            inner = module.get_submodule("_orig_mod")
        else:
            return modules
        modules.append(without_fabric(inner))


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
    inner = _unwrapped(module)[-1]
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
    refuse_collective(module, place)
    refuse_undeclared(module, place, visitor.parallel)
    refuse_hooks(
        [("", wrapper) for wrapper in _unwrapped(value)[:-1]],
        place,
        load=load,
        why="Keys have no wrappers, and their hooks are not called. Register them on the module inside",
    )
    if is_flat(module):
        refuse_hooks(
            module.parts,
            place,
            load=load,
            why="FSDP1 gathers the parameters for them, and a save or load gathers nothing. Shard the model "
            "with fully_shard; or remove the hooks, and call them yourself",
        )
    if parts := flat_parts_of(module, place.path, visitor, load=load):
        return module, flat_state(module, parts)
    if method_of(module.module, "state_dict") is torch.nn.Module.state_dict:
        return module, module.module.state_dict(keep_vars=True)
    return module, module.module.state_dict()  # an overridden state_dict may take no arguments


def _visited(
    place: Place, module: NamedModule, state: Mapping[str, Any], visitor: Visitor[Any]
) -> VisitedModule:
    """The module for optimizers."""
    return VisitedModule(place.key, module, state, flat_parts_of(module, place.path, visitor))


def _live_memory_of(module: torch.nn.Module) -> Callable[[torch.Tensor], bool]:
    """Returns a predicate: True if a tensor of the state dict is memory of the module."""
    live = [item for item in (*module.parameters(), *module.buffers()) if not is_uninitialized(item)]
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
