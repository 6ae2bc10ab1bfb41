"""The layers of ARCHITECTURE.md, checked against every import of the source, also inside functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from tests.rooms import (
    FACADES,
    GROUND,
    PUBLIC,
    ROOT,
    SOURCE,
    WINGS,
    module_of,
    room_of,
    room_of_module,
    rooms,
)

BELOW_TRAINING = {"version", "_utils", "errors", "dtypes", "engine.geometry", "engine.state"}


def _floors() -> dict[str, frozenset[str]]:
    """What each room may import: the wings rise from the engine, and so do the rooms of a wing."""
    engine, training, formats, runs = map(rooms, ("engine", "training", "formats", "runs"))
    found = {name: {*GROUND[: row + 1]} for row, name in enumerate(GROUND)}
    found |= {name: {*GROUND, *engine[: row + 1]} for row, name in enumerate(engine)}
    found["engine.loading"] -= {"engine.saving"}  # two pipelines side by side
    found |= {name: {*BELOW_TRAINING, "training.collectives", name} for name in training}
    found["training.rerun"] |= {"engine.rendezvous"}  # its votes are meetings; it moves no state
    found["formats"] = {*GROUND, *engine, "formats"} - {"engine.saving", "engine.loading"}
    found["formats.conversion"] = {*GROUND, *engine, *formats}
    found |= {name: {*GROUND, *engine, *formats, *runs[: row + 1]} for row, name in enumerate(runs)}
    below = {*GROUND, *engine, *training, *formats, *runs, ""}
    found["frameworks"] = {*below, "frameworks"}
    found |= {name: {*below, *rooms("commands")} for name in rooms("commands")}
    found[PUBLIC] = {*below, *rooms("commands"), PUBLIC}
    found |= {"": below | {PUBLIC}, "__main__": {"commands.cli"}}
    return {name: frozenset(below) for name, below in found.items()}


MAY_IMPORT = _floors()
TRAINING = rooms("training")

NO_TORCH_ON_IMPORT = (
    "version",
    "errors",
    "reentrance",
    "dtypes",
    "workers",
    "engine.events",
    "engine.geometry",
    "engine.planning",
    "engine.storage",
    "engine.format",
    "engine.foreign",
    "commands.cli",
    "commands.report",
)
STORES = {"FileStore", "HashStore", "MultiTenantStore", "PrefixStore", "Store", "TCPStore"}

# Collectives, and calls that run one inside.
COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "full_tensor",
    "gather_object",
    "init_device_mesh",
    "init_process_group",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "redistribute",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter_object_list",
}
# Names with other meanings, too. They count only if they come from torch.distributed.
COLLECTIVES_OF_TORCH = {"gather", "irecv", "isend", "recv", "reduce", "scatter", "send"}
NOT_TORCH = {"functools", "np", "numpy"}
READ_ONCE_COLLECTIVES = {
    "engine/loading/read_once/group_collectives.py": {"dist.all_reduce", "dist.all_to_all_single"}
}
"""Collectives that a load may run over the training's group, if the user chose to read once."""


@dataclass(frozen=True)
class Import:
    """One imported name: ``from module import name`` or ``import module`` (no name)."""

    module: str
    name: str | None
    line: int
    at_load: bool
    """Runs when the module is loaded: not inside a function, not for type checkers only."""


def _only_for_types(node: ast.If) -> bool:
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


@dataclass(frozen=True)
class Facts:
    """What the checks need of a source."""

    imports: list[Import]
    """Every import, also those for type checkers alone."""
    attributes: list[tuple[int, list[str]]]
    """Line and path of every attribute: ``["torch", "distributed", "barrier"]``."""
    classes: list[str]
    """Name of every class."""


