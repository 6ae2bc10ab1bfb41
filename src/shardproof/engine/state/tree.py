"""Collects a state tree for a save, and binds a state tree for a load.

Each kind of value has one handler for both: containers, plain values and tensors here, other objects in
`handlers` and `optimizer`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from shardproof._utils.contexts import no_garbage_collection
from shardproof._utils.humanize import listed
from shardproof.engine.state.binder import MISSING, Binder, BindHandler
from shardproof.engine.state.collector import CollectHandler, Collector
from shardproof.engine.state.handlers.modules import MODULE
from shardproof.engine.state.handlers.per_rank import (
    GENERATOR,
    NUMPY_GENERATOR,
    NUMPY_RANDOM_STATE,
    PER_RANK,
    PYTHON_GENERATOR,
    PerRank,
    RandomState,
)
from shardproof.engine.state.handlers.stateful_objects import (
    PART,
    STATEFUL,
    has_state_tree,
    is_stateful,
    refuse_divided,
)
from shardproof.engine.state.last_walk import LastWalk
from shardproof.engine.state.local_shards import FlatShard, LocalShards, described
from shardproof.engine.state.model_parts import model_parallel, refuse_loose_parts
from shardproof.engine.state.optimizer.collect import OPTIMIZER, OptimizerState
from shardproof.engine.state.plain_decode import decode, references
from shardproof.engine.state.plain_encode import TEXT_KINDS
from shardproof.engine.state.records import Binding, Catalogue, Collected
from shardproof.engine.state.tensors import PLAIN_TYPES, array_dtype, tensor_of_array
from shardproof.engine.state.visitor import Place, check_name
from shardproof.errors import StructureError

_log = logging.getLogger("shardproof")


def collect(
    tree: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    ranks: Sequence[int] | None = None,
    last: LastWalk | None = None,
) -> Collected:
    """Collects this rank's part of a state tree. It does not communicate or change the tree.

    `collect` reads the addresses of tensors after it has walked the whole tree. An object that returns the
    same tensor several times, with different memory each time, must return separate tensors instead.

    Args:
        tree: nested dicts, lists and tuples of tensors, modules, optimizers, objects with state_dict and
            load_state_dict, or with state_tree, and plain values.
        rank: rank of this process, which is part of the keys of per-rank values.
        world_size: number of ranks.
        ranks: the numbers of these ranks in the default process group; None if they are all of its ranks, or
            not known.
        last: cache of the previous walk, over this tree or another. It is updated. None: the next walk finds
            nothing to reuse, and this one is faster.

    Returns:
        The tensors and objects of this rank, each sorted by key.

    Raises:
        StructureError, PlainDataError: a value cannot be stored. The message says where, and what to do.

    >>> import torch
    >>> collected = collect({"w": torch.ones(2), "epoch": 3})
    >>> [entry.key for entry in collected.tensors], collected.objects
    (['w'], (ObjectEntry(key='epoch', value=3),))
    """
    collector = Collector(handler_of, rank, world_size, model_parallel(world_size, ranks), last=last)
    with no_garbage_collection():
        _walk(collector.visit, tree)
        collector.finish_walk()
        if collector.parallel is not None:
            refuse_loose_parts(collector.loose.items(), collector.parallel, collector.placed)
        return collector.result()


def bind(
    tree: Any,
    catalogue: Catalogue,
    *,
    rank: int = 0,
    world_size: int = 1,
    ranks: Sequence[int] | None = None,
    selected: Callable[[str], bool] = lambda key: True,
    strict: bool = True,
) -> Binding:
    """Binds a state tree to a checkpoint. It does not change the tree: see `Binding`.

    `bind` reads the addresses of tensors after it has walked the whole tree, as `collect` does.

    Args:
        tree: the target, as for `collect`.
        catalogue: the contents of the checkpoint.
        rank: rank of this process.
        world_size: number of ranks that load.
        ranks: see `collect`.
        selected: returns True for each key to load.
        strict: True if options that differ between the parameters of one optimizer group are a mismatch.
            Otherwise the group's options do not change.

    Returns:
        The destinations, and the calls that complete the load.

    Raises:
        StructureError: the target has a value that cannot be loaded.

    >>> tree = {"epoch": 0}
    >>> binding = bind(tree, Catalogue({}, {}, {"epoch": 3}, 1))
    >>> for act in binding.finish: act()
    >>> tree
    {'epoch': 3}
    """
    binder = Binder(
        handler_of,
        rank,
        world_size,
        model_parallel(world_size, ranks),
        binding=Binding(catalogue),
        selected=selected,
        strict=strict,
    )
    with no_garbage_collection():
        _walk(binder.visit, tree)
        binder.finish_walk()
        if binder.parallel is not None:
            stored = binder.catalogue.tensors
            filled = (
                (key, item)
                for key, item in binder.loose.items()
                if selected(key) and (key in stored or binder.keys_below(f"{key}."))
            )
            refuse_loose_parts(filled, binder.parallel, binder.placed)
        return binder.result()


def _walk(visit: Callable[[Place, Any], None], tree: Any) -> None:
    if isinstance(tree, dict) and not tree:
        return  # an empty dict below the root is a plain value; the root has no key
    kind = type(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if kind is not torch.Tensor:
        raise StructureError(
            f"the active torch mode creates tensors of {kind.__module__}.{kind.__qualname__}, which have "
            "no bytes. Save and load outside the mode, such as FakeTensorMode"
        )
    if not isinstance(tree, (dict, list, tuple, torch.nn.Module, torch.optim.Optimizer, OptimizerState)):
        raise StructureError(
            f"a state tree is a dict (or a list, tuple, module or optimizer), not a {type(tree).__name__}: "
            'the value has no key. Use {"name": value}'
        )
    try:
        visit(Place("", "state"), tree)
    except RecursionError:
        raise StructureError("the state tree is nested too deeply, or contains itself") from None


class Handler(CollectHandler, BindHandler, Protocol):
    """Collects and binds one kind of value."""


class _Plain:
    """Handles values that a save stores as plain data, and a load replaces in their container."""

    def collect(self, place: Place, value: Any, collector: Collector) -> None:
        collector.object(place.key, value, place.path)

    def bind(self, place: Place, value: Any, binder: Binder) -> None:
        expected = "a plain value"
        if value is None:
            expected = "None"
        elif type(value) in (*_DICTS, *_LISTS) and not value:  # often a placeholder
            expected = f"an empty {type(value).__name__}"
        data = binder.object(place.key, expected)
        if data is not MISSING:
            put = binder.put_of(place)
            rebuilt = binder.rebuild(place.key, data, lambda: value)
            binder.on_finish(lambda: put(rebuilt()))


class _Tensor:
    """Handles tensors and DTensors."""

    def collect(self, place: Place, value: torch.Tensor, collector: Collector) -> None:
        collector.note_loose([(place.key, value)])
        collector.tensor(place.key, value, place.path)

    def bind(self, place: Place, value: torch.Tensor, binder: Binder) -> None:
        binder.note_loose([(place.key, value)])
        binder.tensor(place.key, value)


class _Array:
    """Handles numpy arrays of numbers as tensors, and arrays of texts as plain data."""

    def collect(self, place: Place, value: np.ndarray[Any, Any], collector: Collector) -> None:
        """Adds a tensor, which shares the array's memory if torch supports it."""
        if value.dtype.kind in TEXT_KINDS:
            _PLAIN.collect(place, value, collector)
            return
        tensor, _ = self._tensor(place, value)
        collector.note_loose([(place.key, tensor)])
        collector.tensor(place.key, tensor, place.path)

    def bind(self, place: Place, value: np.ndarray[Any, Any], binder: Binder) -> None:
        """Fills the array in place, through a copy if torch cannot share its memory."""
        if value.dtype.kind in TEXT_KINDS:
            _PLAIN.bind(place, value, binder)
            return
        if not binder.selected(place.key):
            return
        tensor, shared = self._tensor(place, value)
        binder.note_loose([(place.key, tensor)])
        if not value.flags.writeable:
            raise StructureError(f"{place.key}: the array is read-only. Load into a copy", key=place.key)
        if binder.tensor(place.key, tensor) and not shared:
            binder.on_finish(lambda: np.copyto(value, tensor.numpy()))

    @staticmethod
    def _tensor(place: Place, value: np.ndarray[Any, Any]) -> tuple[torch.Tensor, bool]:
        if array_dtype(value) is None:
            raise StructureError(
                f"{place.key}: arrays of dtype {value.dtype} cannot be stored", key=place.key
            )
        return tensor_of_array(value)


