"""Figures of the structure of the source, counted from its files.

    python -m tests.figures           prints them
    python -m tests.figures --hold    and writes the bounds of `tests/unit/test_figures.py`

The bound of a figure is its aim, or the value that was written last, if that is larger. A code line has code:
no comment, no docstring.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.rooms import FACADES, PUBLIC, ROOT, SOURCE, room_of, room_of_module

Function = ast.FunctionDef | ast.AsyncFunctionDef

CODE_LINES = 60
PARAMETERS = 8
ATTRIBUTES = 16
SHORT = 8

AIMS = {
    "rooms": 15,
    "arrows": 70,
    "files": 380,
    "lines": 73_000,
    "short_private": 150,
    "long_functions": 0,
    "wide_functions": 0,
    "large_classes": 0,
}
"""Each figure that is held, and the largest value that it should have."""

TITLES = {
    "rooms": "top-level rooms",
    "arrows": "import arrows between rooms",
    "files": "files",
    "lines": "lines",
    "short_private": f"private functions of at most {SHORT} lines that are named once",
    "long_functions": f"functions over {CODE_LINES} code lines",
    "wide_functions": f"functions with over {PARAMETERS} parameters",
    "large_classes": f"classes of the engine with over {ATTRIBUTES} attributes",
}

BOUNDS = ROOT / "tests" / "golden" / "figures.json"
"""The bound of each figure."""


@dataclass(frozen=True)
class Figures:
    """The figures, each a list so that the script can name what it counts."""

    rooms: list[str]
    """Entries of the package that are no facades: the wings, the ground floor, and the package itself."""
    arrows: list[str]
    """Pairs of them, one of which imports the other."""
    files: int
    lines: int
    """Of all files, with docstrings, comments and empty lines."""
    short_private: list[str]
    """Private functions of at most `SHORT` lines that their file names once outside of their definition."""
    long_functions: list[str]
    """Functions with more than `CODE_LINES` code lines, but no constructors of public classes."""
    wide_functions: list[str]
    """Functions with more than `PARAMETERS` parameters besides `self` and `cls`, but no such constructors."""
    large_classes: list[str]
    """Classes of the engine with more than `ATTRIBUTES` attributes."""


def figures() -> Figures:
    """The figures of the source."""
    sources = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    functions = [
        (path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, Function)
    ]
    constructors = {
        id(inner)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for inner in node.body
        if isinstance(inner, Function) and inner.name == "__init__"
    }
    others = [(path, node) for path, node in functions if id(node) not in constructors]
    engine = [path for path in sources if path.relative_to(SOURCE).parts[0] == "engine"]
    return Figures(
        rooms=sorted({top_of(path) for path in sources if room_of(path) != PUBLIC}),
        arrows=arrows(trees),
        files=len(sources),
        lines=sum(text.count("\n") for text in sources.values()),
        short_private=[
            place(path, node)
            for path, node in functions
            if is_private(node) and lines_of(node) <= SHORT and uses(node.name, sources[path]) == 1
        ],
        long_functions=[
            f"{place(path, node)}: {count}"
            for path, node in others
            if (count := code_lines(node, sources[path])) > CODE_LINES
        ],
        wide_functions=[
            f"{place(path, node)}: {count}"
            for path, node in others
            if (count := parameters(node)) > PARAMETERS
        ],
        large_classes=[
            f"{place(path, node)}: {len(found)}"
            for path in engine
            for node in ast.walk(trees[path])
            if isinstance(node, ast.ClassDef) and len(found := attributes(node)) > ATTRIBUTES
        ],
    )


def top_of(path: Path) -> str:
    """The entry of the package in which a file is; ``__init__`` for the package itself."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def arrows(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Pairs of entries, the first of which imports the second. Facades are counted as neither."""
    found = set()
    for path, tree in trees.items():
        if room_of(path) == PUBLIC:
            continue
        for module in imported(tree):
            there = module.partition(".")[0] or "__init__"
            if room_of_module(module) != PUBLIC and there != top_of(path):
                found.add(f"{top_of(path)} -> {there}")
    return sorted(found)


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of shardproof that a file imports, without ``shardproof.``."""
    tops = {path.name.removesuffix(".py") for path in SOURCE.iterdir()}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "shardproof":
            names = [
                f"shardproof.{alias.name}" if alias.name in tops else "shardproof" for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] == "shardproof":
                yield name.partition(".")[2]


def place(path: Path, node: Function | ast.ClassDef) -> str:
    return f"{path.relative_to(SOURCE).as_posix()}:{node.lineno} {node.name}"


def is_private(node: Function) -> bool:
    return node.name.startswith("_") and not node.name.startswith("__")


def lines_of(node: Function) -> int:
    """Lines of a function with its docstring, without its decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def uses(name: str, text: str) -> int:
    """How often a file names a function, outside of its definition and of ``__all__``."""
    return len(re.findall(rf"(?<!def )\b{re.escape(name)}\b", text))


def code_lines(node: Function, text: str) -> int:
    """Lines with code of a function, without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 1
    rows = [*range(node.lineno, node.body[0].lineno), *range(body[0].lineno, (node.end_lineno or 0) + 1)]
    lines = text.splitlines()
    found = (lines[row - 1].strip() for row in dict.fromkeys(rows))
    return sum(1 for line in found if line and not line.startswith("#"))


def parameters(node: Function) -> int:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([one for one in given if one.arg not in ("self", "cls")])


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that the body of a class declares with a type, and those that its methods give to `self`."""
    declared = {
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    stored = {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }
    return declared | stored


def report(found: Figures) -> str:
    """The figures as text, a line for each, and below it what is counted, where that is a list."""
    lines = []
    for name, count in counts(found).items():
        counted = getattr(found, name)
        lines.append(f"{TITLES[name]}: {count} (aim: at most {AIMS[name]})")
        lines += [f"    {one}" for one in counted] if isinstance(counted, list) else []
    return "\n".join([*lines, f"public modules that only name others: {len(FACADES)}"])


def counts(found: Figures) -> dict[str, int]:
    """The value of each figure."""
    values = {name: getattr(found, name) for name in AIMS}
    return {name: value if isinstance(value, int) else len(value) for name, value in values.items()}


def bounds(found: Figures) -> dict[str, int]:
    """The bounds that hold the figures: the aims that are met, and else the present values."""
    return {name: max(count, AIMS[name]) for name, count in counts(found).items()}


if __name__ == "__main__":
    present = figures()
    print(report(present))
    if "--hold" in sys.argv[1:]:
        BOUNDS.write_text(json.dumps(bounds(present), indent=1) + "\n")
        print(f"wrote {BOUNDS}")
