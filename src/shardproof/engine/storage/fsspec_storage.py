"""`FsspecStorage`: files of a file system of fsspec, if it can create a file exclusively.

Note "Exclusive creation": the manifest is one ``pipe_file(mode="create")``. fsspec's default looks for the
file and then writes it, so two committers may both succeed. So the class of the file system must have an
implementation of its own. Before its first manifest, a process tests that the file system refuses a second
creation.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from shardproof._utils.forks import lock
from shardproof._utils.humanize import without_credentials
from shardproof.engine.storage.base import Sink, Storage, check_folder, check_name, too_large
from shardproof.engine.storage.remote_requests import ObjectSink, request_error, short_remote_read
from shardproof.errors import AlreadyCommittedError, StorageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_COPY_BYTES = 16 << 20
_CREATE_LOCK = lock()
"""Orders creations of this process, because a file system in memory has no lock of its own."""

_log = logging.getLogger("shardproof")


class FsspecStorage(Storage):
    """Files below a path of a file system of fsspec; see `Storage`.

    Retries and deadlines are those of the file system. For a store that `ObjectStorage` knows, use its URL:
    it is faster, and every request has a deadline.

    Args:
        fs: the file system, such as ``gcsfs.GCSFileSystem()``.
        path: path of the folder in it.

    Raises:
        StorageError: the file system cannot create a file exclusively.

    Example:
        >>> import fsspec, shardproof as sp
        >>> storage = sp.storage.FsspecStorage(fsspec.filesystem("memory"), "/runs/gpt")
        >>> _ = sp.save(storage.within("step"), {"epoch": 3})
        >>> sp.open(storage.within("step"))["epoch"]
        3
    """

    bounds_reads = True

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        self._fs = fs
        self._path = str(fs._strip_protocol(path)).rstrip("/")
        self._is_tested = False
        if _looks_before_it_writes(fs):
            known = "the folder itself" if "file" in _protocols(fs) else "a URL with s3://, gs:// or az://"
            raise StorageError(
                f"{self.location}: {type(fs).__name__} has no exclusive creation of files, so two jobs could "
                f"commit one step, and each would believe it won. Give {known}",
                file=self.location,
            )

    def _at(self, path: str) -> FsspecStorage:
        storage = FsspecStorage(self._fs, path)
        storage._is_tested = self._is_tested
        return storage

    def __repr__(self) -> str:
        return f"FsspecStorage({self.location!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FsspecStorage) and (other._fs, other._path) == (self._fs, self._path)

    def __hash__(self) -> int:
        return hash((self._fs, self._path))

    @property
    def location(self) -> str:
        """The path, with the protocol of its file system."""
        return f"{_protocols(self._fs)[0]}://{self._path}"

    @property
    def folder(self) -> str:
        """The last part of the path."""
        return self._path.rpartition("/")[2]

    @property
    def linked(self) -> bool:
        """False: fsspec does not report links."""
        return False

    def create(self, name: str) -> Sink:
        """Begin a new file; see `Storage.create`."""
        file = self._file(name)
        if self.size(name) is not None:
            raise StorageError(f"cannot create {file}: there is already a file of this name", file=file)
        return self._sink(name, replace=False)

    def replace(self, name: str) -> Sink:
        """Begin a file that replaces another. Atomic only if the file system writes a file in one step.

        See `Storage.replace`.
        """
        return self._sink(name, replace=True)

    def _sink(self, name: str, *, replace: bool) -> Sink:
        def put(data: Any, **how: Any) -> None:
            try:
                if isinstance(data, bytes):
                    self._fs.pipe_file(self._key(name), data)
                else:
                    is_file = not isinstance(data, Iterator)
                    pieces = iter(partial(data.read, _COPY_BYTES), b"") if is_file else data
                    self._write_pieces(name, pieces, replace=replace)
            except Exception as error:
                raise self._error(error, "write", name) from error

        return ObjectSink(put, self._file(name))

    def _write_pieces(self, name: str, pieces: Iterator[bytes], *, replace: bool) -> None:
        """Writes a file in order. A failure leaves nothing of it under its name."""
        from fsspec.spec import AbstractBufferedFile

        key = self._key(name)
        stream = self._fs.open(key, "wb", block_size=_COPY_BYTES)
        try:
            for piece in pieces:
                stream.write(piece)
        except BaseException:
            if isinstance(stream, AbstractBufferedFile):
                stream.discard()
                stream.closed = True  # else the file is completed when Python deletes the object
            else:
                stream.close()
            if not (replace and isinstance(stream, AbstractBufferedFile)):  # it would be the earlier file
                self._remove_quietly(name)
            raise
        stream.close()

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name`; see `Storage.publish` and the note "Exclusive creation"."""
        key = self._key(name)
        try:
            if replace:
                self._fs.pipe_file(key, data)
                return
            self._check_creation()
            # Equal bytes: an earlier creation succeeded, and its answer was lost.
            if self._is_created(name, data) or self.read(name) == data:
                return
        except StorageError:
            raise
        except Exception as error:
            raise self._error(error, "publish", name) from error
        file = self._file(name)
        raise AlreadyCommittedError(f"{file} is there already: another save published it", file=file)

    def _is_created(self, name: str, data: bytes) -> bool:
        """Creates a file; False if there is one."""
        try:
            with _CREATE_LOCK:
                self._fs.pipe_file(self._key(name), data, mode="create")
        except OSError as error:
            # s3fs reports a failed condition with EINVAL, if the server does not name the condition.
            is_refusal = isinstance(error, FileExistsError) or error.errno == errno.EINVAL
            if is_refusal and self.size(name) is not None:
                return False
            raise
        return True

    def _check_creation(self) -> None:
        """Raises if a second creation of a file succeeds; tested once for a storage."""
        if self._is_tested:
            return
        name = f"exclusive-creation-{uuid.uuid4().hex}.probe"
        try:
            is_ignored = self._is_created(name, b"1") and self._is_created(name, b"2")
        finally:
            self._remove_quietly(name)
        if is_ignored:
            raise StorageError(
                f"{self.location}: {type(self._fs).__name__} replaces a file that it was told to create: two "
                "jobs could commit one step, and each would believe it won. Save elsewhere",
                file=self.location,
            )
        self._is_tested = True

    def _remove_quietly(self, name: str) -> None:
        try:
            self.delete(name)
        except StorageError as error:
            _log.warning("an unfinished file stays: %s", error)

    def flush(self, name: str) -> None:
        """Does nothing: a file is as durable as its file system makes it. A missing file is an error."""
        if self.size(name) is None:
            raise self._missing(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop`; see `Storage.read`."""
        size = self.size(name)
        if size is None:
            raise self._missing(name)
        end = size if stop is None else stop
        if start > size or end > size:
            raise short_remote_read(self._file(name), start, end, size)
        return self._range(name, start, end)

    def read_at_most(self, name: str, most: int) -> bytes:
        """All bytes of a file; see `Storage.read_at_most`."""
        size = self.size(name)
        if size is None:
            raise self._missing(name)
        if size > most:
            raise too_large(self._file(name), size, most)
        return self._range(name, 0, size)

    def _range(self, name: str, start: int, end: int) -> bytes:
        key = self._key(name)
        if end <= start:
            return b""
        try:
            data = bytes(self._fs.cat_file(key, start=start, end=end))
        except Exception as error:
            raise self._error(error, "read", name) from error
        if len(data) != end - start:
            raise short_remote_read(self._file(name), start, end, start + len(data))
        return data

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; see `Storage.read_into`."""
        target = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        for done in range(0, max(len(target), 1), _COPY_BYTES):
            part = target[done : done + _COPY_BYTES]
            part[:] = self.read(name, start + done, start + done + len(part))

    def size(self, name: str) -> int | None:
        """Bytes of the file; None if there is no such file."""
        key = self._key(name)
        try:
            self._fs.invalidate_cache()
            found = self._fs.info(key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            raise self._error(error, "look at", name) from error
        return int(found["size"]) if found["type"] == "file" else None

    def modified(self, name: str) -> float | None:
        """Time of the last write to a file, Unix seconds; None if there is none of this name."""
        try:
            return float(self._fs.modified(self._key(name)).timestamp())
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._error(error, "look at", name) from error

    def now(self, *, writes: bool = True) -> float | None:
        """The time that the file system gives a new file, Unix seconds; see `Storage.now`.

        Raises:
            StorageError: the file system failed.
        """
        if not writes:
            return None
        name = f"time-{uuid.uuid4().hex}.probe"
        try:
            self._fs.pipe_file(self._key(name), b"1")
            found = self.modified(name)
        except StorageError:
            raise
        except Exception as error:
            raise self._error(error, "test", name) from error
        finally:
            self._remove_quietly(name)
        if found is None:
            raise self._missing(name)
        return found

    def folders(self) -> list[str]:
        """Sorted names of the folders directly in this storage."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:
            raise self._error(error, "list", "") from error
        names = {one["name"].rstrip("/").rpartition("/")[2] for one in found if one["type"] == "directory"}
        return sorted(name for name in names if self.list(name))

    def siblings(self) -> list[str]:
        """Sorted names of the sibling folders, with this storage's own folder if it exists."""
        return self._at(self._path.rpartition("/")[0]).folders()

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of all files in the folder `prefix` and below."""
        below = self._key(prefix) if prefix else self._path
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(below)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:
            raise self._error(error, "list", prefix) from error
        return sorted(path[len(self._path) + 1 :] for path in found if path.startswith(f"{below}/"))

    def delete(self, name: str) -> None:
        """Remove the file. A missing one is no error."""
        key = self._key(name)
        try:
            self._fs.rm_file(key)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._error(error, "delete", name) from error

    def within(self, prefix: str) -> FsspecStorage:
        """The part of this storage below the folder `prefix`, as a storage."""
        return self._at(self._key(prefix))

    def sibling(self, folder: str) -> FsspecStorage:
        """The storage in the sibling folder of this name."""
        return self._at(f"{self._path.rpartition('/')[0]}/{check_folder(folder, self.location)}")

    def close(self) -> None:
        """Does nothing: the file system belongs to the caller."""

    def _key(self, name: str) -> str:
        return f"{self._path}/{check_name(name, self.location)}"

    def _file(self, name: str) -> str:
        return f"{self.location}/{check_name(name, self.location)}"

    def _missing(self, name: str) -> StorageError:
        file = self._file(name)
        return StorageError(f"cannot read {file}: there is no such file", file=file, missing=True)

    def _error(self, error: Exception, doing: str, name: str) -> StorageError:
        file = self._file(name) if name else self.location
        text = without_credentials(str(error) or type(error).__name__)
        missing = isinstance(error, FileNotFoundError)
        return request_error(f"cannot {doing} {file}: {text}", file, missing=missing)


def _protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _looks_before_it_writes(fs: AbstractFileSystem) -> bool:
    """True if the file system has no `pipe_file` of its own; see note "Exclusive creation"."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    kind: Any = type(fs)
    if isinstance(fs, AsyncFileSystem):
        return bool(kind._pipe_file is AsyncFileSystem._pipe_file)
    return bool(kind.pipe_file is AbstractFileSystem.pipe_file)
