"""UncachedStorage: the conformance suite, and that it reads the device."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from shardproof.engine.storage.local import PIECE
from shardproof.errors import StorageError
from shardproof.storage import ALIGNMENT, LocalStorage, UncachedStorage
from shardproof.storage.conformance import StorageConformance
from tests.harness import open_files


class TestUncached(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> UncachedStorage:
        return UncachedStorage(tmp_path / "root")


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses direct reads, as some file systems do."""
    real = os.open

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT and not flags & os.O_CREAT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", opened)


class TestUncachedWithoutDirectReads(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UncachedStorage:
        refuse_direct(monkeypatch)
        return UncachedStorage(tmp_path / "root")


def read_from_device() -> int:
    """Bytes that this thread has read from block devices."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/io").read_text()
    return int(dict(line.split(": ") for line in text.splitlines())["read_bytes"])


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "cache dropped"])
def test_bytes_come_from_the_device_although_the_cache_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    data = os.urandom(8 << 20)
    cached = LocalStorage(tmp_path, direct=False)
    cached.publish("a", data)
    assert cached.read("a") == data  # the page cache has all of it now
    before = read_from_device()
    assert cached.read("a") == data
    if read_from_device() != before:
        pytest.skip("this file system keeps no pages")
    if not is_direct:
        refuse_direct(monkeypatch)
    assert UncachedStorage(tmp_path).read("a") == data
    count = read_from_device() - before
    if count == 0 and os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("this file system has no device")
    assert count >= len(data)


def test_direct_reads_that_fail_after_the_open_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems open a file for direct reads and refuse the first of them."""
    data = os.urandom(3 * ALIGNMENT + 17)
    (tmp_path / "a").write_bytes(data)
    real, refused = os.preadv, list[int]()

    def read(number: int, buffers: Any, start: int) -> int:
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(number)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(number, buffers, start)

    monkeypatch.setattr(os, "preadv", read)
    before = open_files()
    assert UncachedStorage(tmp_path).read("a") == data
    assert len(refused) == 1 and open_files() == before


@pytest.mark.parametrize("start", [0, 1, ALIGNMENT - 1, PIECE - 3, PIECE + 5])
@pytest.mark.parametrize("count", [0, 1, ALIGNMENT, PIECE + 17])
def test_any_range_is_read_in_announced_pieces(tmp_path: Path, start: int, count: int) -> None:
    data = os.urandom(2 * PIECE + 100)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "a").write_bytes(data)
    announced: list[int] = []
    storage = UncachedStorage(tmp_path, before_read=announced.append)
    for part in (storage.within("step"), storage.within("other").sibling("step")):
        announced.clear()
        buffer = bytearray(count)
        part.read_into("a", start, memoryview(buffer))
        assert bytes(buffer) == data[start : start + count]
        assert sum(announced) == count and all(0 < piece <= PIECE for piece in announced)


def test_an_error_before_a_read_ends_it_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * PIECE))
    reads: list[int] = []

    def stop_at_the_second(count: int) -> None:
        reads.append(count)
        if len(reads) == 2:
            raise InterruptedError

    before = open_files()
    with pytest.raises(InterruptedError):
        UncachedStorage(tmp_path, before_read=stop_at_the_second).read("a")
    assert len(reads) == 2 and open_files() == before


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(5000))
    with pytest.raises(StorageError, match="too short: expected 100 bytes from byte 4950 on, found 50"):
        UncachedStorage(tmp_path).read_into("a", 4950, memoryview(bytearray(100)))
