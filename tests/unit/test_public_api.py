"""The public names, their signatures and the command line are those of `tests/golden/api.json`.

A program that uses shardproof relies on them. After an intended change, write the file again and read the
difference in review:

    python -m tests.unit.test_public_api
"""

from __future__ import annotations

import ast
import difflib
import enum
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import shardproof as sp
from shardproof.errors import ShardproofError

SNAPSHOT = Path(__file__).resolve().parents[1] / "golden" / "api.json"

MODULES = (
    "shardproof",
    "shardproof.checkpointer",
    "shardproof.cli",
    "shardproof.errors",
    "shardproof.events",
    "shardproof.events.otel",
    "shardproof.events.prometheus",
    "shardproof.events.tensorboard",
    "shardproof.fsdp",
    "shardproof.geometry",
    "shardproof.layouts",
    "shardproof.layouts.experts",
    "shardproof.optim",
    "shardproof.rendezvous",
    "shardproof.report",
    "shardproof.rerun",
    "shardproof.state",
    "shardproof.storage",
    "shardproof.storage.conformance",
)
"""Modules that programs import; each names what it offers in ``__all__``."""

RETURNED = {
    "shardproof.loading": ("Checkpoint", "StoredTensor"),
    "shardproof.maintenance": ("VerifyReport", "verify"),
}
"""Names of other modules that programs use: what public functions return, and verification."""

OPERATORS = (
    *("__call__", "__contains__", "__enter__", "__exit__", "__getitem__"),
    *("__iter__", "__len__", "__next__"),
)
"""Special methods that are part of the interface of a class."""


def public_names() -> dict[str, str]:
    """Each public name, with its module, to what it is."""
    names = {module: getattr(importlib.import_module(module), "__all__") for module in MODULES}  # noqa: B009
    found = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module, listed in (names | RETURNED).items()
        for name in listed
    }
    described: dict[str, str] = {}
    homes: dict[int, str] = {}
    for path, value in found.items():
        if inspect.isclass(value) and homes.setdefault(id(value), path) != path:
            described[path] = f"the class {homes[id(value)]}"
        else:
            described |= dict(entries(path, value))
    return dict(sorted(described.items()))


def entries(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """A name and, of a class, the names in it."""
    if inspect.ismodule(value):
        yield path, "module"
    elif inspect.isclass(value):
        yield from entries_of_class(path, value)
    elif inspect.isroutine(value):
        yield path, f"function {signature_of(value)}"
    elif type(value).__module__ in ("typing", "types") or callable(value):
        yield path, f"type {spelled(value)}"
    else:
        yield path, f"{type(value).__name__}" + ("" if path.endswith("__version__") else f" = {value!r}")


def entries_of_class(path: str, cls: type) -> Iterator[tuple[str, str]]:
    """A class, its constructor, and its public members that are not inherited from other packages."""
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield path, f"class({bases}) {constructor_of(cls)}".rstrip()
    if issubclass(cls, enum.Enum):
        for member in cls:
            yield f"{path}.{member.name}", f"member = {member.value!r}"
    attributes = {*fields_of(cls), *assigned_in_constructor(cls)}
    for name in dir(cls):
        owner = owner_of(cls, name)
        if not is_ours(owner) or (name.startswith("_") and name not in OPERATORS):
            continue
        kind, function = kind_of(owner.__dict__[name])
        if name in attributes or kind == "attribute":
            attributes.add(name)
        elif kind != "member":
            yield f"{path}.{name}", f"{kind} {signature_of(function)}" if function else kind
    if attributes:
        yield f"{path}, attributes", ", ".join(sorted(attributes))


def owner_of(cls: type, name: str) -> type:
    """The class that defines a member; `object` for a metaclass's."""
    return next((base for base in cls.__mro__ if name in base.__dict__), object)


def is_ours(cls: type) -> bool:
    """True if the package defines a class."""
    return cls.__module__.partition(".")[0] == "shardproof"


def constructor_of(cls: type) -> str:
    """The signature of a class, unless another package decides it."""
    if issubclass(cls, enum.Enum) or getattr(cls, "_is_protocol", False):
        return ""
    if is_ours(owner_of(cls, "__init__")) or issubclass(cls, (msgspec.Struct, tuple)):
        return signature_of(cls)
    return ""


def assigned_in_constructor(cls: type) -> set[str]:
    """Public attributes that `__init__` gives an object."""
    names: set[str] = set()
    for base in filter(is_ours, cls.__mro__):
        constructor = base.__dict__.get("__init__")
        if inspect.isfunction(constructor) and not hasattr(base, "__dataclass_fields__"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(constructor)))
            names |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
                and not node.attr.startswith("_")
            }
    return names


def kind_of(value: Any) -> tuple[str, Callable[..., Any] | None]:
    """What a member of a class is, and the function to call, if it is one."""
    if isinstance(value, staticmethod):
        return "static method", value.__func__
    if isinstance(value, classmethod):
        return "class method", value.__func__
    if isinstance(value, (property, cached_property)):
        return "property", None
    if inspect.isroutine(value):
        return "method", value
    if isinstance(value, enum.Enum):
        return "member", None
    return "attribute", None


