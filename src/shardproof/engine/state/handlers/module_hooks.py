"""The load hooks of modules: torch's ``load_state_dict`` on tensors that a load has already filled.

A load fills the memory of a module in place, so a module without load hooks needs no ``load_state_dict``. A
module with load hooks gets its state dict afterwards, with its own tensors as values. `LoadHooks.run` calls
the pre-hooks, the overridden ``_load_from_state_dict`` and the post-hooks in torch's order. It copies only
the values that they replace.

Some hooks *adapt* a state dict to the module: they rename keys, or give a buffer the stored shape. They need
stored values that have no place in the module. So the load reads such values, below a module with such
hooks, into new tensors, which ``_load_from_state_dict`` gets. They are whole tensors, so a module with
sharded parameters gets none of them.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys, _WrappedHook
from torch.nn.parameter import is_lazy

from shardproof.engine.state.dtensor import is_dtensor
from shardproof.engine.state.local_shards import FlatShard, LocalShards
from shardproof.engine.state.module_names import EXTRA_STATE, NamedModule
from shardproof.engine.state.visitor import Place
from shardproof.errors import KeyMismatchError, ShardproofError, StructureError

_OWN = ("torch.distributed.", "torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm", "shardproof.")
"""Modules of hooks that a load replaces. Wrappers of torch.distributed rename keys and shard tensors, which
the load does itself. Norms add a buffer that checkpoints of torch before 0.4.1 lack."""
_CHECKPOINTED = "_checkpoint_wrapped_module."
_LOAD = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_SAVE = ("_state_dict_pre_hooks", "_state_dict_hooks")


def is_foreign(function: Any, replaced: tuple[str, ...] = ()) -> bool:
    """True for a hook or method that a load must call: the program defines it.

    False for those of `_OWN`, and of modules whose names begin with one of `replaced`.
    """
    while isinstance(function, (_WrappedHook, partial)):
        function = function.hook if isinstance(function, _WrappedHook) else function.func
    return not str(getattr(function, "__module__", "")).startswith((*_OWN, *replaced))


def method_of(value: object, name: str) -> Any:
    """The function that a call of a method runs: the one that the program set on the object, or the class's.

    >>> linear = torch.nn.Linear(1, 1)
    >>> linear.load_state_dict = linear.load_state_dict
    >>> method_of(linear, "load_state_dict") is torch.nn.Module.load_state_dict
    True
    """
    own = vars(value).get(name)
    if own is None:
        return getattr(type(value), name)
    return own.__func__ if getattr(own, "__self__", None) is value else own


def _overrides(module: torch.nn.Module, method: str, replaced: tuple[str, ...] = ()) -> bool:
    own = method_of(module, method)
    return own is not getattr(torch.nn.Module, method) and is_foreign(own, replaced)


def _has_foreign(
    module: torch.nn.Module, registries: Collection[str], replaced: tuple[str, ...] = ()
) -> bool:
    hooks = (hook for registry in registries for hook in getattr(module, registry, {}).values())
    return any(is_foreign(hook, replaced) for hook in hooks)


def refuse_hooks(
    modules: Iterable[tuple[str, torch.nn.Module]],
    place: Place,
    *,
    load: bool,
    why: str,
    replaced: tuple[str, ...] = (),
) -> None:
    """Raises for the first module with hooks or overrides that this save or load cannot call.

    Args:
        modules: names and modules.
        place: the place of the outermost module.
        load: True for a load, False for a save.
        why: the reason, and what to do.
        replaced: beginnings of the names of Python modules whose hooks need no call.

    Raises:
        StructureError: with the name of the module.
    """
    registries, method = (_LOAD, "_load_from_state_dict") if load else (_SAVE, "_save_to_state_dict")
    for name, module in modules:
        if _has_foreign(module, registries, replaced) or _overrides(module, method, replaced):
            where = f"{place.path}, module {name!r}" if name else place.path
            kind = "load_state_dict" if load else "state_dict"
            raise StructureError(
                f"{where}: {type(module).__qualname__} has hooks of {kind}, or overrides {method}. {why}",
                key=place.key,
            )


@dataclass(frozen=True, slots=True)
class LoadHooks:
    """The load hooks of a module and of the modules in it."""

    module: torch.nn.Module
    path: str
    """Path of the module in the tree, for messages."""
    exist: bool
    """True if there are any."""
    adapting: frozenset[str]
    """Prefixes in the state dict of the modules, not sharded, whose hooks may adapt a state dict."""

    @staticmethod
    def none(module: torch.nn.Module, path: str) -> LoadHooks:
        """No load hooks."""
        return LoadHooks(module, path, False, frozenset())

    @staticmethod
    def of(module: NamedModule, path: str) -> LoadHooks:
        """The load hooks of a module at a path in the tree."""
        exist = _overrides(module.module, "load_state_dict")
        adapting: set[str] = set()
        for name, part in module.parts:
            if part._load_state_dict_pre_hooks or method_of(part, _LOAD_FROM.__name__) is not _LOAD_FROM:
                changes = _overrides(part, "_load_from_state_dict") or _has_foreign(part, _LOAD[:1])
                exist |= changes
                if changes and not module.layouts:
                    own = (*part.parameters(), *part.buffers())
                    if not any(map(is_dtensor, own)):
                        adapting.add(f"{name}.".replace(_CHECKPOINTED, "") if name else "")
            exist |= bool(part._load_state_dict_post_hooks) and _has_foreign(part, _LOAD[1:])
        return LoadHooks(module.module, path, exist, frozenset(adapting))

    def adapt(self, name: str) -> bool:
        """True if hooks may give the value of this name another shape or name."""
        if not self.adapting:
            return False
        segments = name.split(".")
        return any(
            "".join(f"{segment}." for segment in segments[:count]) in self.adapting
            for count in range(len(segments))
        )

    def run(self, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Gives the module a state dict, as torch's ``load_state_dict`` does.

        Returns the names of the missing and the unexpected keys, after all hooks.

        Args:
            state: the values that the load read, by name. Most are tensors of the module itself.
            metadata: the ``_metadata`` of the module's own state dict.

        Raises:
            StructureError: a hook raised, or a value does not fit. The message names the module.
        """
        if not _overrides(self.module, "load_state_dict"):
            return _Protocol(self.path, metadata).run(self.module, OrderedDict(state))
        return self._call(state, metadata)

    def give(self, state: Mapping[str, Any], needed: Collection[str], metadata: Mapping[str, Any]) -> None:
        """Calls the ``load_state_dict`` of a module that describes its shards, which the load has filled.

        The method of `torch.nn.Module` gets the other values, and a method of the class also the shards.

        Args:
            state: the values by name.
            needed: the names of those that are not memory of the module.
            metadata: as for `run`.

        Raises:
            KeyMismatchError: the module did not take a needed value, which would be lost.
            StructureError: the module raised. The message names it.
        """
        kind = type(self.module)
        if method_of(self.module, "load_state_dict") is torch.nn.Module.load_state_dict:
            shards = (LocalShards, FlatShard)
            state = {name: item for name, item in state.items() if not isinstance(item, shards)}
        lost = [name for name in self._call(state, metadata)[1] if name in needed]
        if lost:
            raise KeyMismatchError(
                f"{self.path}: load_state_dict of {kind.__qualname__} did not take {len(lost)} stored "
                f"values: {', '.join(lost[:20])}. Define it on the class, so that it takes what state_dict "
                "returns, or exclude these keys",
                missing=[],
                unexpected=lost,
                mismatched=[],
            )

    def _call(self, state: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        filled = OrderedDict(state)
        filled._metadata = metadata  # type: ignore[attr-defined]
        load: Callable[..., Any] = self.module.load_state_dict
        accepts = inspect.signature(load).parameters
        call = partial(load, filled, strict=False) if "strict" in accepts else partial(load, filled)
        result = _named(call, self.path, "", self.module)
        return (list(result[0]), list(result[1])) if isinstance(result, _IncompatibleKeys) else ([], [])


_LOAD_FROM = torch.nn.Module._load_from_state_dict


def _named(call: Callable[[], Any], path: str, name: str, module: torch.nn.Module) -> Any:
    """Calls a hook. Its error names the module."""
    try:
        return call()
    except ShardproofError:
        raise
    except Exception as error:
        where = f"{path}, module {name!r}" if name else path
        raise StructureError(
            f"{where}: a load hook of {type(module).__qualname__} raised {type(error).__name__}: {error}"
        ) from error


class _Protocol:
    """`torch.nn.Module.load_state_dict`, without the copies of tensors to themselves.

    Source: ``torch/nn/modules/module.py``.
    """

    def __init__(self, path: str, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []

    def run(self, root: torch.nn.Module, state: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Loads the state dict. Returns the missing and the unexpected keys."""
        self._load(root, state, "")
        if self.errors:
            raise StructureError(
                f"{self.path}: {type(root).__qualname__} cannot load its state:\n  "
                + "\n  ".join(self.errors)
            )
        return self.missing, self.unexpected

    def _load(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        name = prefix[:-1]
        is_torch = method_of(module, _LOAD_FROM.__name__) is _LOAD_FROM
        if module._load_state_dict_pre_hooks or not is_torch or not self._is_in_place(module, state, prefix):
            metadata = self.metadata.get(name, {})
            arguments = (state, prefix, metadata, True, self.missing, self.unexpected, self.errors)
            _named(partial(module._load_from_state_dict, *arguments), self.path, name, module)
        below: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            if key.startswith(prefix):
                below.setdefault(key[len(prefix) :].partition(".")[0], {})[key] = value
        for segment, child in module._modules.items():
            if child is not None:
                under = f"{prefix}{segment}."
                values = below.get(segment, {})
                self._load(child, {key: values[key] for key in values if key.startswith(under)}, under)
        keys = _IncompatibleKeys(self.missing, self.unexpected)
        for hook in list(module._load_state_dict_post_hooks.values()):
            result = _named(partial(hook, module, keys), self.path, name, module)
            if result is not None:
                raise StructureError(
                    f"{self.path}, module {name!r}: a post-hook of load_state_dict returned a value. It must "
                    "return None, and may change the lists of keys"
                )

    def _is_in_place(self, module: torch.nn.Module, state: Mapping[str, Any], prefix: str) -> bool:
        """True if each own value of the module is the tensor itself. Then notes the other keys."""
        own = {
            name: tensor
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and name not in module._non_persistent_buffers_set
        }
        missing = [f"{prefix}{name}" for name in own if f"{prefix}{name}" not in state]
        if any(state.get(f"{prefix}{name}", tensor) is not tensor for name, tensor in own.items()):
            return False
        self.missing += missing
        extra = prefix + EXTRA_STATE
        has_extra = type(module).set_extra_state is not torch.nn.Module.set_extra_state
        if has_extra and extra in state:
            _named(partial(module.set_extra_state, state[extra]), self.path, prefix[:-1], module)
        elif has_extra:
            self.missing.append(extra)
        for key in state:
            segment, _, rest = key[len(prefix) :].partition(".")
            is_own = segment in module._modules if rest else segment in own or (key == extra and has_extra)
            if not is_own:
                self.unexpected.append(key)
        return True


def is_uninitialized(item: Any) -> bool:
    """True for a parameter or buffer of a lazy module that has no shape yet."""
    return isinstance(item, torch.Tensor) and is_lazy(item)
