"""The source and the documentation agree with the one list of phases."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shardproof.events import PHASES, KnownPhase
from shardproof.training.rerun.transitions import State

ROOT = Path(__file__).parents[4]
SOURCE = ROOT / "src" / "shardproof"
OPENERS = {"phase", "_phase", "track"}
NAMES = {phase.name for phase in PHASES}


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else (function.id if isinstance(function, ast.Name) else "")
    )


def functions_with_phase(trees: list[ast.Module]) -> dict[str, set[int]]:
    """Functions with a parameter `phase: str`, and its positions in a call."""
    found: dict[str, set[int]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                for place, argument in enumerate(
                    one for one in node.args.args if one.arg not in ("self", "cls")
                ):
                    if argument.arg == "phase" and ast.unparse(argument.annotation or node) == "str":
                        found.setdefault(node.name, set()).add(place)
    return found


def phases_of(tree: ast.Module, functions: dict[str, set[int]]) -> Iterator[tuple[int, str]]:
    """Line and name of each phase that a module opens, meets in, or names in an error."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = _called(node)
            found += [keyword.value for keyword in node.keywords if keyword.arg == "phase"]
            if name in OPENERS:
                found += node.args
            elif name == "partial" and node.args and ast.unparse(node.args[0]).split(".")[-1] in OPENERS:
                found += node.args[1:]
            elif name == "meet":  # of a rendezvous: operation, phase, post, decide; else: phase, work, decide
                found += node.args[:2] if len(node.args) == 4 else node.args[:1]
            elif name in ("exchange", "exchange_each"):  # phase, work, decide, post, answer
                found += node.args[:1]
            else:
                found += [node.args[place] for place in functions.get(name, ()) if place < len(node.args)]
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "phase" for target in node.targets
        ):
            found.append(node.value)
        for value in found:
            if (text := _text(value)) is not None:
                yield node.lineno, text


@cache
def phases_of_source() -> dict[str, list[str]]:
    """Each phase that the package names, with its places."""
    packages: dict[Path, dict[Path, ast.Module]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        package = (
            SOURCE / "frameworks" if place.parts[0] == "frameworks" else path.parent
        )  # it has shared parts
        packages.setdefault(package, {})[path] = ast.parse(path.read_text())
    found: dict[str, list[str]] = {}
    for trees in packages.values():
        functions = functions_with_phase(list(trees.values()))
        for path, tree in trees.items():
            for line, name in phases_of(tree, functions):
                found.setdefault(name, []).append(f"{path.relative_to(SOURCE)}:{line}")
    return found


def test_every_phase_of_the_source_is_in_the_list() -> None:
    assert {name: places for name, places in phases_of_source().items() if name not in NAMES} == {}


def test_every_phase_of_the_list_is_in_the_source() -> None:
    votes = {state.value for state in State}  # the phase of a vote is the state of the machine
    assert NAMES - set(phases_of_source()) - votes == set()


def test_every_state_that_votes_is_a_phase() -> None:
    listed = [phase.name for phase in PHASES if phase.operation == "validate"]
    assert [state.value for state in State if state is not State.NOT_RUNNING] == listed


@pytest.mark.parametrize(
    "source",
    [
        "with events.phase(operation, 'new'): pass",
        "with self._phase('new') as phase: pass",
        "open = partial(self._phase, 'new')",
        "meeting.meet('new', work, decide)",
        "meeting.exchange('new', work, decide, bool, bool)",
        "meeting.exchange_each('new', work, decide, bool, bool)",
        "rendezvous.meet(operation, 'new', b'', decide)",
        "raise RankFailure('text', phase='new')",
        "def _meet(meetings, phase: str): pass\n_meet(meetings, 'new')",
        "self.phase = 'new'",
    ],
)
def test_a_phase_is_found_in_the_source(source: str) -> None:
    tree = ast.parse(source)
    assert [name for _, name in phases_of(tree, functions_with_phase([tree]))] == ["new"]


def test_each_phase_of_an_operation_is_listed_once() -> None:
    keys = [(phase.operation, phase.name) for phase in PHASES]
    assert len(keys) == len(set(keys))
    assert all(phase.in_events or phase.in_errors for phase in PHASES)
    events = {phase.name for phase in PHASES if phase.in_events}
    assert {phase.reported_in for phase in PHASES} - {""} <= events


def _row(phase: KnownPhase) -> str:
    kind = phase.kind + (f", reported in `{phase.reported_in}`" if phase.reported_in else "")
    return f"| {phase.operation} | `{phase.name}` | {kind} | {phase.text} |"


def _rows(page: str) -> list[str]:
    """The rows of the table of phases in a page of the documentation."""
    _, _, rest = (
        (ROOT / "docs" / page)
        .read_text()
        .partition("| operation | phase | kind | what a rank does in it |\n")
    )
    table = rest.partition("\n\n")[0].splitlines()
    return table[1:]


def test_the_pages_show_the_listed_phases() -> None:
    assert _rows("events.md") == [_row(phase) for phase in PHASES if phase.in_events]
    assert _rows("failures.md") == [_row(phase) for phase in PHASES if phase.in_errors]


def test_the_pages_name_the_phases_that_their_table_leaves_out() -> None:
    events, failures = ((ROOT / "docs" / page).read_text() for page in ("events.md", "failures.md"))
    in_events = {phase.name for phase in PHASES if phase.in_events}
    in_errors = {phase.name for phase in PHASES if phase.in_errors}
    assert all(f"`{name}`" in " ".join(events.split()) for name in in_errors - in_events)
    assert all(f"`{name}`" in " ".join(failures.split()) for name in in_events - in_errors)
