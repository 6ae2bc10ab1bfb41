"""The rights of new files and folders: those that SHARDPROOF_FILE_MODE requires, whatever the umask is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run as run_cli
from shardproof.engine.storage import LocalStorage, make_folders
from shardproof.rendezvous import LocalRendezvous

VARIABLE = "SHARDPROOF_FILE_MODE"


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def rights(*tops: Path) -> tuple[set[int], set[int]]:
    """The modes of all files and of all folders in and below some paths."""
    paths = [path for top in tops for path in (top, *top.rglob("*"))]
    files = {path.stat().st_mode & 0o7777 for path in paths if path.is_file()}
    return files, {path.stat().st_mode & 0o7777 for path in paths if path.is_dir()}


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 4), value)}


@pytest.mark.parametrize(
    ("umask", "text", "file", "folder"),
    [
        (0o000, "0640", 0o640, 0o750),
        (0o022, "0660", 0o660, 0o770),
        (0o077, "0o666", 0o666, 0o777),
        (0o277, "600", 0o600, 0o700),
    ],
    indirect=["umask"],
)
def test_all_that_a_run_writes_has_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, text: str, file: int, folder: int
) -> None:
    """Steps, pins and repaired manifests in both tiers, and conversions in every way to write one."""
    monkeypatch.setenv(VARIABLE, text)
    near, far = tmp_path / "above" / "near", tmp_path / "far"
    run = sp.Checkpointer(near, second_tier=far, rendezvous=LocalRendezvous(), incremental=True)
    for step in (1, 2):
        run.save(step, state(step)).durable(60)
    run.pin(2, "baseline")
    (near / "step-00000001" / "manifest.json").unlink()
    assert run_cli(["repair", str(near / "step-00000001")]) == 0
    assert (near / "step-00000001" / "manifest.json").exists()
    new = tmp_path / "new"
    for to in ("dcp", "zarr", "torch", "shardproof", "hf"):
        sp.convert(near / "step-00000002", new / "inner" / to, to=to)
    sp.convert(near / "step-00000002", new / "one.safetensors", to="safetensors")
    assert rights(tmp_path / "above", far, new) == ({file}, {folder})


@pytest.mark.parametrize("umask", [0o000, 0o077], indirect=True)
def test_the_folders_of_nodes_have_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setenv(VARIABLE, "0640")
    sp.Checkpointer(tmp_path / "above" / "run", node_local=True).save(1, state()).result()
    assert rights(tmp_path / "above") == ({0o640}, {0o750})


def test_files_and_folders_that_exist_keep_their_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    sp.save(run / "a", state())
    before = rights(run)
    monkeypatch.setenv(VARIABLE, "0600")
    sp.save(run / "b", state())
    assert rights(run / "a")[0] == before[0] and rights(run / "b") == ({0o600}, {0o700})
    assert run.stat().st_mode & 0o777 in before[1]


def test_a_folder_that_gives_its_group_to_new_files_still_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o2770)
    monkeypatch.setenv(VARIABLE, "0640")
    sp.save(tmp_path / "run" / "a", state())
    assert rights(tmp_path / "run" / "a") == ({0o640}, {0o2750})


@pytest.mark.parametrize("text", ["rw", "0888", "0440", "0755", "01640", "-1", "0o7777777777777"])
def test_a_wrong_mode_is_an_error_before_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(sp.StorageError, match=VARIABLE):
        LocalStorage(tmp_path / "run").publish("a", b"bytes")
    with pytest.raises(sp.ShardproofError, match=VARIABLE):
        sp.save(tmp_path / "run", state())
    assert not list(tmp_path.rglob("*"))


def test_a_file_system_that_does_not_keep_modes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the mode without effect stands for such a file system."""
    monkeypatch.setenv(VARIABLE, "0640")
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)
    with pytest.raises(sp.StorageError, match=r"the mode 0600, and SHARDPROOF_FILE_MODE requires 0640"):
        LocalStorage(tmp_path).publish("a", b"bytes")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_get_the_mode_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0640")
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)  # a file system with fixed modes
    for _ in range(2):
        with pytest.raises(PermissionError, match="requires 0750"):
            make_folders(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_exists_needs_no_right_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    assert make_folders(tmp_path) == []
    with pytest.raises(OSError, match="Read-only"):
        make_folders(tmp_path / "run")
