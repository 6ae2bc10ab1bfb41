"""The free space of local folders."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from shardproof._utils import libc
from shardproof.engine.storage import FreeSpace, LocalStorage, free_space

MISSING = "some/missing/folders"
EXT, XFS = 0xEF53, 0x58465342
"""Types of file systems, as Linux numbers them."""


def measured(folder: Path) -> FreeSpace:
    found = LocalStorage(folder).free_space()
    assert found is not None
    return found


def as_type(monkeypatch: pytest.MonkeyPatch, kind: int | None) -> None:
    """Lets the system call `statfs` answer with a type; None for a system without the call."""

    def statfs(name: str, path: ctypes.c_char_p, buffer: ctypes.Array[ctypes.c_char]) -> int:
        assert name == "statfs" and kind is not None
        buffer[: ctypes.sizeof(ctypes.c_long)] = kind.to_bytes(ctypes.sizeof(ctypes.c_long), sys.byteorder)
        return 0

    monkeypatch.setattr(libc, "has", lambda name: kind is not None)
    monkeypatch.setattr(libc, "call", statfs)


def with_mounts(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: bytes) -> None:
    """Lets a file of the folder tell which file systems are mounted."""
    (folder / "mountinfo").write_bytes(lines)
    monkeypatch.setattr(free_space, "_MOUNTS", folder / "mountinfo")


def test_a_folder_that_does_not_exist_yet_is_measured(tmp_path: Path) -> None:
    system, there = os.statvfs(tmp_path), measured(tmp_path / MISSING)
    assert 0 < there.free <= system.f_blocks * system.f_frsize
    assert there.file_system == measured(tmp_path).file_system


def test_only_file_systems_that_store_every_byte_give_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_type(monkeypatch, XFS)
    assert measured(tmp_path).upper_bound is not None
    btrfs, other_system = 0x9123683E, None
    for kind in (btrfs, other_system):
        as_type(monkeypatch, kind)
        assert measured(tmp_path).upper_bound is None


def test_a_project_quota_gives_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_type(monkeypatch, EXT)
    answer = struct.pack("=5I8x", 0x200, 0, 0, 0, 0)  # FS_XFLAG_PROJINHERIT in a `struct fsxattr`
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
    as_type(monkeypatch, EXT)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert measured(tmp_path).upper_bound == free * system.f_frsize
    assert measured(tmp_path).free == available * system.f_frsize

    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    device = os.stat(tmp_path).st_dev
    line = f"25 1 {os.major(device)}:{os.minor(device)} / / rw - ext4 /dev/sda1 rw"
    for mounts, most in ((line, available), (f"{line},resuid=1234", free), ("", free)):
        with_mounts(monkeypatch, tmp_path, mounts.encode())
        assert measured(tmp_path).upper_bound == most * system.f_frsize


def test_a_mount_point_may_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    lines = b"24 1 0:1 / /caf\xe9 rw - tmpfs none rw\n25 1 %s / / rw - ext4 /dev/sda1 rw\n" % number
    with_mounts(monkeypatch, tmp_path, lines)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    as_type(monkeypatch, EXT)
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