@cache
def facts_of(source: str) -> Facts:
    """The facts of a source, parsed once for all checks."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    return Facts(
        [*_imports(tree)],
        [(node.lineno, _root_and_path(node)) for node in nodes if isinstance(node, ast.Attribute)],
        [node.name for node in nodes if isinstance(node, ast.ClassDef)],
    )


def _imports(tree: ast.AST, at_load: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, at_load)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are banned by the linter"
            for alias in node.names:
                yield Import(node.module or "", alias.name, node.lineno, at_load)
        elif isinstance(node, ast.If) and _only_for_types(node):
            yield from _imports(ast.Module(node.body, []), False)
            yield from _imports(ast.Module(node.orelse, []), at_load)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(node, at_load and not inside)


def rooms_imported(found: Import) -> set[str]:
    """The rooms that an import reaches ('' for the top's lazy names, which reach all)."""
    package, _, module = found.module.partition(".")
    if package != "shardproof":
        return set()
    inner = f"{module}.{found.name}".strip(".") if found.name else module
    if inner == "__version__":
        return set()
    return {room_of_module(inner if module_exists(inner) else module)}


def deep_imports(room: str, source: str) -> list[str]:
    """What a file of `room` imports from inside another package, one line each; `_utils` is exempt."""
    if room == PUBLIC:
        return []
    found = []
    for entry in facts_of(source).imports:
        module = entry.module.partition("shardproof.")[2]
        there = room_of_module(module)
        if module and there not in {room, PUBLIC, "_utils"} and module != there:
            found.append(f"line {entry.line}: imports {entry.module}; import from shardproof.{there}")
    return found


def module_name(path: Path) -> str:
    """The name that a file of the package is imported by."""
    return f"shardproof.{module_of(path)}".rstrip(".")


def modules_imported(source: str, known: Mapping[str, str]) -> set[str]:
    """The `known` modules that a file imports: at load, inside functions or for type checkers."""
    found = set()
    for entry in facts_of(source).imports:
        inside = f"{entry.module}.{entry.name}"
        found.add(inside if inside in known else entry.module)
    return found & set(known)


def wrong_imports(room: str, source: str) -> list[str]:
    """What a file of `room` with this source imports against the rules, one line each."""
    wrong = []
    for found in facts_of(source).imports:
        what = f"line {found.line}: imports {found.module}{'.' + found.name if found.name else ''}"
        above = rooms_imported(found) - MAY_IMPORT[room]
        if above:
            wrong.append(f"{what}, which is not below {room!r}")
        torch = found.module.split(".")[0] == "torch"
        if torch and room == "engine.geometry":
            wrong.append(f"{what}, but geometry knows nothing of torch")
        elif torch and found.at_load and room in NO_TORCH_ON_IMPORT:
            wrong.append(f"{what} when it is loaded; import torch inside the function that needs it")
        if torch and room == "engine.format" and "distributed" in f"{found.module}.{found.name}".split("."):
            wrong.append(f"{what}, but a file format has no ranks")
        if torch and found.name in STORES and room != "engine.rendezvous":
            wrong.append(f"{what}; only rendezvous talks to a store")
    return wrong


def _root_and_path(node: ast.expr) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return parts[::-1]


def collectives(source: str) -> list[str]:
    """Every mention of a collective, called or passed as a value, one line each."""
    facts = facts_of(source)
    of_torch = {"dist", "distributed", "funcol"}
    found = []
    for entry in facts.imports:
        if entry.module.startswith("torch.distributed") and entry.name in COLLECTIVES | COLLECTIVES_OF_TORCH:
            found.append(f"line {entry.line}: imports {entry.module}.{entry.name}")
        if "_functional_collectives" in f"{entry.module}.{entry.name}":
            found.append(f"line {entry.line}: imports the functional collectives")
    for line, path in facts.attributes:
        if (path[-1] in COLLECTIVES and path[0] not in NOT_TORCH) or (
            path[-1] in COLLECTIVES_OF_TORCH and of_torch & set(path[:-1])
        ):
            found.append(f"line {line}: {'.'.join(path)}")
    return found


def stores(source: str) -> list[str]:
    """Every mention of a store class of torch.distributed as an attribute."""
    return [
        f"line {line}: {'.'.join(path)}"
        for line, path in facts_of(source).attributes
        if path[-1] in STORES and {"dist", "distributed", "torch"} & set(path[:-1])
    ]


FILES = sorted(SOURCE.rglob("*.py"))
SOURCES = {path: path.read_text() for path in FILES}


def findings(check: Callable[[str, str], Iterable[str]]) -> dict[str, list[str]]:
    """What `check(room, source)` finds in the files of the package, by file; only files with findings."""
    found = {
        path.relative_to(SOURCE).as_posix(): list(check(room_of(path), source))
        for path, source in SOURCES.items()
    }
    return {name: lines for name, lines in found.items() if lines}


def test_every_file_has_a_room() -> None:
    wings = {f"shardproof.{wing}" for wing in WINGS}  # an `__init__.py` that only says what the wing is
    unknown = {room_of(path) for path in FILES if module_name(path) not in wings} - set(MAY_IMPORT)
    assert unknown == set(), "no rooms of ARCHITECTURE.md: give them their places in tests/rooms.py"


def test_architecture_names_every_room() -> None:
    wings = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Wings\n")[2].partition("\n## ")[0]
    names = {*GROUND, *WINGS, *chain(*WINGS.values())} - {"version"}
    assert {name for name in names if f"`{name}`" not in wings} == set()


def test_a_file_imports_only_what_is_below_it() -> None:
    assert findings(wrong_imports) == {}


def test_saves_and_loads_run_no_collective() -> None:
    """The packages that train have collectives of their own."""

    def mentioned(room: str, source: str) -> set[str]:
        if room in TRAINING:
            return set()
        return {line.partition(": ")[2] for line in collectives(source)}

    found = findings(mentioned)
    assert {name: set(lines) for name, lines in found.items()} == READ_ONCE_COLLECTIVES


def test_only_rendezvous_uses_a_store() -> None:
    others = {"engine.rendezvous", *TRAINING}
    assert findings(lambda room, source: [] if room in others else stores(source)) == {}


def test_a_package_is_imported_by_others_through_its_init_alone() -> None:
    assert findings(deep_imports) == {}


def test_no_two_modules_have_one_name() -> None:
    """So that a name says which file is meant. Both optimizers have their own ``optimizer.py``."""
    names = Counter(path.stem for path in FILES if room_of(path) != PUBLIC)
    assert {name for name, count in names.items() if count > 1} == {"__init__", "optimizer"}


def test_no_two_classes_have_one_name() -> None:
    """So that a name says which class is meant."""
    names = Counter(name for source in SOURCES.values() for name in facts_of(source).classes)
    assert {name for name, count in names.items() if count > 1} == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    """Counting imports inside functions, and those for type checkers alone."""
    sources = {module_name(path): source for path, source in SOURCES.items()}
    graph = {name: modules_imported(source, sources) - {name} for name, source in sources.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_light_packages_load_without_torch() -> None:
    """Indirect imports of torch count, too."""
    modules = [
        module_name(path)
        for path in FILES
        if path.stem != "conformance"
        and {room_of(path), room_of_module(FACADES.get(module_of(path), ""))} & {*NO_TORCH_ON_IMPORT}
    ]
    assert {*NO_TORCH_ON_IMPORT} == {room_of(path) for path in FILES} & {*NO_TORCH_ON_IMPORT}
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    run_python(script)


def test_importing_the_package_loads_two_of_its_files() -> None:
    """`import shardproof` loads two files, no dependency, and no module of Python but those of `typing`."""
    script = (
        "import __future__, importlib, sys, typing\n"
        "before = set(sys.modules)\n"
        "import shardproof\n"
        "new = set(sys.modules) - before\n"
        "assert new == {'shardproof', 'shardproof.version'}, new\n"
    )
    run_python(script)


def test_every_public_name_loads() -> None:
    import shardproof

    assert sorted(dir(shardproof)) == sorted(shardproof.__all__)
    for name in shardproof.__all__:
        assert getattr(shardproof, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shardproof.nothing


def test_dependencies_are_those_imported() -> None:
    """Nothing is imported that is not declared, nothing declared that is not imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        entry
        for extra, entries in project["optional-dependencies"].items()
        if extra != "dev"
        for entry in entries
    ]
    modules = {"opentelemetry_api": "opentelemetry"}  # of packages that have another name
    declared, optional = (
        {modules.get(name, name) for name in names}
        for names in (
            {re.split(r"[<>=~!\[; ]", entry, maxsplit=1)[0].replace("-", "_") for entry in entries}
            for entries in (project["dependencies"], extras)
        )
    )
    imported = {
        found.module.split(".")[0]
        for path in FILES
        if path.stem != "conformance" and room_of(path) != "frameworks"  # whose framework the user has
        for found in facts_of(SOURCES[path]).imports
    }
    assert imported - sys.stdlib_module_names - {"shardproof"} - optional == declared


def test_pins_cover_all_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    pins = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert {re.split(r"[<>=~!\[; ]", entry, maxsplit=1)[0] for entry in entries} <= pins


def test_every_package_of_a_list_has_the_pinned_version_and_hashes() -> None:
    lists = {}
    names = [f"requirements-{kind}.txt" for kind in ("ci", "cpu", "cuda", "page")]
    assert sorted(path.name for path in ROOT.glob("requirements*.txt")) == names
    for name in names:
        entries = re.findall(
            r"^(\S+)==(\S+) ((?:\\\n    --hash=sha256:[0-9a-f]{64} ?)+)$", (ROOT / name).read_text(), re.M
        )
        lists[name] = {package: version for package, version, _ in entries}
        lines = [line for line in (ROOT / name).read_text().splitlines() if "==" in line]
        assert len(lines) == len(entries), f"{name} has a line without hashes"
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    main, page = lists["requirements-ci.txt"], lists["requirements-page.txt"]
    assert {
        package: version for package, version in (main | page).items() if pins.get(package) != version
    } == {}
    assert "playwright" in page and not page.keys() & main.keys()
    assert "hatchling" in main
    assert lists["requirements-cpu.txt"] == {"torch": f"{pins['torch']}+cpu"}
    assert lists["requirements-cuda.txt"]["torch"] == pins["torch"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {re.split(r"[<>=~!\[; ]", entry, maxsplit=1)[0] for entry in entries} - main.keys() == {"torch"}
    assert not lists["requirements-cuda.txt"].keys() & main.keys()


# The checks themselves.


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engine.geometry", "import torch"),
        ("engine.geometry", "def f():\n    import torch.nn"),
        ("engine.geometry", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("engine.geometry", "from shardproof.engine.state import collect"),
        ("engine.planning", "import torch"),
        ("engine.planning", "try:\n    from torch import Tensor\nexcept ImportError:\n    pass"),
        ("engine.planning", "class A:\n    import torch"),
        ("engine.state", "def f():\n    from shardproof.engine.planning import plan_writes"),
        ("engine.state", "from shardproof.engine import planning"),
        ("engine.storage", "from shardproof import save"),
        ("engine.loading", "import shardproof as sp"),
        ("engine.loading", "import shardproof.runs.checkpointer"),
        ("engine.loading", "from shardproof.engine.saving import open_all"),
        ("engine.loading", "from shardproof.commands.cli import main"),
        ("engine.format", "def f():\n    import torch.distributed as dist"),
        ("engine.format", "def f():\n    from torch import distributed"),
        ("engine.saving", "from torch.distributed import TCPStore"),
        ("training.optim", "from shardproof.engine.saving import save"),
        ("engine.loading", "from shardproof.formats import read_json"),
        ("formats", "from shardproof.engine.loading import load"),
        ("runs.checkpointer", "from shardproof.training import optim"),
        ("engine.saving", "from shardproof.storage import LocalStorage"),
        ("frameworks", "from shardproof import events"),
    ],
)
def test_a_wrong_import_is_found(room: str, source: str) -> None:
    assert wrong_imports(room, source) != []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engine.planning", "def f():\n    import torch"),
        ("engine.planning", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("engine.format", "from shardproof import __version__, errors"),
        ("engine.state", "from shardproof.engine.state.pieces import Piece"),
        ("engine.rendezvous", "from torch.distributed import TCPStore"),
        ("commands.cli", "import shardproof as sp"),
    ],
)
def test_a_right_import_passes(room: str, source: str) -> None:
    assert wrong_imports(room, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "dist.barrier()",
        "torch.distributed.all_reduce(x)",
        "run(dist.broadcast)",
        "x.full_tensor()",
        "dist.gather(x)",
        "from torch.distributed import all_gather_object",
        "from torch.distributed import reduce",
        "import torch.distributed._functional_collectives as funcol",
        "def f(group):\n    group.allgather\n    group.barrier().wait()",
    ],
)
def test_a_collective_is_found(source: str) -> None:
    assert collectives(source) != []


@pytest.mark.parametrize("source", ["np.add.reduce(x)", "np.broadcast(x)", "x.gather(0, i)", "pipe.send(1)"])
def test_other_uses_of_the_words_pass(source: str) -> None:
    assert collectives(source) == []


def test_a_store_is_found() -> None:
    assert stores("torch.distributed.TCPStore('h', 1)") != []
    assert stores("dist.HashStore()") != []
    assert stores("self.Store") == []


@pytest.mark.parametrize(
    "source",
    [
        "from shardproof.engine.state.fence import Fence",
        "def f():\n    from shardproof.engine.state.fence import Fence",
        "import shardproof.engine.state.fence",
    ],
)
def test_a_deep_import_is_found(source: str) -> None:
    assert deep_imports("engine.saving", source) != []
    assert deep_imports("engine.state", source) == []


def test_modules_imported_are_files() -> None:
    names = ("shardproof.engine.state", "shardproof.engine.state.fence", "shardproof.errors")
    known = dict.fromkeys(names, "")
    source = (
        "from shardproof.engine.state import fence, collect\n"
        "from shardproof.errors import FormatError\n"
        "import os"
    )
    assert modules_imported(source, known) == {
        "shardproof.engine.state",
        "shardproof.engine.state.fence",
        "shardproof.errors",
    }
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shardproof.errors"
    assert modules_imported(for_types, known) == {"shardproof.errors"}


def module_exists(name: str) -> bool:
    place = SOURCE / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


def run_python(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
