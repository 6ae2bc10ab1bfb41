"""Classes that plain data may hold by name, and `StreamBytes`, the content of an `io.BytesIO`.

A checkpoint contains the name of an enum or dataclass. The program that loads it registers the class for
that name, usually with a decorator at import. Other classes and functions, among options, are no data: their
names are stored for people (`ByName`), and a load takes them from the target.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pkgutil
from collections.abc import Callable
from functools import partial
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


_Differs = Callable[[tuple[Any, ...], str, str], None]
"""Reports a class or function of another name. Arguments: path of keys and positions, the target's name, the
stored name."""


class ByName(str):
    """The full name of a class or function, which is no data.

    >>> by_name(ValueError)
    'builtins.ValueError'
    """


def by_name(value: Any) -> ByName | None:
    """The name of a class, function, method or `functools.partial`; None for other values.

    A partial has the name of its function: its arguments are code, too.
    """
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        module = getattr(value, "__module__", None)
        return ByName(f"{module}.{value.__qualname__}" if module else value.__qualname__)
    return None


def with_names(value: Any) -> Any:
    """The value with the names of the classes and functions in its dicts, lists and tuples.

    >>> with_names({"lr": 0.1, "kinds": [ValueError]})
    {'lr': 0.1, 'kinds': ['builtins.ValueError']}
    """
    kind = type(value)
    if kind is dict:
        return {key: with_names(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind([with_names(item) for item in value])
    name = by_name(value)
    return value if name is None else name


def has_names(value: Any) -> bool:
    """True if a value, decoded or encoded, has the name of a class or function in its containers.

    >>> has_names([{"$named": "builtins.ValueError"}]), has_names(({"kind": ByName("builtins.int")},))
    (True, True)
    """
    if isinstance(value, dict):
        return "$named" in value or any(map(has_names, value.values()))
    return any(map(has_names, value)) if isinstance(value, list | tuple) else type(value) is ByName


def with_targets(value: Any, target: Any, differs: _Differs, path: tuple[Any, ...] = ()) -> Any:
    """A loaded value with the target's classes and functions in place of their names.

    Args:
        value: a result of `with_names`. Its containers change.
        target: the target's present value. For an item of a list that the target's list lacks, the target's
            last item serves: groups of parameters have equal classes.
        differs: called for each class or function whose name in the target is another one.
        path: path of the value.

    Returns:
        The value. A name stays where the target has neither a class nor a function.

    >>> with_targets({"kinds": [ByName("builtins.ValueError")]}, {"kinds": [ValueError]}, print)
    {'kinds': [<class 'ValueError'>]}
    """
    kind = type(value)
    if kind is ByName:
        found = by_name(target)
        if found is not None and found != value:
            differs(path, found, value)
        return value if found is None else target
    if kind is dict:
        for key, item in value.items():
            inner = target.get(key) if isinstance(target, dict) else None
            value[key] = with_targets(item, inner, differs, (*path, key))
    elif kind in (list, tuple):
        known = target if isinstance(target, list | tuple) and target else (None,)
        items = [
            with_targets(item, known[min(at, len(known) - 1)], differs, (*path, at))
            for at, item in enumerate(value)
        ]
        if kind is tuple:
            return tuple(items)
        value[:] = items
    return value


class StreamBytes(bytes):
    """The bytes of an `io.BytesIO`, with its position. It equals the bytes.

    Args:
        data: the content.
        position: the position of the stream in bytes, 0 or more.

    Raises:
        ValueError: the position is not a whole number of 0 or more.

    Example:
        >>> stored = StreamBytes.of(io.BytesIO(b"ab"))
        >>> stored, stored == b"ab", stored.stream().read()
        (StreamBytes(b'ab', 0), True, b'ab')
    """

    position: int

    def __new__(cls, data: bytes = b"", position: int = 0) -> StreamBytes:
        """Makes the bytes."""
        if type(position) is not int or position < 0:
            raise ValueError(f"{position!r} is not the position of a stream")
        made = super().__new__(cls, data)
        made.position = position
        return made

    @classmethod
    def of(cls, stream: io.BytesIO) -> StreamBytes:
        """The content of a stream."""
        return cls(stream.getvalue(), stream.tell())

    def stream(self) -> io.BytesIO:
        """A new stream with this content, at this position."""
        stream = io.BytesIO(self)
        stream.seek(self.position)
        return stream

    def __reduce__(self) -> Any:
        return StreamBytes, (bytes(self), self.position)

    def __repr__(self) -> str:
        return f"StreamBytes({bytes(self)!r}, {self.position})"
