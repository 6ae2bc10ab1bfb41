"""Reads past the page cache: the same bytes and the same errors as through it, at any range of any file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.storage import (
    ALIGNMENT,
    LocalStorage,
    UncachedStorage,
    direct_io,
)
from shardproof.errors import StorageError

SIZE = 3 * ALIGNMENT + 17
DATA = bytes(number % 251 for number in range(SIZE))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose size is no multiple of a page, and that is not in the page cache."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "a").write_bytes(DATA)
    drop(folder / "a")
    return folder


def drop(path: Path, start: int = 0, count: int = 0) -> None:
    """Drops pages of a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)


def read(storage: UncachedStorage, start: int, count: int) -> bytes:
    found = bytearray(count)
    storage.read_into("a", start, memoryview(found))
    return bytes(found)


def reads_past_cache(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    return True


@given(start=st.integers(0, SIZE), count=st.integers(0, SIZE))
def test_any_range_has_the_bytes_of_the_file(written: Path, start: int, count: int) -> None:
    count = min(count, SIZE - start)
    assert read(UncachedStorage(written), start, count) == DATA[start : start + count]


def test_a_read_past_the_cache_leaves_no_pages_in_it(written: Path) -> None:
    if not reads_past_cache(written / "a"):
        pytest.skip("this file system has no reads past the page cache")
    drop(written / "a")
    storage = LocalStorage(written)
    assert not storage.is_cached("a", 0, SIZE)
    read(UncachedStorage(written), 5, 2 * ALIGNMENT)
    assert not storage.is_cached("a", 0, SIZE)


def test_is_cached_answers_for_a_range(tmp_path: Path) -> None:
    half = 64 * ALIGNMENT
    (tmp_path / "a").write_bytes(bytes(2 * half))
    storage = LocalStorage(tmp_path)
    assert storage.is_cached("a", 0, 2 * half)
    drop(tmp_path / "a")
    if storage.is_cached("a", 0, 2 * half):
        pytest.skip("this file system keeps pages despite POSIX_FADV_DONTNEED")
    with (tmp_path / "a").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        file.read(half)
    assert storage.is_cached("a", 0, half) and not storage.is_cached("a", half, half)
    assert storage.is_cached("a", half - 1, 1) and not storage.is_cached("a", half, 1)
    assert storage.is_cached("a", 3, half // 2) and not storage.is_cached("a", half + 3, half // 2)


def test_a_range_beyond_the_end_is_not_cached(written: Path) -> None:
    assert not LocalStorage(written).is_cached("a", SIZE + ALIGNMENT, 10)


def test_an_empty_file_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert not LocalStorage(tmp_path).is_cached("a", 0, 1)


@pytest.mark.parametrize(
    ("start", "count", "found"), [(0, SIZE + 1, SIZE), (ALIGNMENT + 3, SIZE, SIZE), (SIZE, 1, 0)]
)
def test_a_file_that_is_too_short_is_an_error(written: Path, start: int, count: int, found: int) -> None:
    with pytest.raises(StorageError, match="too short") as caught:
        read(UncachedStorage(written), start, count)
    assert caught.value.details["byte_start"] == start
    assert caught.value.details["byte_count"] == count


def test_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    for ask in (
        lambda: LocalStorage(tmp_path).is_cached("a", 0, 1),
        lambda: read(UncachedStorage(tmp_path), 0, 1),
    ):
        with pytest.raises(StorageError) as caught:
            ask()
        assert caught.value.details["missing"]


def refusing(code: int) -> Callable[..., int]:
    def refuse(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_where_the_flag_is_refused_reads_go_through_the_cache(
    written: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.open

    def refuse_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    monkeypatch.setattr(direct_io.os, "open", refuse_direct)
    assert read(UncachedStorage(written), 7, 2 * ALIGNMENT) == DATA[7 : 7 + 2 * ALIGNMENT]


class Reads:
    """Stands for `os.preadv`. Each direct read has the next of the given answers; cached reads are real."""

    def __init__(self, *answers: int | OSError | None) -> None:
        self._real, self._answers = os.preadv, list(answers)
        self.direct = 0

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            self.direct += 1
            answer = self._answers.pop(0) if self._answers else None
            if isinstance(answer, OSError):
                raise answer
            if answer is not None:
                return self._real(descriptor, [buffers[0][:answer]], offset) if answer else 0
        return self._real(descriptor, buffers, offset)


@pytest.mark.parametrize(
    "answers",
    [
        (OSError(errno.EINVAL, "refused"),),
        (ALIGNMENT, OSError(errno.EINVAL, "refused")),
        (ALIGNMENT,),
        (0,),
    ],
    ids=["refused", "refused later", "short", "nothing"],
)
def test_bytes_that_a_direct_read_leaves_out_are_read_through_the_cache(
    written: Path, monkeypatch: pytest.MonkeyPatch, answers: tuple[int | OSError, ...]
) -> None:
    if not reads_past_cache(written / "a"):
        pytest.skip("this file system has no reads past the page cache")
    reads = Reads(*answers)
    monkeypatch.setattr(direct_io.os, "preadv", reads)
    assert read(UncachedStorage(written), 9, SIZE - 9) == DATA[9:]
    assert reads.direct


def test_a_direct_read_that_ends_inside_a_page_continues_through_the_cache(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reads_past_cache(written / "a"):
        pytest.skip("this file system has no reads past the page cache")
    real = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return min(real(descriptor, buffers, offset), 100 if offset == 0 else SIZE)

    monkeypatch.setattr(direct_io.os, "preadv", short)
    assert read(UncachedStorage(written), 9, SIZE - 9) == DATA[9:]


def test_a_device_that_fails_is_an_error(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reads_past_cache(written / "a"):
        pytest.skip("this file system has no reads past the page cache")
    monkeypatch.setattr(direct_io.os, "preadv", Reads(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StorageError, match="EIO") as caught:
        read(UncachedStorage(written), 0, SIZE)
    assert caught.value.details["file"] == str(written / "a")


def test_closing_gives_back_every_descriptor(written: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    storage = LocalStorage(written)
    storage.is_cached("a", 0, 1)
    uncached = storage.past_cache()
    assert isinstance(uncached, UncachedStorage)
    read(uncached, 0, SIZE)
    assert len(os.listdir("/proc/self/fd")) > before
    storage.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_that_takes_the_name_of_a_new_file_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second descriptor is opened by name, and another user may have replaced the file meanwhile."""
    other, real = tmp_path / "other", os.open
    other.write_bytes(b"bytes of another place")

    def swapped(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT and flags & os.O_WRONLY:
            (tmp_path / "run" / "a").unlink()
            (tmp_path / "run" / "a").symlink_to(other)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(StorageError, match="cannot open unbuffered .*ELOOP"):
        LocalStorage(tmp_path / "run", direct=True).create("a")
    assert other.read_bytes() == b"bytes of another place"
