"""The simulated disk itself: flushed data stays, and other data may be lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from shardproof.errors import StorageError
from shardproof.storage import LocalStorage
from tests.soak.disk import Disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with Disk(folder) as disk:
        yield disk


def put(path: Path, data: bytes, *, flush: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    os.pwrite(descriptor, data, 0)
    if flush:
        os.fsync(descriptor)
    os.close(descriptor)


def flush_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def after_loss(disk: Disk, seed: int) -> dict[str, bytes]:
    disk.restart("power", Random(seed))
    return {
        str(path.relative_to(disk.folder)): path.read_bytes()
        for path in disk.folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("seed", range(8))
def test_flushed_bytes_under_flushed_names_stay(disk: Disk, seed: int) -> None:
    put(disk.folder / "a", b"data", flush=True)
    flush_names(disk.folder)
    assert after_loss(disk, seed) == {"a": b"data"}
    assert after_loss(disk, seed) == {"a": b"data"}


def test_bytes_names_and_folders_that_were_not_flushed_may_be_lost(tmp_path: Path) -> None:
    """Each outcome that the note lists comes up."""
    names, contents, inner = set(), set(), set()
    for seed in range(40):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with Disk(folder) as disk:
            put(folder / "bytes", b"", flush=True)
            flush_names(folder)
            put(folder / "bytes", b"1234", flush=False)
            put(folder / "name", b"1234", flush=True)
            os.mkdir(folder / "sub")
            put(folder / "sub" / "inner", b"1234", flush=True)
            flush_names(folder / "sub")
            found = after_loss(disk, seed)
        names.add("name" in found)
        inner.add("sub/inner" in found)
        contents.add(found["bytes"])
    assert names == inner == {True, False}
    assert {b"", b"1234", bytes(4)} < contents


def test_a_kill_loses_nothing_and_ends_every_later_change(disk: Disk) -> None:
    put(disk.folder / "a", b"data", flush=False)
    disk.fail(1, "kill")
    os.mkdir(disk.folder / "b")
    for change in (lambda: os.mkdir(disk.folder / "c"), lambda: os.unlink(disk.folder / "a")):
        with pytest.raises(OSError, match="off"):
            change()
    disk.restart("kill", Random(0))
    assert (disk.folder / "a").read_bytes() == b"data"
    assert sorted(os.listdir(disk.folder)) == ["a", "b"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_publication_is_whole_or_absent_and_stays_after_it_returned(tmp_path: Path, replace: bool) -> None:
    """The disk fails at each operation; 8 outcomes of a loss of power for each."""
    operation, done = 0, False
    while not done:
        for seed in range(8):
            folder = tmp_path / f"{operation}-{seed}"
            folder.mkdir()
            with Disk(folder) as disk:
                storage = LocalStorage(folder, direct=False)
                if replace:
                    storage.publish("step/manifest", b"old")
                disk.fail(operation, "power")
                try:
                    storage.publish("step/manifest", b"new" * 50, replace=replace)
                    done = disk.failed is None
                except (StorageError, OSError):
                    pass
                found = after_loss(disk, seed).get("step/manifest")
            allowed = {b"new" * 50} if done else {b"new" * 50, b"old" if replace else None}
            assert found in allowed, (operation, seed)
        operation += 1
    assert operation > 5