class _Explicit:
    """Collects and binds `LocalShards` and `FlatShard`."""

    def collect(self, place: Place, value: LocalShards | FlatShard, collector: Collector) -> None:
        collector.pieces(place.key, *described(value, place.key), origin=place.path)

    def bind(self, place: Place, value: LocalShards | FlatShard, binder: Binder) -> None:
        binder.pieces(place.key, *described(value, place.key))


class _Mapping:
    """Handles dicts: visits each item under its key."""

    def collect(self, place: Place, value: dict[Any, Any], collector: Collector) -> None:
        """Collects each item. Tensors skip the handler, because a dict may have many of them."""
        _check_names(value, place)
        prefix, path = f"{place.key}." if place.key else "", place.path
        for name, item in value.items():
            if name == "" and not place.key:
                raise StructureError(f"{path}[{name!r}]: the key is empty. Use a non-empty name")
            if isinstance(item, torch.Tensor):
                collector.tensor(f"{prefix}{name}", item, (path, name))
            else:
                collector.visit(place.at(name), item)
        tensors = (
            (f"{prefix}{name}", item) for name, item in value.items() if isinstance(item, torch.Tensor)
        )
        collector.note_loose(tensors)

    def bind(self, place: Place, value: dict[Any, Any], binder: Binder) -> None:
        """Binds each item. Tensors skip the handler. Plain data may be stored whole, as that of an object."""
        _check_names(value, place)
        if place.key in binder.catalogue.objects and self._bind_whole(place, value, binder):
            return
        if binder.rank == 0 and _is_optimizer_state_dict(value):
            _log.warning(
                "%s: it is the state_dict() of an optimizer. The load sets options such as lr in this dict, "
                "and not in the optimizer: call load_state_dict with the dict afterwards, or put the "
                "optimizer itself into the state",
                place.path,
            )
        prefix = f"{place.key}." if place.key else ""
        tensors = {name: item for name, item in value.items() if isinstance(item, torch.Tensor)}
        keys = [f"{prefix}{name}" for name in tensors]
        binder.note_loose(zip(keys, tensors.values(), strict=True))
        binder.tensors(keys, list(tensors.values()))
        if len(tensors) < len(value):
            for name, item in value.items():
                if not isinstance(item, torch.Tensor):
                    binder.visit(place.at(name, partial(value.__setitem__, name)), item)

    @staticmethod
    def _bind_whole(place: Place, value: dict[Any, Any], binder: Binder) -> bool:
        """Binds the dict to the plain value at its key. False if the items are bound instead."""
        if not binder.selected(place.key):
            return False
        names = None if _holds_state(value) else _stored_names(binder.catalogue.objects[place.key])
        if not binder.strict and names is None:
            return False
        data = binder.object(place.key)
        if names is None or (binder.strict and names != value.keys()):
            found = (
                "a plain value" if names is None else f"a plain value with the keys {listed(map(str, names))}"
            )
            advice = "If it is the state of an object, put the object itself into the target, or exclude it"
            expected = f"a dict with the keys {listed(map(str, value))}"
            binder.mismatch(place.key, expected, f"{found}. {advice}")
            binder.binding.used.update(key for key, _ in references(data))
            return True
        rebuilt = binder.rebuild(place.key, data)

        def fill() -> None:
            state = rebuilt()
            value.clear()
            value.update(state)

        binder.on_finish(fill)
        return True


