"""The state of an object that a checkpoint stores under keys below that of the object.

``torch.distributed.checkpoint`` and a save of an object's ``state_dict()`` store a state dict so. The present
state of the object tells how the keys are nested: which are keys with dots, integers or positions in a list.
For other keys, the recorded paths tell (`Catalogue.paths`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardproof.engine.state.binder import MISSING, Binder
from shardproof.engine.state.tensors import torch_dtype
from shardproof.engine.state.visitor import join

_Build = Callable[[], Any]


class UndeterminedError(Exception):
    """Neither the present state nor a recorded path tells how a key is nested."""


@dataclass
class _Leaf:
    """A stored value of the state."""

    key: str
    like: Any
    """The present value; MISSING if there is none."""
    build: _Build = dict
    """Returns the stored value, once it is read."""


class NestedState:
    """The state of one object.

    Args:
        key: key of the object.
        present: the present state. Values that the checkpoint lacks stay as they are in it.
        binder: the walk of the load.

    Raises:
        UndeterminedError: the nesting of a key is not known. The binder is unchanged.
    """

    def __init__(self, key: str, present: Mapping[Any, Any], binder: Binder) -> None:
        self._binder = binder
        self._leaves: list[_Leaf] = []
        self._missing: list[str] = []
        self._paths = binder.catalogue.paths()
        self._build = self._part(key, present)

    def bind(self) -> _Build:
        """Requests the values. Returns a function that builds the state, after all tensors are read."""
        for leaf in self._leaves:
            leaf.build = self._bound(leaf)
        self._binder.binding.used.update(self._missing)
        self._binder.binding.missing += self._missing
        return self._build

    def _bound(self, leaf: _Leaf) -> _Build:
        binder, key, like = self._binder, leaf.key, leaf.like
        if key in binder.catalogue.objects:
            binder.binding.used.add(key)
            return binder.rebuild(key, binder.catalogue.objects[key], lambda: like)
        dtype, shape = binder.catalogue.tensors[key]
        layout = like if isinstance(like, torch.Tensor) else None
        if layout is not None:
            binder.note_loose([(key, layout)])
        tensor = binder.fresh(key, torch_dtype(dtype), tuple(shape), layout)
        return tensor.numpy if isinstance(like, np.ndarray) else lambda: tensor

    def _part(self, key: str, like: Any) -> _Build:
        """A part of the state, of which `like` is the present value, or MISSING."""
        binder = self._binder
        if binder.selected(key) and (key in binder.catalogue.objects or key in binder.catalogue.tensors):
            leaf = _Leaf(key, like)
            self._leaves.append(leaf)
            return lambda: leaf.build()
        objects = binder.catalogue.objects
        below = [  # without the tensors of plain values
            stored
            for stored in binder.selected_below(key)
            if not any(above in objects for above in _prefixes(stored, key) - {stored})
        ]
        if isinstance(like, Mapping):  # an empty dict may have no key
            return self._dict(key, like, below)
        if not below:
            if binder.selected(key):
                self._missing.append(key)
            return lambda: like
        steps = {self._step(key, stored, like) for stored in below}
        if steps == set(range(len(steps))):
            return self._list(key, like, len(steps))
        return self._dict(key, {}, below)

    def _list(self, key: str, like: Any, count: int) -> _Build:
        present = (
            [*like, *[MISSING] * count][:count] if isinstance(like, (list, tuple)) else [MISSING] * count
        )
        parts = [self._part(join(key, at), item) for at, item in enumerate(present)]
        if not isinstance(like, tuple):
            return lambda: [part() for part in parts]
        make = getattr(like, "_make", tuple) if count == len(like) else tuple
        return lambda: make([part() for part in parts])

    def _dict(self, key: str, like: Mapping[Any, Any], below: Iterable[str]) -> _Build:
        parts = {name: self._part(join(key, name), item) for name, item in like.items()}
        known = {join(key, name) for name in like}
        others = [stored for stored in below if known.isdisjoint(_prefixes(stored, key))]
        for name in dict.fromkeys(self._step(key, stored, like) for stored in others):
            if isinstance(name, int) and _kind_of_numbers(like) is not int:
                raise UndeterminedError(join(key, name))
            parts[name] = self._part(join(key, name), MISSING)

        def build() -> dict[Any, Any]:
            made = copy.copy(like) if isinstance(like, dict) else {}
            for name, part in parts.items():
                made[name] = part()  # `Counter.update` adds
            return made

        return build

    def _step(self, key: str, stored: str, like: Any) -> str | int:
        """The name under which the value at `key` has the part with a stored key."""
        path: Sequence[str | int] = self._paths.get(stored, ())
        outer = next((at for at in range(len(path)) if ".".join(map(str, path[:at])) == key), None)
        first, dot, _ = stored[len(key) + 1 :].partition(".")
        step = path[outer] if outer is not None else None if dot or first.startswith("@") else first
        if first.isdecimal() and not isinstance(step, int):  # DCP records integers of dicts as texts
            kind = int if isinstance(like, (list, tuple)) else _kind_of_numbers(like)
            step = first if kind is str else int(first) if kind is int and str(int(first)) == first else None
        if step is None:
            raise UndeterminedError(stored)
        return step


def _prefixes(stored: str, key: str) -> set[str]:
    """A stored key, and the keys above it that are below `key`."""
    return {stored} | {stored[:at] for at in range(len(key) + 1, len(stored)) if stored[at] == "."}


def _kind_of_numbers(like: Any) -> type | None:
    """The type of the keys of a dict that are numbers; None if there are none, or of several types."""
    kinds = {type(name) for name in (like if isinstance(like, Mapping) else ()) if str(name).isdecimal()}
    return kinds.pop() if len(kinds) == 1 else None
