"""Folders of steps, and of runs, that are symbolic links: read as any other, and never removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run as run_cli
from shardproof.storage import LocalStorage


def save(run: Path, *steps: int, keep: int | None = None) -> None:
    """Saves steps incrementally. Half of the state never changes: later steps refer to the first for it."""
    policy = None if keep is None else sp.KeepLatest(keep)
    checkpointer = sp.Checkpointer(run, keep=policy, incremental=True)
    for step in steps:
        state = {"step": torch.full((1000,), float(step)), "frozen": torch.ones(1000)}
        checkpointer.save(step, state).result()
        checkpointer.wait_for_scrub(timeout=60)  # retention keeps the last step that is proved readable


def restored(run: Path, step: int | None = None) -> int | None:
    """Restores a step, checks its values, and returns its number."""
    state = {"step": torch.zeros(1000), "frozen": torch.zeros(1000)}
    found = sp.Checkpointer(run).restore(state, step=step)
    if found is not None:
        assert torch.equal(state["step"], torch.full((1000,), float(found)))
        assert torch.equal(state["frozen"], torch.ones(1000))
    return found


def move_away(run: Path, step: int) -> Path:
    """Moves a step to an archive, leaves a link, and returns the new folder."""
    folder = run / f"step-{step:08d}"
    archived = run.parent / "archive" / folder.name
    archived.parent.mkdir(exist_ok=True)
    shutil.move(folder, archived)
    folder.symlink_to(archived)
    return archived


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def call(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    """Runs a command with --json, which must succeed, and returns what it prints."""
    assert run_cli([*map(str, arguments), "--json"]) == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    save(folder, 1, 2)
    return folder


def test_a_linked_run_is_saved_restored_listed_and_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").mkdir()
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "disk")
    save(run, 1, 2, 3, 4, keep=2)
    assert sp.Checkpointer(run).steps() == [3, 4]
    assert restored(run) == 4 and restored(run, 3) == 3
    listed = call(capsys, "ls", run)["checkpoints"]
    assert [(info["step"], info["status"], info["linked"]) for info in listed] == [
        (1, "referenced", False),
        (3, "committed", False),
        (4, "committed", False),
    ]
    assert call(capsys, "verify", run / "step-00000004")["ok"]
    assert call(capsys, "prune", run, "--keep", 1, "--yes")["steps"] == ["step-00000003"]
    assert restored(run) == 4


def test_a_linked_step_is_restored_listed_and_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    move_away(run, 2)
    assert sp.Checkpointer(run).steps() == [1, 2]
    assert restored(run) == restored(run, 2) == 2
    first, second = call(capsys, "ls", run)["checkpoints"]
    assert (first["status"], first["linked"], first["referenced_by"]) == (
        "committed",
        False,
        ["step-00000002"],
    )
    assert (second["status"], second["linked"]) == ("committed", True)
    assert call(capsys, "verify", run / "step-00000002")["ok"]
    assert call(capsys, "diff", run / "step-00000002", run / "step-00000002")["same"]


@pytest.mark.parametrize("how", ["retention", "prune"])
def test_files_that_a_linked_step_refers_to_stay(
    run: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    archived = move_away(run, 2)
    before = files(archived)
    if how == "retention":
        save(run, 3, 4, keep=1)
    else:
        save(run, 3, 4)
        plan = call(capsys, "prune", run, "--keep", 1, "--yes", "--older-than", "0s")
        assert plan["steps"] == ["step-00000001", "step-00000003"]
    proved = [3] if how == "retention" else []  # the newest step that is proved readable when 4 is committed
    assert sp.Checkpointer(run).steps() == [2, *proved, 4]
    assert restored(run, 2) == 2 and restored(run) == 4
    assert files(archived) == before and (run / "step-00000002").is_symlink()


@pytest.mark.parametrize("how", ["retention", "prune"])
def test_files_of_a_linked_step_are_never_removed(
    run: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    archived = move_away(run, 1)
    (archived / "shards" / "00007-dead.safetensors").write_bytes(b"of a dead save")
    before = files(archived)
    save(run, 3)
    assert restored(run) == 3, "which refers to a file of the linked step"
    policy = 1 if how == "retention" else None
    checkpointer = sp.Checkpointer(run, keep=None if policy is None else sp.KeepLatest(1))
    checkpointer.save(4, {"step": torch.full((1000,), 4.0), "frozen": torch.ones(1000)}).result()
    if how == "prune":
        call(capsys, "prune", run, "--keep", 1, "--yes", "--older-than", "0s")
    assert sp.Checkpointer(run).steps() == [1, 4]
    assert files(archived) == before and (run / "step-00000001").is_symlink()


def test_overwriting_leaves_files_of_a_linked_step(run: Path) -> None:
    archived = move_away(run, 1)
    (archived / "manifest.json").unlink()  # only its referenced files stay
    before = files(archived)
    state = {"step": torch.full((1000,), 2.0), "frozen": torch.ones(1000)}
    sp.Checkpointer(run).save(2, state, overwrite=True).result()
    assert restored(run) == 2 and files(archived) == before


def test_restore_takes_no_older_step_if_the_newest_is_a_lost_link(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(move_away(run, 2))
    for step in (None, 2):
        with pytest.raises(sp.StorageError, match="step-00000002 is a symbolic link to .*nothing is there"):
            restored(run, step)
    listed = call(capsys, "ls", run)["checkpoints"]
    assert [(info["step"], info["status"]) for info in listed] == [(1, "committed"), (2, "unreadable")]
    assert run_cli(["verify", str(run / "step-00000002")]) in (2, 3)


def test_an_old_step_that_is_a_lost_link_fails_no_save_and_no_restore(
    run: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(move_away(run, 2))
    save(run, 3)
    assert restored(run) == 3
    before = files(run / "step-00000001")
    save(run, 4, keep=1)
    assert "symbolic link" in caplog.text, "it may refer to anything, so nothing was removed"
    call(capsys, "prune", run, "--keep", 1, "--yes", "--older-than", "0s")
    assert {name for name in before if name.startswith("shards/")} <= files(run / "step-00000001").keys()


@pytest.mark.parametrize("name", ["latest", "step-00000009"])
def test_a_link_to_a_step_is_not_another_step(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).symlink_to("step-00000002")
    assert sp.Checkpointer(run).steps() == [1, 2]
    assert restored(run) == 2
    assert [info["step"] for info in call(capsys, "ls", run)["checkpoints"]] == [1, 2]
    checkpointer = sp.Checkpointer(run, keep=sp.KeepLatest(1))
    checkpointer.save(3, {"step": torch.full((1000,), 3.0), "frozen": torch.ones(1000)}).result()
    assert not os.path.exists(run / name)
    assert not list(run.glob("step-00000001/*")), "the link keeps nothing, also when it leads nowhere"
    assert restored(run) == 3


def test_a_linked_suspect_is_restored_and_never_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = {"w": torch.ones(3)}
    sp.Checkpointer(run).save(5, state, suspect=True).result()
    shutil.move(run / "suspect-00000005", tmp_path / "kept")
    (run / "suspect-00000005").symlink_to(tmp_path / "kept")
    checkpointer = sp.Checkpointer(run, keep=sp.KeepLatest(1))
    assert checkpointer.suspects() == [5]
    assert checkpointer.restore(state, suspect=True) == 5
    with pytest.raises(sp.StorageError, match="suspect-00000005 is a symbolic link"):
        checkpointer.settle_suspect(5, "transient")
    checkpointer.save(6, state).result()
    assert (tmp_path / "kept" / "manifest.json").exists()


def test_a_linked_folder_of_shards_is_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = run / "step-00000002" / "shards"
    shutil.move(shards, run.parent / "fast disk")
    shards.symlink_to(run.parent / "fast disk")
    assert restored(run) == 2
    assert [info["status"] for info in call(capsys, "ls", run)["checkpoints"]] == ["committed"] * 2
    assert call(capsys, "prune", run, "--damaged", "--yes")["damaged_removed"] == []


@pytest.mark.parametrize("how", ["retention", "prune"])
def test_no_file_behind_a_link_is_removed(
    run: Path, how: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The shards of a step are those of another run. A later step refers to a file in them."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    before = files(other)
    shutil.rmtree(run / "step-00000001")
    (run / "step-00000001").mkdir()
    (run / "step-00000001" / "shards").symlink_to(other / "step-00000001" / "shards")
    assert restored(run) == 2, "which refers to a file there"
    checkpointer = sp.Checkpointer(run, keep=sp.KeepLatest(1) if how == "retention" else None)
    checkpointer.save(3, {"step": torch.full((1000,), 3.0), "frozen": torch.ones(1000)}).result()
    if how == "prune":
        call(capsys, "prune", run, "--keep", 1, "--yes", "--older-than", "0s")
    assert sp.Checkpointer(run).steps() == [3] and restored(run) == 3
    assert files(other) == before and restored(other) == 2


def test_a_folder_that_another_process_removes_is_no_lost_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "step-00000001", os.path.lexists
    folder.mkdir()

    def removed_after_the_look(path: os.PathLike[str]) -> bool:
        found = real(path)
        if Path(path) == folder:
            folder.rmdir()
        return found

    monkeypatch.setattr(os.path, "lexists", removed_after_the_look)
    assert LocalStorage(tmp_path).size("step-00000001/manifest.json") is None
    assert not folder.exists()
