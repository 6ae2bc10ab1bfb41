"""The names of `shardproof`: where they come from, what loads them, and which old ones still work."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

import shardproof as sp


def test_the_old_name_of_local_shards_works_and_warns_where_it_is_used() -> None:
    with pytest.warns(DeprecationWarning, match=r"shardproof\.LocalShards") as caught:
        old = sp.ShardedTensor
    assert old is sp.LocalShards
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(DeprecationWarning, match=r"shardproof\.LocalShards") as caught:
        from shardproof import ShardedTensor
    assert ShardedTensor is sp.LocalShards
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        ("geometry", "Embedding", "IndexMap"),
        ("rendezvous", "Meetings", "MeetingSequence"),
        ("rerun", "Kept", "StepState"),
    ],
)
def test_old_names_of_packages_work_and_warn_where_they_are_used(package: str, old: str, new: str) -> None:
    module = import_module(f"shardproof.{package}")
    with pytest.warns(DeprecationWarning, match=rf"shardproof\.{package}\.{new}") as caught:
        found = getattr(module, old)
    assert found is getattr(module, new)
    assert [warning.filename for warning in caught] == [__file__]
    assert old not in module.__all__
    with pytest.raises(AttributeError, match="no attribute 'never'"):
        module.never  # noqa: B018


def test_the_new_name_does_not_warn_and_the_old_one_is_not_listed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sp.LocalShards.__name__ == "LocalShards"
    assert "LocalShards" in sp.__all__ and "ShardedTensor" not in {*sp.__all__, *dir(sp)}


def test_a_checkpoint_does_not_hold_the_name_of_the_class(tmp_path: Path) -> None:
    """What is stored depends on the values, so a class may be renamed."""
    sp.save(tmp_path / "c", {"w": sp.LocalShards((4,), [(torch.ones(4), (0,))])})
    stored = b"".join(path.read_bytes() for path in sorted((tmp_path / "c").rglob("*")) if path.is_file())
    assert b'"w"' in stored
    assert b"LocalShards" not in stored and b"ShardedTensor" not in stored


PACKAGES = ("events", "fsdp", "geometry", "layouts", "optim", "rendezvous", "rerun", "storage")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_public_package_is_an_attribute_and_loads_when_it_is_used(name: str) -> None:
    script = (
        "import sys\n"
        "import shardproof as sp\n"
        f"assert 'shardproof.{name}' not in sys.modules\n"
        f"assert sp.{name}.__name__ == 'shardproof.{name}'\n"
        f"assert all(getattr(sp.{name}, one) is not None for one in sp.{name}.__all__)\n"
    )
    run_python(script)


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


def test_attributes_of_results_that_were_renamed_warn_and_work(tmp_path: Path) -> None:
    pending = sp.PendingSave(3, None)
    with pytest.warns(DeprecationWarning, match="PendingSave.mark_reported") as caught:
        pending.tell()
    with pytest.warns(DeprecationWarning, match="PendingSave.wait_for_end") as caught_settle:
        pending.settle()
    sp.save(tmp_path / "step", {"w": torch.ones(2)})
    report = sp.load(tmp_path / "step", {"w": torch.zeros(2)})
    with pytest.warns(DeprecationWarning, match="LoadReport.unchanged") as caught_too:
        assert report.kept == report.unchanged == ()
    assert {warning.filename for warning in (*caught, *caught_settle, *caught_too)} == {__file__}
