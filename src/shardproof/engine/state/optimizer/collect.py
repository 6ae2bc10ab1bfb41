"""Collects the state of optimizers by parameter name and slot, and the options by parameter.

For each parameter there are the tensors ``<key>.<parameter>.<slot>`` and one object
``<key>.<parameter>.@options``. The object has the optimizer's class, the options of the parameter's group,
the names of its slots, the slots that are not tensors, and the key of the optimizer. It has no groups or
positions, so a load may group or order parameters differently. Only a group without parameters has its
options under its number: ``<key>.@group-<number>``. A slot has the layout of its parameter.
`optimizer.state` does not change: a parameter without state has none after a save.

Note: hooks
    A save and a load read and write the slots themselves. At the end of a load, an optimizer with pre-hooks
    or an overridden ``load_state_dict`` gets its own state dict, whose tensors are its slots. Post-hooks run
    last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardproof.engine.state.binder import Binder
from shardproof.engine.state.collector import Collector, Hoister
from shardproof.engine.state.dtensor import is_dtensor, local_tensor
from shardproof.engine.state.flat_parameters import is_in_flat
from shardproof.engine.state.framework_modules import MEGATRON_FSDP, without_fabric
from shardproof.engine.state.handlers.module_hooks import is_foreign, method_of
from shardproof.engine.state.handlers.modules import flat_parts_of, named
from shardproof.engine.state.handlers.stateful_objects import refuse_divided
from shardproof.engine.state.model_parts import refuse_undeclared
from shardproof.engine.state.optimizer.bind import EXTRA, SHARED, OptimizerBinding
from shardproof.engine.state.optimizer.flat_slots import FlatSlots
from shardproof.engine.state.optimizer.parameter_groups import GroupOptions, Names
from shardproof.engine.state.optimizer.slot_sources import (
    HybridDeviceSlots,
    is_hybrid_device,
    is_zero_redundancy,
    receiver,
    slots_of,
)
from shardproof.engine.state.optimizer.slots import (
    EMPTY_GROUP,
    OPTIONS,
    LocalRange,
    ParameterSlots,
    SlotLayouts,
    SlotProvider,
)
from shardproof.engine.state.plain_encode import encode
from shardproof.engine.state.records import Stepped
from shardproof.engine.state.subclasses import inner_tensors
from shardproof.engine.state.visitor import Place, VisitedModule, Visitor, check_name, is_per_rank, join
from shardproof.errors import ShardproofError, StructureError


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
        _before_save(optimizer, place, only_slots=isinstance(value, OptimizerState))

        def collect() -> None:
            given = _given_modules(value, place, collector)
            _note_given_parameters(value, place, collector)
            source = _source(value, optimizer, given, place, collector)
            names = _names(value, source, given, place, collector)
            _refuse_own_parameters(optimizer, place, collector)
            _collect(place, optimizer, source, names, [*given, *collector.modules], collector)

        collector.later.append(collect)

    def bind(self, place: Place, value: Any, binder: Binder) -> None:
        """Fills existing slots in place, and creates others. Attaches them at the end of the load."""
        optimizer = _optimizer_of(value, place)

        def bind() -> None:
            given = _given_modules(value, place, binder)
            layouts = SlotLayouts.of([*given, *binder.modules], binder.modules)
            _note_given_parameters(value, place, binder)
            source: Any = _source(value, optimizer, given, place, binder)
            names = _names(value, source, given, place, binder)
            _refuse_own_parameters(optimizer, place, binder)
            OptimizerBinding(place, source, names, layouts, binder).bind()
            if source is not optimizer:
                binder.on_finish(source.apply)
            finish = _after_load(
                optimizer,
                place,
                only_slots=isinstance(value, OptimizerState),
                has_slots=source is optimizer
                and not (isinstance(optimizer, SlotProvider) or is_zero_redundancy(optimizer)),
            )
            if finish is not None and any(map(binder.selected, binder.keys_below(join(place.key, "")))):
                binder.on_finish(finish)

        binder.later.append(bind)


OPTIMIZER = _Optimizer()


def _collect(
    place: Place,
    optimizer: torch.optim.Optimizer,
    source: torch.optim.Optimizer | FlatSlots | HybridDeviceSlots,
    names: Names,
    modules: Iterable[VisitedModule],
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
    for number, group in enumerate(source.param_groups):
        if not group["params"]:
            collector.encoded(
                join(place.key, f"{EMPTY_GROUP}{number}"), GroupOptions.encode(group, place.key), place.path
            )
    stepper = getattr(optimizer, "stepper", optimizer) if isinstance(optimizer, SlotProvider) else optimizer
    collector.stepped.append(Stepped(stepper, tuple(stepped), tuple(map(local_tensor, stepped))))
    if source is optimizer:
        _collect_shared(place, optimizer, collector)


def _note_given_parameters(value: Any, place: Place, visitor: Visitor[Any]) -> None:
    """Notes the parameters that the program names for this optimizer, with the keys above their slots."""
    if not isinstance(value, OptimizerState) or value.names is None:
        return
    given = {join(place.key, name): parameter for name, parameter in value.names.items()}
    visitor.note_loose(given.items())
    layouts = SlotLayouts.of(visitor.modules, ())
    visitor.placed |= {key for key, item in given.items() if layouts.of_slots(item).declared is not None}


def _given_modules(value: Any, place: Place, visitor: Visitor[Any]) -> list[VisitedModule]:
    """The modules that the program names for this optimizer. The position of each of several is its key."""
    given = value.modules if isinstance(value, OptimizerState) else ()
    visited = []
    for index, item in enumerate(given):
        module = named(item, visitor)
        refuse_undeclared(module, place, visitor.parallel)
        key = str(index) if len(given) > 1 else ""
        visited.append(VisitedModule(key, module, {}, flat_parts_of(module, place.path, visitor)))
    return visited


def _source(
    value: Any,
    optimizer: torch.optim.Optimizer,
    given: Sequence[VisitedModule],
    place: Place,
    visitor: Visitor[Any],
) -> torch.optim.Optimizer | FlatSlots | HybridDeviceSlots:
    """Where the slots are described: the optimizer itself, or a description of its state by parameter."""
    is_hybrid = is_hybrid_device(optimizer)
    if not any(is_in_flat(item) for group in optimizer.param_groups for item in group["params"]):
        return HybridDeviceSlots(optimizer, receiver) if is_hybrid else optimizer
    if is_hybrid:
        raise StructureError(
            f"{place.path}: Megatron-Core's HybridDeviceOptimizer trains flat parameters of FSDP1, whose "
            "parts it cannot step. Use fully_shard (FSDP2) and shardproof.optim.HybridDeviceOptimizer",
            key=place.key,
        )
    if isinstance(value, OptimizerState) and value.names is not None:
        raise StructureError(
            f"{place.path} names the parameters of FullyShardedDataParallel (FSDP1), but a name does not say "
            "which part of a parameter this rank has. Use shardproof.OptimizerState(optimizer, module)",
            key=place.key,
        )
    parts = [part for owner in given or visitor.modules for part in owner.flat]
    return FlatSlots(optimizer, parts, place)


def _refuse_own_parameters(optimizer: torch.optim.Optimizer, place: Place, visitor: Visitor[Any]) -> None:
    """Raises for plain parameters whose values are each rank's own, while their slots have common keys.

    A save would store the slots of one rank. A DTensor and a declared layout describe the part of a rank.

    Raises:
        StructureError: the tree has a parameter of the optimizer only in `PerRank`, and not the optimizer.
    """
    own: dict[int, str] = {}
    common: set[int] = set()
    for owner in visitor.modules if visitor.world_size > 1 and not is_per_rank(place.key) else ():
        for name, parameter in owner.module.parameters():
            if not is_per_rank(owner.key) or is_dtensor(parameter) or owner.module.layout(name) is not None:
                common.add(id(parameter))
            else:
                own[id(parameter)] = join(owner.key, owner.module.clean(name))
    for group in optimizer.param_groups if own else ():
        for parameter in group["params"]:
            if id(parameter) in own and id(parameter) not in common:
                raise StructureError(
                    f"{place.path} trains {own[id(parameter)]}, which each rank keeps by itself, and a save "
                    "stores the state of this optimizer once for all ranks. Keep both in one value: "
                    "shardproof.PerRank({'model': ..., 'optimizer': ...})",
                    key=place.key,
                )


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


def _optimizer_of(value: Any, place: Place) -> Any:
    """The optimizer. Raises if it may have state besides slots, which a save would lose."""
    if isinstance(value, OptimizerState):
        refuse_divided(value.optimizer, place)
        return without_fabric(value.optimizer)
    value = without_fabric(value)
    assert isinstance(value, torch.optim.Optimizer)
    kind = type(value)
    describes_itself = isinstance(value, SlotProvider) or is_zero_redundancy(value)
    is_torch = describes_itself or kind.state_dict is torch.optim.Optimizer.state_dict
    if not is_torch or _overrides(value, "state_dict"):
        raise StructureError(
            f"{place.path}: {kind.__qualname__} overrides state_dict, so it may have more state than slots "
            "by parameter. If it has not, save shardproof.OptimizerState(optimizer, model)",
            key=place.key,
        )
    return value


def _names(
    value: Any, source: Any, given: Sequence[VisitedModule], place: Place, visitor: Visitor[Any]
) -> Names:
    if isinstance(value, OptimizerState) and value.names is not None:
        return Names.given(value.names, place)
    return Names.of_modules(given, place) if given else Names.of_tree(source, visitor.modules, place)


def _key_of(key: str, slot: Any) -> str:
    """The key of a slot of the parameter whose key is given."""
    if not isinstance(slot, str):
        raise StructureError(f"{key}: the slot name {slot!r} is not a string", key=key)
    if "@" in slot:
        check_name(slot, key, key)
    return f"{key}.{slot}"


class _OptionsObjects:
    """The ``@options`` objects of parameters. Parameters with equal objects share one."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._options: dict[int, Any] = {}
        """Encoded options of a group, by their id."""
        self._objects: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(
        self, slots: ParameterSlots, values: Mapping[str, Any], torch_name: str, name: str
    ) -> dict[str, Any]:
        """The object of one parameter.

        The caller must hold all `slots`, so that ids are unique. `torch_name` is the name in torch's state
        dicts, `name` that in the checkpoint.
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


def _overrides(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """True if the program replaced a method of torch's optimizers, on the class or on the object.

    A class that describes its slots itself replaces torch's state dict, and with it its own two methods.
    """
    own = method_of(optimizer, method)
    if own is getattr(torch.optim.Optimizer, method) or not is_foreign(own):
        return False
    classes = [vars(kind) for kind in (optimizer, *type(optimizer).__mro__)]
    first = next(names for names in classes if method in names or "receive_slots" in names)
    return "receive_slots" not in first


def _before_save(optimizer: torch.optim.Optimizer, place: Place, *, only_slots: bool) -> None:
    """Calls the pre-hooks of ``state_dict``.

    Raises:
        StructureError: the optimizer has post-hooks of ``state_dict``, whose changes a save would lose.
    """
    posts = filter(is_foreign, _hooks(optimizer, "_optimizer_state_dict_post_hooks"))
    if not only_slots and (hook := next(posts, None)) is not None:
        remedy = "If it adds no state, save shardproof.OptimizerState(optimizer, model)"
        if getattr(hook, "__module__", "").startswith(tuple(f"{package}." for package in MEGATRON_FSDP)):
            remedy = "Save shardproof.frameworks.megatron_fsdp.optimizer_state(optimizer, model)"
        raise StructureError(
            f"{place.path}: {type(optimizer).__qualname__} has the post-hook of state_dict {_name(hook)}, "
            f"whose changes would be lost. {remedy}",
            key=place.key,
        )
    for hook in filter(is_foreign, _hooks(optimizer, "_optimizer_state_dict_pre_hooks")):
        hook(optimizer)


def _after_load(
    optimizer: torch.optim.Optimizer, place: Place, *, only_slots: bool, has_slots: bool
) -> Callable[[], None] | None:
    """Returns the call for the end of a load; None if the optimizer has no hooks.

    Args:
        optimizer: the optimizer.
        place: its place.
        only_slots: as for `before_save`. The optimizer's own ``load_state_dict`` is then not called.
        has_slots: True if `optimizer.state` has the slots. Otherwise the optimizer has another way to receive
            them than ``load_state_dict``. It replaces the hooks that the module of its class registers.

    Raises:
        StructureError: a pre-hook needs a state dict that the load does not have.
    """
    kind = type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return None  # a `SlotProvider` of an adapter
    replaced = kind.__module__ if not has_slots else None
    has_slots = has_slots and method_of(optimizer, "state_dict") is torch.optim.Optimizer.state_dict
    is_torch = method_of(optimizer, "load_state_dict") is torch.optim.Optimizer.load_state_dict
    has_own = not only_slots and _overrides(optimizer, "load_state_dict")
    pres, posts = (
        [
            hook
            for hook in _hooks(optimizer, registry)
            if is_foreign(hook) and getattr(hook, "__module__", "") != replaced
        ]
        for registry in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    )
    pre = next(iter(pres), None)
    if (pre is not None or has_own) and not has_slots:
        what = "an own load_state_dict" if pre is None else f"the pre-hook of load_state_dict {_name(pre)}"
        raise StructureError(
            f"{place.path}: {kind.__qualname__} has {what}, which needs the optimizer's state dict. A load "
            "does not make one for this optimizer. Remove it, and change the state after the load",
            key=place.key,
        )
    if has_own or pre is not None:
        return lambda: _named(lambda: _load(optimizer, keeps_dtypes=is_torch), optimizer, place)
    if posts:
        return lambda: _named(lambda: [hook(optimizer) for hook in posts], optimizer, place)
    return None


def _load(optimizer: torch.optim.Optimizer, *, keeps_dtypes: bool) -> None:
    """Gives the optimizer its own state dict.

    torch casts slots to the dtype of their parameter. With `keeps_dtypes`, they keep that of the state dict.
    """
    seen: list[Any] = []
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state))
    try:
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        handle.remove()
    if not keeps_dtypes:
        return
    numbers = [number for group in seen[0]["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        slots = optimizer.state.get(parameter, {})
        for slot, item in seen[0]["state"].get(number, {}).items():
            if isinstance(item, torch.Tensor) and slots[slot].dtype != item.dtype:
                slots[slot] = item


def _named(call: Callable[[], Any], optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Calls a hook. Its error names the optimizer."""
    try:
        call()
    except ShardproofError:
        raise
    except Exception as error:
        raise StructureError(
            f"{place.path}: load_state_dict of {type(optimizer).__qualname__}, or a hook of it, raised "
            f"{type(error).__name__}: {error}",
            key=place.key,
        ) from error


def _hooks(optimizer: torch.optim.Optimizer, registry: str) -> list[Callable[..., Any]]:
    return list(getattr(optimizer, registry, {}).values())


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", repr(hook))