class _List:
    """Handles lists with tensors or objects: visits each item under its index."""

    def collect(self, place: Place, value: Any, collector: Collector) -> None:
        for index, item in enumerate(value):
            collector.visit(place.at(index), item)

    def bind(self, place: Place, value: Any, binder: Binder) -> None:
        for index, item in enumerate(value):
            binder.visit(place.at(index, partial(value.__setitem__, index)), item)


class _Tuple(_List):
    """Handles tuples with tensors or objects, and named tuples. A load replaces the whole tuple."""

    def bind(self, place: Place, value: Any, binder: Binder) -> None:
        """Binds each item, then replaces the tuple in its container."""
        items = list(value)
        replaceable = place.put is not None
        for index, item in enumerate(value):
            binder.visit(place.at(index, partial(items.__setitem__, index) if replaceable else None), item)
        put = place.put
        if put is not None:

            def rebuild() -> None:
                if any(new is not old for new, old in zip(items, value, strict=True)):
                    put(value._make(items) if hasattr(value, "_make") else tuple(items))

            binder.on_finish(rebuild)


_PLAIN, _TENSOR, _ARRAY, _EXPLICIT = _Plain(), _Tensor(), _Array(), _Explicit()
_MAPPING, _LIST, _TUPLE = _Mapping(), _List(), _Tuple()

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_LISTS = (list, tuple, set, frozenset)
_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
_BY_TYPE: dict[type, Handler] = {
    **dict.fromkeys(_SCALARS, _PLAIN),
    **dict.fromkeys(PLAIN_TYPES, _TENSOR),
    np.ndarray: _ARRAY,
    np.memmap: _ARRAY,
    PerRank: PER_RANK,
    RandomState: PER_RANK,
    LocalShards: _EXPLICIT,
    FlatShard: _EXPLICIT,
    OptimizerState: OPTIMIZER,
    torch.Generator: GENERATOR,
    np.random.Generator: NUMPY_GENERATOR,
    np.random.RandomState: NUMPY_RANDOM_STATE,
    random.Random: PYTHON_GENERATOR,
}


