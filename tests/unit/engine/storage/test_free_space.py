"""The free space of local folders."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from shardproof.engine.storage import FreeSpace, LocalStorage, free_space

MISSING = "some/missing/folders"


def measured(folder: Path) -> FreeSpace:
    found = LocalStorage(folder).free_space()
    assert found is not None
    return found


def as_type(monkeypatch: pytest.MonkeyPatch, kind: int | None) -> None:
    monkeypatch.setattr(free_space, "_type_of", lambda path: kind)


def test_a_folder_that_does_not_exist_yet_is_measured(tmp_path: Path) -> None:
    system, there = os.statvfs(tmp_path), measured(tmp_path / MISSING)
    assert 0 < there.free <= system.f_blocks * system.f_frsize
    assert there.file_system == measured(tmp_path).file_system


def test_only_file_systems_that_store_every_byte_give_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_type(monkeypatch, free_space._XFS)
    assert measured(tmp_path).upper_bound is not None
    btrfs, other_system = 0x9123683E, None
    for kind in (btrfs, other_system):
        as_type(monkeypatch, kind)
        assert measured(tmp_path).upper_bound is None


def test_a_project_quota_gives_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_type(monkeypatch, free_space._EXT)
    answer = free_space._ATTRIBUTES.pack(free_space._IN_PROJECT, 0, 0, 0, 0)
    monkeypatch.setattr(fcntl, "ioctl", lambda *arguments: answer)
    assert measured(tmp_path).upper_bound is None


def test_reserved_blocks_count_only_for_users_that_may_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = os.statvfs(tmp_path)
    values = list(system)
    free, available = 1000, 10
    values[3:5] = free, available
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    as_type(monkeypatch, free_space._EXT)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert measured(tmp_path).upper_bound == free * system.f_frsize
    assert measured(tmp_path).free == available * system.f_frsize

    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    device = os.stat(tmp_path).st_dev
    line = f"25 1 {os.major(device)}:{os.minor(device)} / / rw - ext4 /dev/sda1 rw"
    for mounts, most in ((line, available), (f"{line},resuid=1234", free), ("", free)):
        monkeypatch.setattr(free_space, "_mounts", lambda mounts=mounts: mounts.splitlines())
        assert measured(tmp_path).upper_bound == most * system.f_frsize


def test_a_mount_point_may_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(
        b"24 1 0:1 / /caf\xe9 rw - tmpfs none rw\n25 1 %s / / rw - ext4 /dev/sda1 rw\n" % number
    )
    monkeypatch.setattr(free_space, "_MOUNTS", mounts)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    as_type(monkeypatch, free_space._EXT)
    assert measured(tmp_path).upper_bound is not None


def test_free_space_is_unknown_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, *[0] * 8)))
    assert LocalStorage(tmp_path).free_space() is None


def test_free_space_is_unknown_where_statvfs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(os, "statvfs", refuse)
    assert LocalStorage(tmp_path).free_space() is None
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert LocalStorage(link / "run").free_space() is None
