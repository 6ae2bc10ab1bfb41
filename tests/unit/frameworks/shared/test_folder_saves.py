"""Older checkpoints are removed after the commit of the newest one, and stay if it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.frameworks.shared.folder_saves import (
    FolderSaves,
    Value,
    folders_to_remove,
    is_committed,
    newest_committed,
)
from shardproof.storage import LocalSink
from tests.gate import LIMIT, Gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def state() -> dict[str, object]:
    return {"weight": torch.ones(1000), "rest": Value({"epoch": 2, "score": torch.ones(3)})}


def test_an_older_checkpoint_is_removed_after_the_commit(tmp_path: Path, gate: Gate) -> None:
    gate.open()
    saves = FolderSaves()
    old, new = tmp_path / "old", tmp_path / "new"
    saves.save(old, state())
    saves.wait_for_end()
    gate.close()
    saves.save(new, state())
    assert gate.reached.wait(LIMIT)
    saves.remove(old)
    assert is_committed(old) and not is_committed(new)
    assert newest_committed(map(str, (old, new))) == str(old)
    gate.open()
    saves.wait()
    assert not old.exists() and is_committed(new)
    saves.remove(new)
    assert not new.exists(), "without a save, a checkpoint is removed at once"


def test_an_older_checkpoint_stays_if_the_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = FolderSaves(background=False)
    old, new = tmp_path / "old", tmp_path / "new"
    saves.save(old, state())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalSink, "write_at", full)
        with pytest.raises(sp.ShardproofError, match="No space left"):
            saves.save(new, state())
    saves.remove(old)
    assert is_committed(old)
    saves.save(new, state())
    assert not old.exists() and is_committed(new)


def test_the_newest_checkpoint_has_the_highest_step(tmp_path: Path) -> None:
    """The manifests decide, because the times of files change in a copy."""
    saves = FolderSaves(background=False)
    folders = [str(tmp_path / name) for name in ("c", "b", "a")]
    for folder, step in zip(folders, (2, 10, 10), strict=True):
        saves.save(folder, state(), step=step)
    for age, folder in enumerate(folders):
        os.utime(os.path.join(folder, "manifest.json"), (1000 - age, 1000 - age))
    assert newest_committed(folders) == folders[2]


def test_calls_of_a_failed_save_are_dropped_and_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, called = FolderSaves(background=False), []

    def fail() -> None:
        raise OSError("no rotation")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalSink, "write_at", full)
        with pytest.raises(sp.ShardproofError, match="No space left"):
            saves.save(tmp_path / "first", state(), then=lambda: called.append("first"))
    saves.after_commit(fail)
    saves.after_commit(lambda: called.append("waited"))
    with pytest.raises(sp.ShardproofError, match="no rotation"):
        saves.save(tmp_path / "second", state(), then=lambda: called.append("second"))
    assert called == ["waited", "second"]


def test_a_missing_folder_is_removed_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FolderSaves().remove(tmp_path / "missing")
    assert not caplog.records


def test_a_value_of_any_structure_is_loaded(tmp_path: Path) -> None:
    saves = FolderSaves(background=False)
    score = {"epoch": 2, "scores": [torch.tensor(0.5), (torch.ones(3), None)], "average": torch.ones(5000)}
    saves.save(tmp_path / "saved", {"rest": Value(score)})
    value = Value()
    saves.load(tmp_path / "saved", {"rest": value})
    assert value.value["epoch"] == 2 and torch.equal(value.value["average"], torch.ones(5000))
    first, (second, third) = value.value["scores"]
    assert torch.equal(first, torch.tensor(0.5)) and torch.equal(second, torch.ones(3)) and third is None


def test_scores_that_change_do_not_change_the_keys(tmp_path: Path) -> None:
    saves = FolderSaves(background=False)
    for step in (1, 2):
        saves.save(tmp_path / f"{step}", {"rest": Value({"best": {f"step={step}": torch.tensor(0.5)}})})
    with sp.open(tmp_path / "1") as first, sp.open(tmp_path / "2") as second:
        assert list(first) == list(second) == ["rest"]


def test_a_url_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path it would be a folder below the current one."""
    monkeypatch.chdir(tmp_path)
    saves = FolderSaves()
    for call in (saves.save, saves.load):
        with pytest.raises(ValueError, match="s3://bucket/run is a URL"):
            call("s3://bucket/run", state())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", range(6))
def test_a_limit_removes_only_the_checkpoints_beyond_it(limit: int) -> None:
    """Also where the limit is not reached: then nothing whole is removed."""
    folders = ["1", "2", "torn", "3"]
    for count in range(4):
        whole = ["1", "2", "3"][:count]
        removed = folders_to_remove(folders, whole, limit)
        assert [folder for folder in whole if folder not in removed] == whole[max(count - limit, 0) :]
        assert "torn" in removed
    assert folders_to_remove(["1", "2", "3"], ["1", "2", "3"], limit=2, spared=["1"]) == ["2"]
