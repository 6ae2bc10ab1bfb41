"""Classes and functions among options: stored by name for people, and taken from the target at a load."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Differs = Callable[[tuple[Any, ...], str, str], None]
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


def with_targets(value: Any, target: Any, differs: Differs, path: tuple[Any, ...] = ()) -> Any:
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
