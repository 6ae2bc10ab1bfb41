"""Enums and dataclasses that a checkpoint may hold: those that the program names, and no others.

A checkpoint carries a name; which class it means is decided by the program that reads. The two tables here
are the only state of the module, and are filled by decorators while a program is imported.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

from shardproof.errors import PlainDataError

__all__ = ["name_of", "register_dataclass", "register_enum", "registered_dataclass", "registered_enum"]

_Class = TypeVar("_Class", bound=type)

_BY_NAME: dict[str, type] = {}
_NAME_OF: dict[type, str] = {}


def register_dataclass(cls: _Class, *, name: str | None = None) -> _Class:
    """Let values of a dataclass be stored, under the class's name or `name`. Serves as a decorator.

    Fields are stored and restored one by one; neither ``__init__`` nor ``__post_init__`` runs on load.

    >>> @dataclasses.dataclass
    ... class Progress:
    ...     tokens: int
    >>> Progress = register_dataclass(Progress, name="docs.Progress")
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__qualname__} is not a dataclass")
    return _register(cls, name)


def register_enum(cls: _Class, *, name: str | None = None) -> _Class:
    """Let members of an enum be stored, by the class's name (or `name`) and the member's name.

    >>> class Phase(enum.Enum):
    ...     WARMUP = 1
    >>> Phase = register_enum(Phase, name="docs.Phase")
    """
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise TypeError(f"{cls!r} is not an enum")
    return _register(cls, name)


def _register(cls: _Class, name: str | None) -> _Class:
    name = name or cls.__qualname__
    other = _BY_NAME.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"{name!r} already names {other.__module__}.{other.__qualname__}; give name=...")
    _BY_NAME[name] = cls
    _NAME_OF[cls] = name
    return cls


def name_of(cls: type) -> str | None:
    """The name under which a class is registered."""
    return _NAME_OF.get(cls)


def registered_enum(name: str, path: str) -> type[enum.Enum]:
    """The enum of this name."""
    cls = _BY_NAME.get(name)
    if cls is None or not issubclass(cls, enum.Enum):
        raise _unknown("enum", name, path)
    return cls


def registered_dataclass(name: str, path: str) -> Any:
    """The dataclass of this name."""
    cls = _BY_NAME.get(name)
    if cls is None or not dataclasses.is_dataclass(cls):
        raise _unknown("dataclass", name, path)
    return cls


def _unknown(kind: str, name: str, path: str) -> PlainDataError:
    return PlainDataError(
        f"{path}: the checkpoint holds a value of the {kind} {name!r}, which this program has not "
        f"registered. Register it with shardproof.register_{kind}",
        path=path,
    )
