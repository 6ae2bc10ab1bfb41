"""Public modules stay where programs import them from, and only name what the wings have."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest

from tests.rooms import FACADES, GROUND, SOURCE, WINGS

SOME = {
    "loading": {"Checkpoint", "LoadReport", "StoredTensor", "load", "open"},
}
"""Public modules that name only a part of what their package offers to the others."""


@pytest.mark.parametrize("name", FACADES)
def test_a_facade_names_what_its_target_offers(name: str) -> None:
    facade = import_module(f"shardproof.{name}")
    target = import_module(f"shardproof.{FACADES[name]}")
    assert {*facade.__all__} == SOME.get(name, {*target.__all__})
    for one in facade.__all__:
        if f"{name}.{one}" not in FACADES:  # a facade, too
            assert getattr(facade, one) is getattr(target, one), one


@pytest.mark.parametrize("name", FACADES)
def test_a_facade_has_no_code_of_its_own(name: str) -> None:
    place = SOURCE / name.replace(".", "/")
    path = place.with_suffix(".py")  # a checkout may have bytecode in a folder of the same name
    path = path if path.is_file() else place / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        text = ast.unparse(node)
        assert (
            isinstance(node, ast.ImportFrom | ast.Expr)
            or text.startswith(("__all__ = ", "if TYPE_CHECKING:"))
            or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
        ), text


def test_nothing_else_stands_at_the_top() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")}
    present = modules | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    facades = {name.partition(".")[0] for name in FACADES}
    assert present - {"__init__", "__main__"} == {*GROUND, *WINGS, *facades}
