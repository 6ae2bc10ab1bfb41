"""Early write-back: ranges are handed to the disk while a file is still being written."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardproof._utils import libc
from shardproof.engine.storage.durable import WriteBack
from shardproof.errors import StorageError
from shardproof.storage import LocalStorage

MIB = 1 << 20


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    yield number
    os.close(number)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """("begin" or "wait", start, stop) of each call; fdatasync counts as ("flush", 0, 0)."""
    made: list[tuple[str, int, int]] = []

    def call(name: str, *arguments: ctypes._SimpleCData[int]) -> None:
        assert name == "sync_file_range"
        _, start, count, how = (argument.value for argument in arguments)
        made.append(({2: "begin", 7: "wait"}[how], start, start + count))

    monkeypatch.setattr(libc, "call", call)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: made.append(("flush", 0, 0)))
    return made


def test_small_writes_are_gathered(descriptor: int, calls: list[tuple[str, int, int]]) -> None:
    write_back = WriteBack(descriptor)
    for start in range(0, 9 * MIB, 1 << 16):
        write_back.wrote(start, 1 << 16)
    assert calls == [("begin", 0, 4 * MIB), ("begin", 4 * MIB, 8 * MIB)]
    calls.clear()
    write_back.wrote(9 * MIB, 0)
    assert calls == []


def test_writers_wait_for_the_oldest_ranges(descriptor: int, calls: list[tuple[str, int, int]]) -> None:
    write_back = WriteBack(descriptor)
    for at in range(0, 128, 8):
        write_back.wrote(at * MIB, 8 * MIB)
        begun = sum(stop - start for what, start, stop in calls if what == "begin")
        done = sum(stop - start for what, start, stop in calls if what == "wait")
        assert begun == (at + 8) * MIB
        assert begun - done <= 64 * MIB
    assert [start for what, start, _ in calls if what == "wait"] == [at * MIB for at in range(0, 64, 8)]


def test_ranges_out_of_order_are_covered(descriptor: int, calls: list[tuple[str, int, int]]) -> None:
    write_back = WriteBack(descriptor)
    write_back.wrote(6 * MIB, 2 * MIB)
    write_back.wrote(1 * MIB, 2 * MIB)
    assert calls == [("begin", 1 * MIB, 8 * MIB)]


@pytest.mark.parametrize("there", [False, True])
def test_where_ranges_cannot_be_handed_over_the_file_is_flushed(
    descriptor: int, calls: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    def refuse(name: str, *arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(libc, "has", lambda name: there)
    monkeypatch.setattr(libc, "call", refuse)
    write_back = WriteBack(descriptor)
    for at in range(0, 1024, 8):
        write_back.wrote(at * MIB, 8 * MIB)
    assert calls == [("flush", 0, 0)] * 4


def test_an_error_of_the_disk_is_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LocalStorage(tmp_path, direct=False).create("a")

    def fail(name: str, *arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(libc, "call", fail)
    with pytest.raises(StorageError, match="EIO"):
        file.write_at(0, memoryview(bytes(8 * MIB)))
    file.abort()
    assert LocalStorage(tmp_path).list() == []


def test_a_buffered_file_is_written_back_before_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real system call and several threads: all ranges begin, and all but 64 MiB are waited for."""
    begun = []
    original = libc.call

    def call(name: str, *arguments: ctypes._SimpleCData[int]) -> None:
        begun.append(arguments[2].value if arguments[3].value == 2 else 0)
        original(name, *arguments)

    monkeypatch.setattr(libc, "call", call)
    storage = LocalStorage(tmp_path, direct=False)
    file = storage.create("a")
    part = memoryview(os.urandom(4 * MIB))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda at: file.write_at(at * len(part), part), range(24)))
    assert sum(begun) >= 96 * MIB
    assert begun.count(0) >= 8
    file.finish(24 * len(part))
    assert storage.read("a", 92 * MIB) == bytes(part)
