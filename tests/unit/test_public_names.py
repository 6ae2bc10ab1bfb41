"""The names of `shardproof`: where they come from, and what loads them."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch

import shardproof as sp


def test_a_checkpoint_does_not_hold_the_name_of_the_class(tmp_path: Path) -> None:
    """What is stored depends on the values, so a class may be renamed."""
    sp.save(tmp_path / "c", {"w": sp.LocalShards((4,), [(torch.ones(4), (0,))])})
    stored = b"".join(path.read_bytes() for path in sorted((tmp_path / "c").rglob("*")) if path.is_file())
    assert b'"w"' in stored
    assert b"LocalShards" not in stored and b"ShardedTensor" not in stored


PACKAGES = ("events", "fsdp", "geometry", "layouts", "optim", "rendezvous", "rerun", "storage")


def test_a_public_package_is_an_attribute_and_loads_when_it_is_used() -> None:
    """A child for each package, forked from one process that has imported torch and nothing of shardproof."""
    run_python(
        "import os, sys, torch\n"
        "def use(name):\n"
        "    import shardproof as sp\n"
        "    assert f'shardproof.{name}' not in sys.modules, f'{name} loads before it is used'\n"
        "    package = getattr(sp, name)\n"
        "    assert package.__name__ == f'shardproof.{name}'\n"
        "    assert all(getattr(package, one) is not None for one in package.__all__), name\n"
        f"for name in {PACKAGES!r}:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        use(name)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, name\n"
    )


def test_dir_and_all_list_the_same_names() -> None:
    assert dir(sp) == sp.__all__ == sorted(set(sp.__all__))
    assert set(PACKAGES) < set(sp.__all__)


def test_imports_for_type_checkers_have_the_same_names_and_modules() -> None:
    """The imports that only type checkers read offer each public name, and say where it comes from."""
    (block,) = [
        node
        for node in ast.parse(Path(sp.__file__).read_text()).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    declared = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names:
            assert alias.asname == alias.name, f"{alias.name} is not offered: import it as itself"
            declared[alias.name] = statement.module
    assert sorted([*declared, "__version__"]) == sp.__all__
    for name, home in declared.items():
        assert getattr(sp, name) is getattr(import_module(home), name)


def run_python(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