def fields_of(cls: type) -> tuple[str, ...]:
    """Attributes of every object of a dataclass, a struct or a named tuple."""
    fields: Any = getattr(cls, "__dataclass_fields__", ())
    if issubclass(cls, msgspec.Struct):
        fields = cls.__struct_fields__
    elif issubclass(cls, tuple):
        fields = getattr(cls, "_fields", ())
    return tuple(name for name in fields if not name.startswith("_"))


def signature_of(function: Any) -> str:
    """Names, kinds and defaults of the parameters, without types."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(...)"
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=parameter.default
            if parameter.default is inspect.Parameter.empty
            else _Text(spelled(parameter.default)),
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Text(str):
    """A text that is its own representation."""

    def __repr__(self) -> str:
        return str(self)


def spelled(value: Any) -> str:
    """A default as text that no address and no module of the package is in."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return str(value.__qualname__)
    text = re.sub(r"\bshardproof(\.\w+)*\.(?=\w)", "", repr(value))
    return f"<{type(value).__name__}>" if " at 0x" in text else text


def errors() -> dict[str, str]:
    """Names of the error classes, which ranks send each other, to those of their bases."""
    module = importlib.import_module("shardproof.errors")
    classes = [getattr(module, name) for name in module.__all__]
    return {cls.__name__: ", ".join(base.__name__ for base in cls.__mro__[1:-2]) for cls in classes}


def command_line() -> dict[str, str]:
    """Each command, argument and option to its names, default and kind."""
    from shardproof.commands.cli.group import commands

    context = click.Context(commands)
    found = dict(parameters_of("shardproof", commands))
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        found |= dict(parameters_of(f"shardproof {name}", command))
    return found


def parameters_of(path: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """The command and its parameters."""
    yield path, "command"
    for parameter in command.params:
        facts = parameter.to_info_dict()
        kind = facts["type"]
        text = f"{facts['param_type_name']} {' '.join(facts['opts'] + facts['secondary_opts'])}"
        text += f", {kind['param_type']}" + (f" of {kind['choices']}" if "choices" in kind else "")
        if {"min", "max"} & {name for name in kind if kind[name] is not None}:
            text += f" from {kind['min']} to {kind['max']}"
        words = ("required", "multiple", "is_flag")
        text += "".join(f", {word}" for word in words if facts.get(word))
        default = parameter.default
        if isinstance(default, (str, int, float, tuple)) and default is not False:
            text += f", default {default!r}"
        yield f"{path} {facts['opts'][0]}", text


def snapshot() -> dict[str, dict[str, str]]:
    """All that programs rely on."""
    return {"names": public_names(), "errors": errors(), "command line": command_line()}


def difference(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> str:
    """What differs, a line for each name."""
    lines = []
    for part in {**before, **now}:
        old, new = before.get(part, {}), now.get(part, {})
        for name in sorted({**old, **new}):
            if name not in new:
                lines.append(f"{part}: {name} is gone (it was: {old[name]})")
            elif name not in old:
                lines.append(f"{part}: {name} is new: {new[name]}")
            elif old[name] != new[name]:
                lines.append(f"{part}: {name} has changed")
                lines += [f"    {line}" for line in difflib.ndiff([old[name]], [new[name]])]
    return "\n".join(line.rstrip() for line in lines)


def test_the_public_interface_is_the_same() -> None:
    found = difference(json.loads(SNAPSHOT.read_text()), snapshot())
    if found:
        pytest.fail(
            f"{found}\n\nPrograms rely on these names. If the change is meant: "
            "python -m tests.unit.test_public_api",
            pytrace=False,
        )


def test_an_error_of_each_class_is_decoded_from_the_wire() -> None:
    for name in json.loads(SNAPSHOT.read_text())["errors"]:
        error = ShardproofError.from_wire({"type": name, "message": "text", "details": {"key": "w"}})
        assert type(error).__name__ == name
        assert error.to_wire() == {"type": name, "message": "text", "details": {"key": "w"}}


def test_every_name_of_the_package_is_in_the_snapshot() -> None:
    names = json.loads(SNAPSHOT.read_text())["names"]
    assert {f"shardproof.{name}" for name in sp.__all__} <= names.keys()
    assert "shardproof.Checkpointer.restore" in names


def test_a_difference_is_reported() -> None:
    before = {"names": {"a.kept": "x", "a.gone": "y", "a.changed": "function (x)"}}
    now = {"names": {"a.kept": "x", "a.changed": "function (x, y=1)", "a.new": "z"}}
    lines = difference(before, now).splitlines()
    assert lines[0] == "names: a.changed has changed"
    assert "    - function (x)" in lines
    assert "    + function (x, y=1)" in lines
    assert lines[-2:] == ["names: a.gone is gone (it was: y)", "names: a.new is new: z"]
    assert difference(before, before) == ""


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1, ensure_ascii=True) + "\n")
    print(f"wrote {SNAPSHOT}")