def _is_optimizer_state_dict(value: dict[Any, Any]) -> bool:
    """True for a ``state_dict()`` of an optimizer of torch, whose groups have the positions of parameters."""
    groups = value.get("param_groups")
    if "state" not in value or not isinstance(groups, list) or not groups:
        return False
    members = [group.get("params") if isinstance(group, dict) else None for group in groups]
    return all(isinstance(item, list) and {*map(type, item)} <= {int} for item in members)


def handler_of(value: Any, place: Place) -> Handler:
    """The handler for this kind of value. The default is the handler of plain data, which may refuse it."""
    kind = type(value)
    handler = _BY_TYPE.get(kind)
    if handler is not None:
        return handler
    if kind in _DICTS:
        return _of_dict(value, place)
    if kind in _LISTS:
        return _of_list(value, place)
    if isinstance(value, torch.nn.Module):
        return MODULE
    if isinstance(value, torch.optim.Optimizer):
        return OPTIMIZER
    if isinstance(value, torch.Tensor):
        return _TENSOR
    if isinstance(value, np.ndarray):
        raise StructureError(f"{place.key}: {kind.__name__} cannot be stored; use a plain numpy.ndarray")
    if has_state_tree(value):
        return PART
    if isinstance(value, (list, tuple, dict, set)) and kind is not torch.Size:
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return _TUPLE
        if not is_stateful(value):
            base = next(base.__name__ for base in kind.__mro__ if base in (list, tuple, dict, set))
            raise StructureError(
                f"{place.key}: {kind.__module__}.{kind.__qualname__} is a subclass of {base}, whose other "
                f"state would be lost. Convert it to a plain {base}, or add state_dict and load_state_dict",
                key=place.key,
            )
    if is_stateful(value):
        refuse_divided(value, place)
        return STATEFUL
    return _PLAIN


def _stored_names(data: Any) -> set[Any] | None:
    """The keys of an encoded dict; None for other plain data.

    >>> _stored_names({"$dict": [[1, "a"]]}), _stored_names([1])
    ({1}, None)
    """
    if not isinstance(data, dict):
        return None
    tag = next(iter(data), "")
    if tag in ("$dict", "$ordered"):
        return {decode(name) for name, _ in data[tag]}
    return None if tag.startswith("$") else {*data}


def _check_names(value: dict[Any, Any], place: Place) -> None:
    for name in value:
        if type(name) is str and "@" in name:
            check_name(name, place.key, place.path)


def _of_dict(value: dict[Any, Any], place: Place) -> Handler:
    """The handler of a dict: plain data if it is empty, or if its keys are not all strings and integers."""
    if not value:
        return _PLAIN
    if all(type(name) is str or type(name) is int for name in value):
        # Only the items are stored. The target determines the type (defaultdict, Counter).
        return _MAPPING
    if _holds_state(value):
        names = [name for name in value if type(name) not in (str, int)]
        raise StructureError(
            f"{place.path} holds tensors or objects under the key {names[0]!r}. Use strings or integers as "
            "keys",
            key=place.key,
        )
    return _PLAIN


def _of_list(value: Any, place: Place) -> Handler:
    if not _holds_state(value):
        return _PLAIN
    if isinstance(value, (set, frozenset)):
        raise StructureError(
            f"{place.path} is a set of tensors or objects, which has no order. Use a list",
            key=place.key,
        )
    return _TUPLE if isinstance(value, tuple) else _LIST


def _holds_state(value: Any, depth: int = 0) -> bool:
    """True if a container has a value, at any depth, that is not plain data."""
    if depth > 200:
        raise StructureError("the state is nested deeper than 200 levels, or contains itself")
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for item in items:
        kind = type(item)
        if kind in _SCALARS:
            continue
        if kind in _DICTS or kind in _LISTS:
            if _holds_state(item, depth + 1):
                return True
        elif (
            kind in _BY_TYPE
            or isinstance(item, (torch.nn.Module, torch.Tensor, np.ndarray))
            or has_state_tree(item)
            or is_stateful(item)
            or (isinstance(item, tuple) and hasattr(item, "_make"))
        ):
            return True
    return False
