"""The walks through a save and a load that ARCHITECTURE.md shows name files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardproof"
MOST_FILES = {"Save": 10, "Load": 8}


def walk(section: str) -> list[tuple[str, str]]:
    """File and name of each step."""
    text = (ROOT / "ARCHITECTURE.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    files = re.findall(r"`([a-z_/]+\.py)`: (`[A-Za-z_.]+`(?:,(?: then)? `[A-Za-z_.]+`)*)", text)
    return [(file, name) for file, names in files for name in re.findall(r"`([A-Za-z_.]+)`", names)]


def defined(body: list[ast.stmt], names: list[str]) -> bool:
    """True if the first name is defined in `body`, and the others inside of it."""
    kinds = ast.ClassDef | ast.FunctionDef
    return not names or any(
        isinstance(node, kinds) and node.name == names[0] and defined(node.body, names[1:]) for node in body
    )


@pytest.mark.parametrize("section", ["Save", "Load"])
def test_the_walk_names_files_and_functions_that_exist(section: str) -> None:
    steps = walk(section)
    assert len(steps) >= 8
    for file, name in steps:
        tree = ast.parse((SOURCE / file).read_text())
        assert defined(tree.body, name.split(".")), f"{file} has no {name}"


@pytest.mark.parametrize("section", ["Save", "Load"])
def test_the_walk_is_short_and_returns_to_no_file(section: str) -> None:
    files = [file for file, _ in walk(section)]
    entered = [file for at, file in enumerate(files) if at == 0 or files[at - 1] != file]
    assert len(set(files)) <= MOST_FILES[section]
    assert len(entered) == len(set(entered)), entered
