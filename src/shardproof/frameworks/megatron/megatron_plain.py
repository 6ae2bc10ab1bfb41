"""Values of Megatron's common state and ShardedObjects as plain data, with the types that plain data lacks.

Megatron keeps its arguments in an ``argparse.Namespace`` with members of enums. Its rerun state machine names
a call by a named tuple. Transformer Engine keeps its extra state in a ``BytesIO``. These values are stored as
dicts, names, tuples and bytes. A separate list has the path and the type of each. Classes and functions, such
as those in the groups of an optimizer, are stored by name. A load takes those of the state dict that it
fills.

Checkpoints name `Typed` by this module, and ``--register`` imports it where Megatron is not installed. So it
keeps its name, and imports nothing of Megatron.
"""

from __future__ import annotations

import argparse
import enum
import io
import pathlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import shardproof as sp
from shardproof.engine.state import by_name

Types = list[tuple[list[Any], str]]
"""Path of keys and positions, and the name of the type there."""

_NAMESPACES: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
}
_ENUM = "enum "
_NAMED_TUPLE = "namedtuple "


@sp.register_dataclass
@dataclass
class Typed:
    """Plain data, and the types that it lacks."""

    value: Any
    types: Types


def to_plain(value: Any) -> tuple[Any, Types]:
    """Returns plain data for a value, and the paths and names of other types in it.

    >>> to_plain({"args": argparse.Namespace(lr=0.1), "step": 3})
    ({'args': {'lr': 0.1}, 'step': 3}, [(['args'], 'argparse.Namespace')])
    """
    found: Types = []
    return _to_plain(value, [], found), found


def from_plain(value: Any, types: Sequence[tuple[list[Any], str]]) -> Any:
    """Inverse of `to_plain`. Changes the containers of `value`.

    Raises:
        PlainDataError: the class of an enum or named tuple is not loaded in this process.

    >>> from_plain({"args": {"lr": 0.1}, "step": 3}, [(["args"], "argparse.Namespace")])
    {'args': Namespace(lr=0.1), 'step': 3}
    """
    root = [value]
    for path, name in sorted(types, key=lambda entry: -len(entry[0])):  # inner values first
        _replace(root, [0, *path], name)
    return root[0]


def _to_plain(value: Any, path: list[Any], found: Types) -> Any:
    kind = type(value)
    if kind in _NAMESPACES.values():
        found.append((path, f"{kind.__module__}.{kind.__qualname__}"))
        return _to_plain(vars(value), path, found)
    if isinstance(value, enum.Enum):
        found.append((path, f"{_ENUM}{kind.__module__} {kind.__qualname__}"))
        return value.name
    if _is_named_tuple(kind):
        found.append((path, f"{_NAMED_TUPLE}{kind.__module__} {kind.__qualname__}"))
        return _to_plain(tuple(value), path, found)
    if isinstance(value, io.BytesIO):
        found.append((path, "io.BytesIO"))
        return value.getvalue()
    if isinstance(value, pathlib.PurePath):
        found.append((path, "pathlib.Path"))
        return str(value)
    if kind in (dict, OrderedDict):
        return kind((key, _to_plain(item, [*path, key], found)) for key, item in value.items())
    if kind in (list, tuple):
        return kind(_to_plain(item, [*path, at], found) for at, item in enumerate(value))
    name = by_name(value)
    return value if name is None else name


def _replace(container: Any, path: list[Any], name: str) -> Any:
    """Restores the type of the value at a path. Returns the container, or the tuple that replaces it."""
    step, *rest = path
    inner = container[step]
    new = _replace(inner, rest, name) if rest else _typed(inner, name)
    if isinstance(container, tuple):
        return (*container[:step], new, *container[step + 1 :])
    container[step] = new
    return container


def _typed(value: Any, name: str) -> Any:
    if name in _NAMESPACES:
        return _NAMESPACES[name](**value)
    if name == "io.BytesIO":
        return io.BytesIO(value)
    if name == "pathlib.Path":
        return pathlib.Path(value)
    if name.startswith(_ENUM):
        return _loaded(name.removeprefix(_ENUM), "enum", _is_enum)[value]
    if name.startswith(_NAMED_TUPLE):
        return tuple.__new__(_loaded(name.removeprefix(_NAMED_TUPLE), "named tuple", _is_named_tuple), value)
    raise sp.PlainDataError(
        f"the checkpoint has a value of the type {name!r}, which this version cannot restore"
    )


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _loaded(name: str, sort: str, is_of_sort: Callable[[Any], bool]) -> Any:
    """A class of a module that this process has imported. Imports nothing."""
    module, qualified = name.split(" ")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not is_of_sort(found):
        raise sp.PlainDataError(
            f"the checkpoint has a value of {qualified}, but {module} has no such {sort} here. Import "
            f"{module} before the load"
        )
    return found
