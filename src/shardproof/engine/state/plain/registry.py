"""The registry of enums and dataclasses that a checkpoint may contain.

A checkpoint contains a name. The program that loads it registers the class for that name, usually with a
decorator at import.
"""

from __future__ import annotations

import dataclasses
import enum
import pkgutil
from types import ModuleType
from typing import Any, Literal, TypeVar

from shardproof.errors import PlainDataError

_Class = TypeVar("_Class", bound=type)

_BY_NAME: dict[str, type] = {}
_NAME_OF: dict[type, str] = {}


def register_dataclass(cls: _Class, *, name: str | None = None) -> _Class:
    """Registers a dataclass, so that checkpoints may contain it. Use it as a decorator.

    Fields are stored and restored one by one. A load runs neither ``__init__`` nor ``__post_init__``.

    Args:
        cls: the dataclass.
        name: name of the class in checkpoints; None: its qualified name.

    Returns:
        `cls`.

    Raises:
        TypeError: `cls` is not a dataclass.
        ValueError: another class has the name.

    >>> @dataclasses.dataclass
    ... class Progress:
    ...     tokens: int
    >>> Progress = register_dataclass(Progress, name="docs.Progress")
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__qualname__} is not a dataclass")
    return _register(cls, name)


def register_enum(cls: _Class, *, name: str | None = None) -> _Class:
    """Registers an enum, so that checkpoints may contain its members. Use it as a decorator.

    A checkpoint stores the names of members.

    Args:
        cls: the enum.
        name: name of the class in checkpoints; None: its qualified name.

    Returns:
        `cls`.

    Raises:
        TypeError: `cls` is not an enum.
        ValueError: another class has the name.

    >>> class Phase(enum.Enum):
    ...     WARMUP = 1
    >>> Phase = register_enum(Phase, name="docs.Phase")
    """
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise TypeError(f"{cls!r} is not an enum")
    return _register(cls, name)


def register_by_name(name: str) -> None:
    """Imports a module that registers its classes, or registers one enum or dataclass by its full name.

    A program other than the training script, such as the command line, registers the classes this way. A
    class that its module registers keeps the name given there.

    Args:
        name: such as "my_run.state" or "torch.distributed.fsdp.ShardingStrategy".

    Raises:
        ValueError: there is no such module or class, or the class is no enum and no dataclass.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name!r} cannot be imported: {error}. Give the full name of a module or class, and the folder "
            "of the module in PYTHONPATH"
        ) from error
    if isinstance(found, ModuleType) or (isinstance(found, type) and found in _NAME_OF):
        return
    if isinstance(found, type) and issubclass(found, enum.Enum):
        register_enum(found)
    elif isinstance(found, type) and dataclasses.is_dataclass(found):
        register_dataclass(found)
    else:
        raise ValueError(f"{name!r} is no module, enum or dataclass")


def _register(cls: _Class, name: str | None) -> _Class:
    name = name or cls.__qualname__
    other = _BY_NAME.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"{name!r} already names {other.__module__}.{other.__qualname__}; give name=...")
    _BY_NAME[name] = cls
    _NAME_OF[cls] = name
    return cls


def name_of(cls: type) -> str | None:
    """The registered name of a class; None if it is not registered."""
    return _NAME_OF.get(cls)


def registered(kind: Literal["enum", "dataclass"], name: str, path: str) -> Any:
    """The registered class of this kind and name.

    Raises:
        PlainDataError: there is none. The message names `path`.
    """
    cls = _BY_NAME.get(name)
    if cls is None or not (issubclass(cls, enum.Enum) if kind == "enum" else dataclasses.is_dataclass(cls)):
        raise PlainDataError(
            f"{path}: the checkpoint has a value of the {kind} {name!r}, which this program has not "
            f"registered. Register it with shardproof.register_{kind} (--register on the command line)",
            path=path,
        )
    return cls
