"""Classes of microbatches beyond plain data: namedtuples, dataclasses and `collections.UserDict`.

`BatchEncoding` and `BatchFeature` of transformers are `UserDict`s. An object of such a class is described by
its content, a plain container, and made again without a call of the class's own code.

A packed step has the class's name. `class_named` finds the class among the modules that the program has
imported and imports none, so that a checkpoint cannot choose code to run.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict
from typing import Any

from shardproof.errors import PlainDataError, StructureError

Described = list[list[Any]]
"""For each described object, the outer ones first: the path to it, and the name of its class."""


def content_of(value: Any) -> Any:
    """The content of an object of these classes, as a plain tuple or dict; None for any other value.

    >>> @dataclasses.dataclass
    ... class Batch:
    ...     tokens: list[int]
    >>> content_of(Batch([1, 2])), content_of([1, 2])
    ({'tokens': [1, 2]}, None)
    """
    kind = type(value)
    if isinstance(value, tuple) and _is_namedtuple(kind):
        return tuple(value)
    if isinstance(value, UserDict):
        return dict(vars(value))
    if _is_plain_dataclass(kind):
        names = {field.name: None for field in dataclasses.fields(value)} | getattr(value, "__dict__", {})
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def of_content(kind: Any, content: Any) -> Any:
    """The object of a class with this content. Runs neither ``__init__`` nor ``__post_init__``."""
    if _is_namedtuple(kind):
        return tuple.__new__(kind, content)
    made = object.__new__(kind)
    for name, item in content.items():
        object.__setattr__(made, name, item)
    return made


def described(value: Any, path: str) -> tuple[Any, Described]:
    """Replaces the objects of these classes by their contents, in nested dicts, lists and tuples.

    Args:
        value: microbatches and plain data.
        path: the name of the value, for error messages.

    Returns:
        The value of plain containers, and the classes for `restored`.

    Raises:
        PlainDataError: a class has no name in an imported module.
    """
    found: Described = []

    def plain(value: Any, at: list[Any]) -> Any:
        content = content_of(value)
        if content is not None:
            kind = type(value)
            name = f"{kind.__module__}:{kind.__qualname__}"
            if class_named(name) is kind:
                found.append([at, name])
                value = content
            elif not dataclasses.is_dataclass(kind):  # a registered dataclass has a name of its own
                where = ".".join(map(str, [path, *at]))
                raise PlainDataError(
                    f"{where}: a {kind.__qualname__} cannot be saved for a rerun, because {kind.__module__} "
                    "has no class of this name. Define the class at the top of a module",
                    path=where,
                )
        if type(value) is dict:
            return {key: plain(item, [*at, key]) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(plain(item, [*at, index]) for index, item in enumerate(value))
        return value

    return plain(value, []), found


def restored(value: Any, found: Described) -> Any:
    """The inverse of `described`.

    Raises:
        StructureError: the program has not imported a class, or the class is another one now.
    """
    by_path = {tuple(at): name for at, name in found}
    above = {tuple(at[:end]) for at, _ in found for end in range(len(at) + 1)}

    def whole(value: Any, at: tuple[Any, ...]) -> Any:
        if at not in above:
            return value
        if type(value) is dict:
            value = {key: whole(item, (*at, key)) for key, item in value.items()}
        elif type(value) in (list, tuple):
            value = type(value)(whole(item, (*at, index)) for index, item in enumerate(value))
        if at not in by_path:
            return value
        name = by_path[at]
        kind = class_named(name)
        is_tuple = _is_namedtuple(kind)
        is_dict = _is_plain_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, UserDict))
        if type(value) is not (tuple if is_tuple else dict) or not (is_tuple or is_dict):
            raise StructureError(
                f"the suspicious step has a microbatch of class {name.replace(':', '.')}, which this program "
                f"has not imported as it was: import {name.partition(':')[0]} before the first should_run"
            )
        return of_content(kind, value)

    return whole(value, ())


def class_named(name: str) -> Any:
    """The class of a name ``module:qualified.name`` in the imported modules; None if there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def _is_namedtuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_plain_dataclass(kind: Any) -> bool:
    """True for a dataclass whose fields are all of its content."""
    containers = (dict, list, tuple, set)
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and not issubclass(kind, containers)
