"""The figures of the structure stay at their aims, or at the values that `tests/golden/figures.json` has."""

from __future__ import annotations

import ast
import json
from functools import cache

import pytest

from tests import figures
from tests.figures import AIMS, BOUNDS, Figures
from tests.rooms import SOURCE

HELD = json.loads(BOUNDS.read_text())


@cache
def present() -> Figures:
    return figures.figures()


def test_each_figure_is_held() -> None:
    assert HELD.keys() == AIMS.keys() == figures.TITLES.keys()
    assert all(HELD[name] >= AIMS[name] for name in AIMS)


@pytest.mark.parametrize("name", AIMS)
def test_a_figure_grows_no_further(name: str) -> None:
    count = figures.counts(present())[name]
    assert count <= HELD[name], (
        f"{figures.TITLES[name]}: {count}. At most {HELD[name]} are held, and {AIMS[name]} are the aim. "
        "`python -m tests.figures` lists them"
    )


# The counts themselves.

TEXT = '''
def _once(a, b):
    """Adds."""
    # a comment

    return a + b

def _twice(): ...

class Thing:
    size: int
    def __init__(self, a, b):
        self.a, self.size = _once(a, b), 0
        self._b = _twice() + _twice()
'''


def test_what_is_counted() -> None:
    once, twice, thing = ast.parse(TEXT).body
    assert isinstance(once, ast.FunctionDef) and isinstance(twice, ast.FunctionDef)
    assert isinstance(thing, ast.ClassDef)
    assert [figures.uses(name, TEXT) for name in ("_once", "_twice")] == [1, 2]
    assert (figures.lines_of(once), figures.code_lines(once, TEXT)) == (5, 2)
    assert figures.parameters(once) == 2
    assert figures.attributes(thing) == {"a", "size", "_b"}


def test_arrows_lead_from_room_to_room_and_leave_out_facades() -> None:
    tree = ast.parse(
        "import shardproof as sp\n"
        "from shardproof import events\n"
        "from shardproof.storage import LocalStorage\n"
        "from shardproof.engine.state import collect\n"
        "from shardproof.runs.checkpointer import Every"
    )
    here = SOURCE / "runs" / "maintenance" / "verify.py"
    assert figures.arrows({here: tree}) == ["runs -> __init__", "runs -> engine"]
