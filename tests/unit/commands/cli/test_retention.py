"""Names of steps, policies, and the removal of steps and leftovers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.runs.checkpointer.policies import KeepLatest
from shardproof.runs.checkpointer.retention import Leftover, delete_steps, leftovers, remove_leftover
from shardproof.runs.checkpointer.step_folders import is_ours, parse_step, step_name
from shardproof.storage import LocalStorage
from tests.unit.commands.cli.samples import Sample, write

STATE = Sample({"w": np.arange(6, dtype=np.float32)})


def attempt(name: str) -> Sample:
    return Sample(STATE.tensors, attempt=name)


def locate_files(folder: Path) -> list[str]:
    return LocalStorage(folder).list()


def long_ago(_name: str) -> float:
    return 0.0


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 100_000_000, 10**18 - 1])
def test_a_name_is_read_back(step: int) -> None:
    assert parse_step(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["step-7", "step-0000000001x", "step-000000007", "step-٠٠٠٠٠٠٠١", "Step-00000001", "step-00000001/", ""],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert parse_step(name) is None


@pytest.mark.parametrize("step", [-1, 10**18, True, 1.0, "1"])
def test_other_values_are_no_steps(step: Any) -> None:
    with pytest.raises(ValueError, match="a step is a whole number"):
        step_name(step)


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "3", None])
def test_a_policy_that_keeps_nothing_is_refused(n: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KeepLatest(n)


def test_the_newest_are_kept() -> None:
    assert KeepLatest(2).select([5, 100, 20]) == {20, 100}
    assert KeepLatest(2).select([5]) == {5}
    assert KeepLatest(2).select([]) == set()


@pytest.mark.parametrize(
    "name",
    [
        MANIFEST_NAME,
        "index-a-b.c.safetensors",
        "shards/00001-x.safetensors",
        "shards/123456-x.safetensors",
        "index-a.safetensors.0f.tmp",
        "manifest.json.0f.tmp",
    ],
)
def test_names_of_files_of_shardproof(name: str) -> None:
    assert is_ours(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "shards/readme.txt",
        "model.safetensors",
        "x/shards/00001-x.safetensors",
        "manifest.json.bak",
        "notes.tmp",
        "shards/00001-x.safetensors/x",
    ],
)
def test_names_of_other_files(name: str) -> None:
    assert not is_ours(name)


def test_a_deleted_step_is_gone_with_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", STATE)
    write(tmp_path / "step-00000002", STATE)
    delete_steps(LocalStorage(tmp_path), ["step-00000001"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", STATE)
    (tmp_path / "step-00000001" / "tokenizer.json").write_text("{}")
    delete_steps(LocalStorage(tmp_path), ["step-00000001"])
    assert locate_files(tmp_path) == ["step-00000001/tokenizer.json"]


class DiesAfter(LocalStorage):
    """Raises KeyboardInterrupt before the deletion that follows `deletions` others."""

    def __init__(self, root: Path, deletions: int) -> None:
        super().__init__(root)
        self.left = deletions

    def delete(self, name: str) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        super().delete(name)


@pytest.mark.parametrize("deletions", range(3))
def test_a_deletion_that_dies_leaves_the_step_whole_or_a_leftover(tmp_path: Path, deletions: int) -> None:
    manifest = write(tmp_path / "step-00000001", STATE)
    with pytest.raises(KeyboardInterrupt):
        delete_steps(DiesAfter(tmp_path, deletions), ["step-00000001"])
    left = set(locate_files(tmp_path / "step-00000001"))
    if MANIFEST_NAME in left:
        assert {manifest.index.name, manifest.files[0].name} <= left
    else:
        assert len(leftovers(LocalStorage(tmp_path), long_ago)) == 1


def test_leftovers_are_files_that_no_manifest_names(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", attempt("dead"), commit=False)
    write(tmp_path / "step-00000001", attempt("live"))
    write(tmp_path / "step-00000002", attempt("dead2"), commit=False)
    write(tmp_path / "step-00000003", attempt("live3"))
    (tmp_path / "step-00000003" / "manifest.json.0f.tmp").write_text("")
    (tmp_path / "step-00000003" / "tokenizer.json").write_text("")
    write(tmp_path / "mine", attempt("other"), commit=False)
    found = leftovers(LocalStorage(tmp_path), long_ago)
    assert [(left.folder, left.attempt, left.committed) for left in found] == [
        ("step-00000001", "dead", True),
        ("step-00000002", "dead2", False),
        ("step-00000003", "", True),
    ]
    assert found[0].files == ("index-dead.safetensors", "shards/00000-dead.safetensors")
    assert found[0].bytes == sum(
        (tmp_path / "step-00000001" / name).stat().st_size for name in found[0].files
    )
    for leftover in found:
        assert remove_leftover(LocalStorage(tmp_path), leftover)
    assert leftovers(LocalStorage(tmp_path), long_ago) == []
    assert read_manifest(LocalStorage(tmp_path / "step-00000001")).attempt == "live"
    assert not (tmp_path / "step-00000002").exists()
    assert (tmp_path / "step-00000003" / "tokenizer.json").exists()
    assert (tmp_path / "mine" / "shards").exists()


def test_a_folder_whose_manifest_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", STATE)
    (tmp_path / "step-00000001" / MANIFEST_NAME).write_bytes(b"{}")
    assert leftovers(LocalStorage(tmp_path), long_ago) == []


def test_a_leftover_that_was_committed_meanwhile_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    write(folder, STATE, commit=False)
    (leftover,) = leftovers(LocalStorage(tmp_path), long_ago)
    write(tmp_path / "elsewhere", STATE)
    (tmp_path / "elsewhere" / MANIFEST_NAME).rename(folder / MANIFEST_NAME)
    assert not remove_leftover(LocalStorage(tmp_path), leftover)
    assert set(leftover.files) <= set(locate_files(folder))


def test_the_youngest_file_sets_the_age_of_an_attempt(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", Sample(STATE.tensors, world_size=2), commit=False)
    times = {"step-00000001/shards/00001-a1.safetensors": 900.0}
    (leftover,) = leftovers(LocalStorage(tmp_path), lambda name: times.get(name, 0.0))
    assert leftover.older_than(100, now=1000.0)
    assert not leftover.older_than(101, now=1000.0)


def test_a_leftover_of_unknown_age_is_young() -> None:
    assert not Leftover("step-00000001", "a", ("x",), 0, None, False).older_than(0, now=1e12)
