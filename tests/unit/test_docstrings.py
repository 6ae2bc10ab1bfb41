"""Google-style parsers can read the sections of public docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import shardproof as sp

PACKAGES = (
    *("errors", "engine.events", "engine.geometry", "engine.loading", "engine.rendezvous", "engine.saving"),
    *("engine.state", "engine.storage", "training.fsdp", "training.layouts", "training.optim"),
    *("training.rerun", "runs.checkpointer", "runs.maintenance", "commands.report"),
)
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note|Shape):\s*(.*)")
ENTRY = {
    "Args": re.compile(r"\*{0,2}\w+(, \*{0,2}\w+)*( \([^)]+\))?: \S"),
    "Attributes": re.compile(r"\w+( \([^)]+\))?: \S"),
    "Raises": re.compile(r"[\w.]+(, [\w.]+)*: \S"),
}


def problems(text: str, parameters: frozenset[str] | None = None) -> list[str]:
    """What a parser misreads in a docstring (of `inspect.getdoc`), one line each.

    Args:
        text: the docstring.
        parameters: names that `Args` may have; None: any.
    """
    found: list[str] = []
    section = ""
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if indent == 0:
            match = SECTION.fullmatch(line)
            section = match[1] if match is not None else ""
            if section in ENTRY and match is not None and match[2]:
                found.append(f"{section}: text on the line of the title: {line!r}")
            continue
        if section not in ENTRY or indent > 4:
            continue
        if indent < 4 or not ENTRY[section].match(line.strip()):
            found.append(f"{section}: neither an entry nor indented as its continuation: {line!r}")
        elif section == "Args" and parameters is not None:
            names = re.sub(r" \(.*", "", line.strip().split(":")[0]).replace("*", "").split(", ")
            found += [f"Args: no parameter {name!r}" for name in names if name not in parameters]
    return found


def parameters_of(value: Any) -> frozenset[str] | None:
    """Names of the parameters; None where there is no signature to read."""
    try:
        return frozenset(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return None


def documented() -> Iterator[tuple[str, Any]]:
    """Every public name with a docstring of its own, and every public member of a public class."""
    seen: set[int] = set()
    modules = [("sp", sp), *((name, importlib.import_module(f"shardproof.{name}")) for name in PACKAGES)]
    for title, module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            is_ours = getattr(value, "__module__", "").startswith("shardproof")
            if id(value) in seen or not is_ours or not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            seen.add(id(value))
            yield f"{title}.{name}", value
            if inspect.isclass(value):
                for member, inner in vars(value).items():
                    function = inner.__func__ if isinstance(inner, classmethod | staticmethod) else inner
                    if not member.startswith("_") and (
                        inspect.isroutine(function) or isinstance(function, property)
                    ):
                        yield f"{title}.{name}.{member}", function


DOCUMENTED = dict(documented())


def test_public_docstrings_can_be_parsed() -> None:
    wrong = {
        name: found
        for name, value in DOCUMENTED.items()
        if (found := problems(inspect.getdoc(value) or "", parameters_of(value)))
    }
    assert wrong == {}


def test_the_checked_docstrings_include_the_main_calls() -> None:
    assert {"sp.Checkpointer", "sp.Checkpointer.restore", "sp.save", "sp.load"} <= set(DOCUMENTED)


@pytest.mark.parametrize(
    "text",
    [
        "Does.\n\nArgs:\n    path: a folder\n    and more of it.",
        "Does.\n\nArgs:\n    path: a folder\n  and more of it.",
        "Does.\n\nArgs: path",
        "Does.\n\nArgs:\n    other: not there.",
        "Does.\n\nRaises:\n    when it fails.",
    ],
)
def test_a_misread_docstring_is_found(text: str) -> None:
    assert problems(text, frozenset({"path"})) != []


def test_a_well_formed_docstring_passes() -> None:
    text = (
        "Does.\n\nArgs:\n    path: a folder\n        and more: of it.\n\nRaises:\n    A, B: why.\n        So."
    )
    assert problems(text, frozenset({"path"})) == []
