"""Every type of shardproof in a public signature can be imported as a public name."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import pytest

import shardproof as sp

SPECIAL = {"__call__", "__enter__", "__getitem__", "__init__", "__iter__"}

BUILT_INSIDE = {
    "Decision.of",
    "Operation.__init__",
    "PendingSave.__init__",
    "Phase.__init__",
    "Reservation.__init__",
    "Subscription.__init__",
    "UnshardHandle.__init__",
}
"""Constructors that only shardproof calls. Users get these objects and make none."""

INTERNAL = {
    "Checkpoint.catalogue",
    "Checkpoint.fill",
    "Checkpoint.reads",
    "Checkpoint.table",
    "Checkpoint.tensors",
    "Damage.is_in",
    "LocalSink.__init__",
}
"""Members that other packages of shardproof use, and that no page offers to users."""


def public_objects() -> dict[str, Any]:
    """Name to object: everything in `sp.__all__`, and in the `__all__` of the packages in it."""
    found = {}
    for name in sp.__all__:
        value = getattr(sp, name)
        inside = value.__all__ if isinstance(value, types.ModuleType) else ()
        found |= {f"{name}.{one}": getattr(value, one) for one in inside} or {name: value}
    return found


PUBLIC = public_objects()
SIGNED = {
    name: value
    for name, value in PUBLIC.items()
    if getattr(value, "__module__", "").startswith("shardproof")
    and (inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)))
}


def annotations_of(value: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, module and annotations of a function, or of what is public of a class and its bases."""
    if inspect.isclass(value):
        for base in value.__mro__:
            if base.__module__.startswith("shardproof"):
                yield from annotations_of_class(base)
    else:
        function = inspect.unwrap(value)
        yield function.__qualname__, function.__module__, function.__annotations__


def annotations_of_class(value: type) -> Iterator[tuple[str, str, dict[str, Any]]]:
    attributes = {**vars(value).get("__annotations__", {}), **set_by_init(value)}
    public = {name: hint for name, hint in attributes.items() if not name.startswith("_")}
    for name, hint in public.items():
        yield f"{value.__qualname__}.{name}", value.__module__, {name: hint}
    for name, member in vars(value).items():
        function = inspect.unwrap(
            getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        )
        if inspect.isfunction(function) and (not name.startswith("_") or name in SPECIAL):
            module = function.__module__ if name != "__init__" else value.__module__
            yield f"{value.__qualname__}.{name}", module, function.__annotations__


def set_by_init(value: type) -> dict[str, Any]:
    """Attributes that ``__init__`` annotates: ``self.name: Type = ...``."""
    init = vars(value).get("__init__")
    if not inspect.isfunction(init) or init.__qualname__ != f"{value.__qualname__}.__init__":
        return {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    except OSError:  # made by dataclass
        return {}
    return {
        node.target.attr: ast.unparse(node.annotation)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
    }


@cache
def names_in(module: str) -> dict[str, Any]:
    """The names in a module, also those that it imports for type checkers alone."""
    seen = dict(vars(sys.modules[module]))
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) not in seen:
                    seen[alias.asname or alias.name] = getattr(import_module(node.module), alias.name)
    return seen


def types_in(hint: Any) -> Iterator[type]:
    """The classes of shardproof in a type."""
    if isinstance(hint, list | tuple):
        for one in hint:
            yield from types_in(one)
    elif isinstance(hint, type) and hint.__module__.startswith("shardproof"):
        yield hint
    else:
        yield from types_in(typing.get_args(hint))


def not_exported(value: Any) -> set[str]:
    """The types of shardproof in the signatures of a public object that have no public name."""
    missing = set()
    for name, module, own in annotations_of(value):
        if name not in BUILT_INSIDE | INTERNAL:
            holder = types.SimpleNamespace(__annotations__=own)
            hints = typing.get_type_hints(holder, globalns=names_in(module))
            found = {one for hint in hints.values() for one in types_in(hint)}
            missing |= {
                f"{name}: {one.__qualname__}"
                for one in found
                if not any(one is public for public in PUBLIC.values())
            }
    return missing


def test_types_in_a_public_signature_are_public() -> None:
    missing = {name: not_exported(value) for name, value in sorted(SIGNED.items())}
    assert {name: types for name, types in missing.items() if types} == {}


def test_the_checked_signatures_include_the_main_calls() -> None:
    assert {"Checkpointer", "load", "open", "save", "optim.DistributedOptimizer"} <= set(SIGNED)


def test_the_exceptions_are_members_that_exist() -> None:
    members = {name for value in SIGNED.values() for name, _, _ in annotations_of(value)}
    assert members >= BUILT_INSIDE | INTERNAL


# The check itself.


class Hidden:
    pass


Hidden.__module__ = "shardproof.hidden"


def takes(one: list[Hidden | None]) -> None: ...


def returns() -> dict[str, Hidden]: ...


class Holds:
    def __init__(self) -> None:
        self.one: Hidden | None = None


class HasMethod:
    @property
    def one(self) -> Hidden: ...  # type: ignore[empty-body]


for _example in (Holds, HasMethod):
    _example.__module__ = "shardproof.hidden"


@pytest.mark.parametrize("value", [takes, returns, Holds, HasMethod])
def test_a_hidden_type_is_found(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shardproof.hidden", sys.modules[__name__])
    (found,) = not_exported(value)
    assert found.endswith(": Hidden")
