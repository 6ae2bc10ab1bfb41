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

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardproof"

ENGINE = (
    "version",
    "_utils",
    "errors",
    "reentrance",
    "events",
    "dtypes",
    "geometry",
    "state",
    "planning",
    "rendezvous",
    "storage",
    "format",
    "interop",
    "saving",
    "loading",
    "maintenance",
    "conversion",
    "checkpointer",
)
TRAINING = ("collectives", "layouts", "optim", "fsdp", "rerun")
PEOPLE = ("cli", "report")
ADAPTERS = ("frameworks",)

MAY_IMPORT: dict[str, frozenset[str]] = {
    name: frozenset(ENGINE[: row + 1]) for row, name in enumerate(ENGINE)
}
MAY_IMPORT |= {
    name: frozenset({"version", "_utils", "errors", "dtypes", "geometry", "state", "collectives", name})
    for name in TRAINING
}
MAY_IMPORT["loading"] -= {"saving"}  # two pipelines side by side
MAY_IMPORT["rerun"] |= {"rendezvous"}  # its votes are meetings; it moves no state
MAY_IMPORT |= {name: frozenset({*ENGINE, *TRAINING, *PEOPLE, ""}) for name in PEOPLE}
MAY_IMPORT |= {name: frozenset({*ENGINE, *TRAINING, *ADAPTERS, ""}) for name in ADAPTERS}
MAY_IMPORT |= {"": frozenset({*ENGINE, *TRAINING}), "__main__": frozenset({"cli"})}

