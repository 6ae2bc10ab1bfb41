"""A conversion uses no work folder that another user made, can write to, or has made a link."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.errors import StorageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sp.save(tmp_path / "source", {"w": torch.arange(4.0)})
    return tmp_path / "source"


def convert(source: Path) -> None:
    sp.convert(source, source.with_name("new"), to="safetensors")


def test_a_link_in_place_of_the_work_folder_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "files").mkdir(parents=True)
    (tmp_path / "elsewhere" / "files" / "a.tmp").touch()
    (tmp_path / "new.converting").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"converting is a link or a file.*Remove it, or choose"):
        convert(source)
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["files"]
    assert (tmp_path / "elsewhere" / "files" / "a.tmp").exists()
    (tmp_path / "new.converting").unlink()
    convert(source)
    with sp.open(tmp_path / "new") as checkpoint:
        assert checkpoint["w"].read().tolist() == [0, 1, 2, 3]


def test_a_link_in_place_of_the_lock_is_refused(source: Path, tmp_path: Path) -> None:
    """As it lies in a folder that was copied from elsewhere."""
    (tmp_path / "new.converting").mkdir(0o700)
    (tmp_path / "new.converting" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"new\.converting"):
        convert(source)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_work_folder_of_another_user_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "new.converting").mkdir(0o700)
    os.chown(tmp_path / "new.converting", 12345, 12345)
    with pytest.raises(StorageError, match=r"new\.converting belongs to another user \(user 12345\)"):
        convert(source)
    assert os.listdir(tmp_path / "new.converting") == []


def test_a_work_folder_that_others_can_write_to_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "new.converting").mkdir()
    (tmp_path / "new.converting").chmod(0o777)
    with pytest.raises(StorageError, match=r"has the mode 0777, so that other users can write to it"):
        convert(source)


def test_a_work_folder_of_a_file_system_with_fixed_modes_is_used_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tempfile.mkdtemp

    def fixed(**options: Any) -> str:
        """In place of a mount of CIFS with dir_mode=0777, where a new private folder has this mode."""
        os.chmod(folder := made(**options), 0o777)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", fixed)
    (tmp_path / "new.converting").mkdir()
    (tmp_path / "new.converting").chmod(0o777)
    convert(source)
    assert sp.open(tmp_path / "new").keys() == ["w"]


def test_only_the_user_reads_the_work_folder(source: Path, tmp_path: Path) -> None:
    modes = []

    def look(done: int, total: int) -> None:
        modes.append(stat.S_IMODE((tmp_path / "new.converting").stat().st_mode))

    sp.convert(source, tmp_path / "new", to="safetensors", on_progress=look)
    assert modes[0] == 0o700
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".shardproof")]
