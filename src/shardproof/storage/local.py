"""A storage in a folder of a file system."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from shardproof import forks
from shardproof.errors import AlreadyCommittedError, StorageError
from shardproof.storage.durable import (
    flush_folders,
    open_new,
    rename_exclusively,
    unlink_quietly,
    write_all,
)
from shardproof.storage.failures import storage_error
from shardproof.storage.names import check_folder, check_name
from shardproof.storage.probe import Probes, users_choice
from shardproof.storage.sink import LocalSink

__all__ = ["LocalStorage"]

_KEPT_OPEN = 64


class LocalStorage:
    """Files in a folder and below it, written durably. See `Storage` for the methods.

    Args:
        root: the folder. It need not exist: the first file makes it.
        direct: whether aligned writes go past the page cache (O_DIRECT). None: as the environment variable
            SHARDPROOF_DIRECT says (1 or 0); without it the way that proved faster for large files, where the
            file system has both (see "a probe of real writes").

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     storage = LocalStorage(folder)
    ...     sink = storage.create("shards/0")
    ...     sink.write_at(0, memoryview(b"bytes"))
    ...     sink.finish(5)
    ...     storage.publish("manifest.json", b"{}")
    ...     storage.list(), storage.read("shards/0", 1, 3)
    (['manifest.json', 'shards/0'], b'yt')
    """

    def __init__(self, root: str | os.PathLike[str], *, direct: bool | None = None) -> None:
        self._root = Path(os.path.abspath(root))
        self._direct = direct
        self._probes = Probes()
        self._kept: dict[str, _Descriptor] = {}
        self._lock = forks.lock()

    def __repr__(self) -> str:
        return f"LocalStorage({str(self._root)!r})"

    @property
    def location(self) -> str:
        """The folder's absolute path."""
        return str(self._root)

    @property
    def folder(self) -> str:
        """The folder's own name."""
        return self._root.name

    def create(self, name: str) -> LocalSink:
        """Begin a new file; see `Storage.create`."""
        path = self._path(name)
        self._forget(name)
        direct = users_choice() if self._direct is None else self._direct
        return LocalSink(path, self._root, direct=direct, probes=self._probes)

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name`, whole or not at all; see `Storage.publish`."""
        path = self._path(name)
        if not replace and path.exists():
            raise self._already_there(path)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            descriptor, _ = open_new(draft, os.O_WRONLY)
            try:
                write_all(descriptor, memoryview(data), 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if replace:
                os.replace(draft, path)
            else:
                rename_exclusively(draft, path)
            self._forget(name)
            _flush_published(path, replaced=replace)
        except FileExistsError as error:
            unlink_quietly(draft)
            raise self._already_there(path) from error
        except OSError as error:
            unlink_quietly(draft)
            raise storage_error(error, "publish", str(path)) from error

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the file as it is now; see `Storage.read`."""
        path = self._path(name)
        file = _Descriptor(path)
        try:
            size = os.fstat(file.number).st_size
        except OSError as error:
            raise storage_error(error, "read", str(path)) from error
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise _short(path, start, stop - start, max(0, size - start))
        buffer = bytearray(stop - start)
        _fill(file, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; see `Storage.read_into`."""
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        _fill(self._descriptor(name), start, data)

    def size(self, name: str) -> int | None:
        """Bytes of the file; None if there is none."""
        path = self._path(name)
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error(error, "look at", str(path)) from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def folders(self) -> list[str]:
        """Sorted names of the folders directly in the root. Links are not folders."""
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, "list", str(self._root)) from error

    def siblings(self) -> list[str]:
        """Sorted names of the folders beside the root, and its own. Links are not folders."""
        return LocalStorage(self._root.parent).folders()

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of the files in the folder `prefix` and below. Linked folders are not entered."""
        top = self._path(prefix) if prefix else self._root
        found: list[str] = []
        try:
            for folder, _, files in os.walk(top, onerror=_raise_unless_missing):
                inside = os.path.relpath(folder, self._root)
                lead = "" if inside == "." else inside.replace(os.sep, "/") + "/"
                found.extend(lead + file for file in files)
        except OSError as error:
            raise storage_error(error, "list", str(top)) from error
        return sorted(found)

    def delete(self, name: str) -> None:
        """Remove the file durably, and the folders below the root that this leaves empty."""
        path = self._path(name)
        self._forget(name)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise storage_error(error, "delete", str(path)) from error
        folder = path.parent
        try:
            while folder != self._root:
                os.rmdir(folder)
                folder = folder.parent
        except OSError:
            pass  # not empty, or a peer was faster: it stays
        try:
            flush_folders(folder, folder)
        except FileNotFoundError:
            pass  # a peer removed the folder, and flushes the one above
        except OSError as error:
            raise storage_error(error, "flush the deletion of", str(path)) from error

    def within(self, prefix: str) -> LocalStorage:
        """The storage in the folder `prefix` of this one."""
        part = LocalStorage(self._path(prefix), direct=self._direct)
        part._probes = self._probes
        return part

    def sibling(self, folder: str) -> LocalStorage:
        """The storage in the folder of this name beside this one's root; see `Storage.sibling`."""
        return LocalStorage(
            self._root.parent / check_folder(folder, str(self._root.parent)), direct=self._direct
        )

    def close(self) -> None:
        """Close the descriptors that reading keeps open."""
        with self._lock:
            self._kept.clear()

    def _path(self, name: str) -> Path:
        return self._root / check_name(name, self.location)

    def _already_there(self, path: Path) -> AlreadyCommittedError:
        return AlreadyCommittedError(
            f"{path} exists. It was not touched: choose another place or step, or ask for overwriting.",
            path=str(path),
            file=str(path),
        )

    def _descriptor(self, name: str) -> _Descriptor:
        """The file, opened at most once for many reads; only names that were checked are kept."""
        kept = self._kept.get(name)
        if kept is not None:
            return kept
        opened = _Descriptor(self._path(name))
        with self._lock:
            self._kept[name] = opened
            while len(self._kept) > _KEPT_OPEN:
                del self._kept[next(iter(self._kept))]  # the oldest
        return opened

    def _forget(self, name: str) -> None:
        with self._lock:
            self._kept.pop(name, None)


def _flush_published(path: Path, *, replaced: bool) -> None:
    """Make the new name durable, or take it back: who is told that publishing failed finds nothing there."""
    try:
        flush_folders(path.parent, None)
    except OSError:
        if (
            not replaced
        ):  # what was replaced is gone; the new file is whole, and may or may not outlive a crash
            unlink_quietly(path)
        raise


class _Descriptor:
    """A file open for reading, closed when nobody holds it any more.

    A thread may read from a descriptor that another has just dropped from those kept: it holds it, too.
    """

    __slots__ = ("number", "path")

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.path = path
        try:  # O_NONBLOCK: opening a pipe that somebody left there must not wait for its writer
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            mode = os.fstat(self.number).st_mode
        except OSError as error:
            raise storage_error(error, "read", str(path)) from error
        if not stat.S_ISREG(mode):
            raise StorageError(f"cannot read {path}: it is not a regular file", file=str(path), missing=False)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def _fill(file: _Descriptor, start: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(file.number, [buffer[done:]], start + done)
        except OSError as error:
            raise storage_error(error, "read", str(file.path)) from error
        if count == 0:
            raise _short(file.path, start, len(buffer), done)
        done += count


def _short(path: Path, start: int, expected: int, found: int) -> StorageError:
    return StorageError(
        f"{path} is too short: expected {expected} bytes from byte {start} on, found {found}. "
        "The file was cut, or is not the one that was written.",
        file=str(path),
        missing=False,
        byte_start=start,
        byte_count=expected,
    )


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