NO_TORCH_ON_IMPORT = (
    "version",
    "errors",
    "reentrance",
    "events",
    "dtypes",
    "geometry",
    "planning",
    "storage",
    "format",
    "cli",
    "report",
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
    "loading/read_once/group_collectives.py": {"dist.all_reduce", "dist.all_to_all_single"}
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


def layer_of(path: Path) -> str:
    """The layer a file belongs to: its first folder or its stem; the top's ``__init__`` is ''."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


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


def layers_imported(found: Import) -> set[str]:
    """The layers of shardproof that an import reaches ('' for the top's lazy names, which reach all)."""
    if found.module == "shardproof":
        if found.name is None:
            return {""}
        if found.name == "__version__":
            return set()
        return {
            found.name if (SOURCE / found.name).is_dir() or (SOURCE / f"{found.name}.py").is_file() else ""
        }
    if found.module.startswith("shardproof."):
        return {found.module.split(".")[1]}
    return set()


def deep_imports(layer: str, source: str) -> list[str]:
    """What a file of `layer` imports from inside another package, one line each; `_utils` is exempt."""
    return [
        f"line {found.line}: imports {found.module}; import from shardproof.{found.module.split('.')[1]}"
        for found in facts_of(source).imports
        if found.module.startswith("shardproof.")
        and found.module.count(".") >= 2
        and found.module.split(".")[1] not in {layer, "_utils"}
    ]


def module_name(path: Path) -> str:
    """The name that a file of the package is imported by."""
    return ".".join(("shardproof", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def modules_imported(source: str, known: Mapping[str, str]) -> set[str]:
    """The `known` modules that a file imports: at load, inside functions or for type checkers."""
    found = set()
    for entry in facts_of(source).imports:
        inside = f"{entry.module}.{entry.name}"
        found.add(inside if inside in known else entry.module)
    return found & set(known)


def wrong_imports(layer: str, source: str) -> list[str]:
    """What a file of `layer` with this source imports against the rules, one line each."""
    wrong = []
    for found in facts_of(source).imports:
        what = f"line {found.line}: imports {found.module}{'.' + found.name if found.name else ''}"
        above = layers_imported(found) - MAY_IMPORT[layer]
        if above:
            wrong.append(f"{what}, which is not below {layer!r}")
        torch = found.module.split(".")[0] == "torch"
        if torch and layer == "geometry":
            wrong.append(f"{what}, but geometry knows nothing of torch")
        elif torch and found.at_load and layer in NO_TORCH_ON_IMPORT:
            wrong.append(f"{what} when it is loaded; import torch inside the function that needs it")
        if torch and layer == "format" and "distributed" in f"{found.module}.{found.name}".split("."):
            wrong.append(f"{what}, but a file format has no ranks")
        if torch and found.name in STORES and layer != "rendezvous":
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
    """What `check(layer, source)` finds in the files of the package, by file; only files with findings."""
    found = {
        path.relative_to(SOURCE).as_posix(): list(check(layer_of(path), source))
        for path, source in SOURCES.items()
    }
    return {name: lines for name, lines in found.items() if lines}


def test_every_file_has_a_layer() -> None:
    unknown = {layer_of(path) for path in FILES} - set(MAY_IMPORT)
    assert unknown == set(), "no layers of ARCHITECTURE.md: give them their places in the list"


def test_a_file_imports_only_what_is_below_it() -> None:
    assert findings(wrong_imports) == {}


def test_saves_and_loads_run_no_collective() -> None:
    """The packages that train have collectives of their own."""

    def mentioned(layer: str, source: str) -> set[str]:
        if layer in TRAINING:
            return set()
        return {line.partition(": ")[2] for line in collectives(source)}

    found = findings(mentioned)
    assert {name: set(lines) for name, lines in found.items()} == READ_ONCE_COLLECTIVES


def test_only_rendezvous_uses_a_store() -> None:
    assert findings(lambda layer, source: [] if layer in {"rendezvous", *TRAINING} else stores(source)) == {}


def test_a_package_is_imported_by_others_through_its_init_alone() -> None:
    assert findings(deep_imports) == {}


def test_no_two_modules_have_one_name() -> None:
    """So that a name says which file is meant. Both optimizers have their own ``optimizer.py``."""
    names = Counter(path.stem for path in FILES)
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
    present = [name for name in NO_TORCH_ON_IMPORT if layer_exists(name)]
    modules = [
        "shardproof." + ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if layer_of(path) in present and path.stem != "conformance"
    ]
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
    declared, optional = (
        {re.split(r"[<>=~!\[; ]", entry, maxsplit=1)[0].replace("-", "_") for entry in entries}
        for entries in (project["dependencies"], extras)
    )
    imported = {
        found.module.split(".")[0]
        for path in FILES
        if path.stem != "conformance" and layer_of(path) not in ADAPTERS  # whose framework the user has
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


# The checks themselves.


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("geometry", "import torch"),
        ("geometry", "def f():\n    import torch.nn"),
        ("geometry", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("geometry", "from shardproof.state import collect"),
        ("planning", "import torch"),
        ("planning", "try:\n    from torch import Tensor\nexcept ImportError:\n    pass"),
        ("planning", "class A:\n    import torch"),
        ("state", "def f():\n    from shardproof.planning import plan_writes"),
        ("state", "from shardproof import planning"),
        ("storage", "from shardproof import save"),
        ("loading", "import shardproof as sp"),
        ("loading", "import shardproof.checkpointer"),
        ("loading", "from shardproof.saving import open_all"),
        ("loading", "from shardproof.cli import main"),
        ("format", "def f():\n    import torch.distributed as dist"),
        ("format", "def f():\n    from torch import distributed"),
        ("saving", "from torch.distributed import TCPStore"),
        ("optim", "from shardproof.saving import save"),
    ],
)
def test_a_wrong_import_is_found(layer: str, source: str) -> None:
    assert wrong_imports(layer, source) != []


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("planning", "def f():\n    import torch"),
        ("planning", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("format", "from shardproof import __version__, errors"),
        ("state", "from shardproof.state.pieces import Piece"),
        ("rendezvous", "from torch.distributed import TCPStore"),
        ("cli", "import shardproof as sp"),
    ],
)
def test_a_right_import_passes(layer: str, source: str) -> None:
    assert wrong_imports(layer, source) == []


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
        "from shardproof.state.fence import Fence",
        "def f():\n    from shardproof.state.fence import Fence",
        "import shardproof.state.fence",
    ],
)
def test_a_deep_import_is_found(source: str) -> None:
    assert deep_imports("saving", source) != []
    assert deep_imports("state", source) == []


def test_modules_imported_are_files() -> None:
    known = dict.fromkeys(("shardproof.state", "shardproof.state.fence", "shardproof.errors"), "")
    source = (
        "from shardproof.state import fence, collect\nfrom shardproof.errors import FormatError\nimport os"
    )
    assert modules_imported(source, known) == {
        "shardproof.state",
        "shardproof.state.fence",
        "shardproof.errors",
    }
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shardproof.errors"
    assert modules_imported(for_types, known) == {"shardproof.errors"}


def layer_exists(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


def run_python(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
