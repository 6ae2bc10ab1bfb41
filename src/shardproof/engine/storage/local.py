"""Storages in a folder of a file system: through the page cache, or past it."""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from shardproof.engine.storage.base import FreeSpace, Storage, check_folder, check_name
from shardproof.engine.storage.cache_rule import users_choice
from shardproof.engine.storage.direct_io import (
    OpenFiles,
    PageCache,
    UncachedReader,
    aligned_buffer,
    memory_for,
)
from shardproof.engine.storage.durable import (
    flush_file,
    flush_folders,
    open_new,
    rename_exclusively,
    unlink_quietly,
    write_all,
)
from shardproof.engine.storage.free_space import local_free_space
from shardproof.engine.storage.paths import (
    RealFolder,
    StrOrBytesPath,
    absolute,
    leads_beside,
    lost_link,
    make_folders,
    printable,
    storage_error,
    system_errors,
    unconfirmed_error,
)
from shardproof.engine.storage.sink import LocalSink
from shardproof.errors import AlreadyCommittedError, StorageError

PIECE = 4 << 20
"""The most bytes of one read."""


class LocalStorage(Storage):
    """Files in a folder and below it, written durably. See `Storage` for the methods.

    Args:
        root: the folder. The first file creates it. A later change of the working directory has no effect.
        direct: True if aligned writes, and the reads of loads, go past the page cache (O_DIRECT), False if
            all bytes go through it. None: the environment variable SHARDPROOF_DIRECT decides (1 or 0), or
            else a rule (see `shardproof.engine.storage.cache_rule`).

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

    direct: bool | None = None
    _is_past_cache = False
    """True if this storage goes past the page cache where the file system can."""

    def __init__(self, root: StrOrBytesPath, *, direct: bool | None = None) -> None:
        self._root = absolute(root)
        self._base = self._root
        """The folder below which no file is written or removed behind a link."""
        self.direct = direct
        """The choice of the user; None if the storage has none."""
        self._folder_key = os.fspath(self._root)
        self._open_files = OpenFiles[_Descriptor]()

    def __repr__(self) -> str:
        return f"LocalStorage({self.location!r})"

    @property
    def location(self) -> str:
        """The folder's absolute path, in valid Unicode."""
        return printable(self._root)

    @property
    def path(self) -> Path:
        """The folder, for the system: its bytes need not be valid Unicode."""
        return self._root

    @property
    def linked(self) -> bool:
        """True if the folder is a symbolic link."""
        return os.path.islink(self._root)

    @property
    def folder(self) -> str:
        """The folder's own name."""
        return self._root.name

    def create(self, name: str) -> LocalSink:
        """Begin a new file; see `Storage.create`."""
        return self._sink(name, replace=False)

    def replace(self, name: str) -> LocalSink:
        """Begin a file that replaces another; see `Storage.replace`."""
        return self._sink(name, replace=True)

    def _sink(self, name: str, *, replace: bool) -> LocalSink:
        path = self._path(name)
        self._forget(name)
        direct = users_choice() if self.direct is None else self.direct
        required = direct is True
        return LocalSink(
            path,
            self._root,
            direct=required or self._is_past_cache,
            required=required,
            replace=replace,
            base=self._base,
        )

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name`, whole or not at all; see `Storage.publish`."""
        path = self._path(name)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        with system_errors("publish", path):
            if not replace and path.exists():
                raise self._already_there(path)
            descriptor, folder = open_new(self._base, draft, os.O_WRONLY)
        at = folder.number
        try:
            try:
                write_all(descriptor, memoryview(data), 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if replace:
                os.replace(draft.name, path.name, src_dir_fd=at, dst_dir_fd=at)
            else:
                rename_exclusively(draft.name, path.name, at)
        except FileExistsError as error:
            unlink_quietly(draft.name, at)
            raise self._already_there(path) from error
        except OSError as error:
            unlink_quietly(draft.name, at)
            raise storage_error(error, "publish", path) from error
        finally:
            folder.close()
        self._forget(name)
        try:
            flush_folders(path.parent, None)
        except OSError as error:
            raise unconfirmed_error(error, path) from error

    def flush(self, name: str) -> None:
        """Make the file and its name durable, whichever process wrote it; see `Storage.flush`."""
        path = self._path(name)
        file = _Descriptor(path)
        with system_errors("flush", path):
            flush_file(file.number)
            flush_folders(path.parent, None)

    def flush_names(self) -> None:
        """Make durable which files are in this folder; see `Storage.flush_names`."""
        try:
            flush_folders(self.path, self.path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise storage_error(error, "flush", self.path) from error

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the file as it is now; see `Storage.read`."""
        path = self._path(name)
        file = _Descriptor(path)
        with system_errors("read", path):
            size = os.fstat(file.number).st_size
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise _short(path, start, stop - start, max(0, size - start))
        try:
            buffer = bytearray(stop - start)
        except MemoryError as error:
            raise StorageError(
                f"cannot read {printable(path)}: {stop - start} bytes from byte {start} on do not fit into "
                "memory. Check the size of the file, or read it on a machine with more memory.",
                file=printable(path),
                missing=False,
                damaged=False,
            ) from error
        _fill(file, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; see `Storage.read_into`."""
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        _fill(self._descriptor(name), start, data)

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """True if the page cache has most of a range; see `Storage.is_cached`."""
        return self._descriptor(name).pages().has(start, count)

    def past_cache(self) -> Storage:
        """The same files, read and written past the page cache; for a plain `LocalStorage` alone."""
        if type(self) is not LocalStorage:
            return self
        found = UncachedStorage(self.path)
        found.direct = self.direct
        found._base, found._open_files = self._base, self._open_files
        return found

    def drop_cached(self, name: str) -> None:
        """Drop a file from the page cache. Dirty pages stay."""
        file = self._descriptor(name)
        with system_errors("drop from the page cache", file.path):
            os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)

    def fill_cache(self, name: str, start: int, count: int) -> None:
        """Read a range into the page cache, without a copy into memory of this process (`sendfile`)."""
        file = self._descriptor(name)
        with system_errors("read into the page cache", file.path):
            sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < count and (sent := os.sendfile(sink, file.number, start + done, count - done)):
                    done += sent
            finally:
                os.close(sink)

    def size(self, name: str) -> int | None:
        """Bytes of the file; None if there is none."""
        path = self._path(name)
        try:
            found = os.stat(path)
        except NotADirectoryError:
            return None
        except FileNotFoundError as error:
            if (lost := lost_link(path)) is not None:
                raise lost from error
            return None
        except OSError as error:
            raise storage_error(error, "look at", path) from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def modified(self, name: str) -> float | None:
        """Time of the last write to a file, Unix seconds; None if there is none of this name."""
        path = self._path(name)
        try:
            return os.stat(path).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error(error, "look at", path) from error

    def folders(self) -> list[str]:
        """Sorted names of the folders directly in the root, with links to folders elsewhere.

        A dangling link is listed, because its folder may be on a lost mount. A link to a folder of this root
        is not listed, because it is a second name.
        """
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if _is_folder(entry))
        except FileNotFoundError as error:
            if (lost := lost_link(self._root)) is not None:
                raise lost from error
            return []
        except OSError as error:
            raise storage_error(error, "list", self._root) from error

    def siblings(self) -> list[str]:
        """Sorted names of the sibling folders, with the root's own name; see `folders`."""
        return LocalStorage(self._root.parent).folders()

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of the files in the folder `prefix` and below, without linked folders below it."""
        top = self._path(prefix) if prefix else self._root
        found: list[str] = []
        with system_errors("list", top):
            for folder, _, files in os.walk(top, onerror=_raise_unless_missing):
                inside = os.path.relpath(folder, self._root)
                lead = "" if inside == "." else inside.replace(os.sep, "/") + "/"
                found.extend(lead + file for file in files)
        if not found and (lost := lost_link(top)) is not None:
            raise lost
        return sorted(found)

    def delete(self, name: str) -> None:
        """Remove the file durably, and the folders below the root that become empty."""
        path = self._path(name)
        self._forget(name)
        try:
            with RealFolder(self._base, path.parent) as real:
                os.unlink(path.name, dir_fd=real.number)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise storage_error(error, "delete", path) from error
        folder = path.parent
        try:
            while folder != self._root:
                with RealFolder(self._base, folder.parent) as real:
                    os.rmdir(folder.name, dir_fd=real.number)
                folder = folder.parent
        except OSError:
            pass  # not empty, or a peer removed it
        try:
            flush_folders(folder, folder)
        except FileNotFoundError:
            pass  # a peer removed the folder, and flushes the one above
        except OSError as error:
            raise storage_error(error, "flush the deletion of", path) from error

    def free_space(self) -> FreeSpace | None:
        """The space for new files; see `Storage.free_space`."""
        return local_free_space(self._root)

    def make_folder(self) -> None:
        """Make the folder, and those above it, unless they exist.

        Raises:
            StorageError: the system refused.
        """
        with system_errors("make", self._root):
            make_folders(self._root)

    def within(self, prefix: str) -> LocalStorage:
        """The storage in the folder `prefix` of this one."""
        return self._part_of(self._at(self._path(prefix)))

    def sibling(self, folder: str) -> LocalStorage:
        """The storage in the sibling folder of this name; see `Storage.sibling`."""
        place = self._root.parent / check_folder(folder, printable(self._root.parent))
        found = self._part_of(self._at(place))
        found._open_files = self._open_files
        return found

    def _at(self, path: Path) -> LocalStorage:
        """A storage in another folder, with the same choices."""
        return LocalStorage(path, direct=self.direct)

    def _part_of(self, part: LocalStorage) -> LocalStorage:
        """A storage in a folder below this one, or beside it, with the same folder above for links."""
        part._base = self._base if part._root.is_relative_to(self._base) else self._root.parent
        return part

    def close(self) -> None:
        """Close the descriptors that reads keep open, also those of the siblings of this storage."""
        self._open_files.close()

    def _path(self, name: str) -> Path:
        return self._root / check_name(name, self.location)

    def _already_there(self, path: Path) -> AlreadyCommittedError:
        where = printable(path)
        return AlreadyCommittedError(
            f"{where} exists. It was not touched: choose another place or step, or ask for overwriting.",
            path=where,
            file=where,
        )

    def _descriptor(self, name: str) -> _Descriptor:
        """The open file of this name, from the cache of checked names or newly opened."""
        return self._open_files.get((self._folder_key, name), lambda: _Descriptor(self._path(name)))

    def _forget(self, name: str) -> None:
        self._open_files.forget((self._folder_key, name))


class UncachedStorage(LocalStorage):
    """Files in a folder and below it, read from the device and not from the page cache.

    Reads and aligned writes go past the page cache (O_DIRECT). Where the file system refuses that, they go
    through it, and a read asks the kernel to drop the file's pages first. Two limits: a file system in memory
    has no bytes but its pages, and the server of a network file system may answer from its own memory.

    Args:
        root: the folder.
        before_read: called before each read, with the number of its bytes. If it raises, the read ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     storage = UncachedStorage(folder)
    ...     storage.publish("manifest.json", b"bytes")
    ...     storage.read("manifest.json", 1, 3)
    b'yt'
    """

    _is_past_cache = True

    def __init__(self, root: StrOrBytesPath, *, before_read: Callable[[int], None] | None = None) -> None:
        super().__init__(root)
        self._before_read = before_read
        self._local = threading.local()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the file; see `Storage.read`."""
        size = self.size(name)
        if size is None or not 0 <= start <= (size if stop is None else stop) <= size:
            return super().read(name, start, stop)  # raises the error
        data = bytearray((size if stop is None else stop) - start)
        self.read_into(name, start, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; see `Storage.read_into`."""
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        needed = memory_for(min(PIECE, len(data)))
        memory: memoryview | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < needed:
            memory = self._local.memory = aligned_buffer(needed)
        file = self._descriptor(name)
        for done in range(0, len(data), PIECE):
            part = data[done : done + PIECE]
            if self._before_read is not None:
                self._before_read(len(part))
            with system_errors("read", file.path):
                begin, count = file.uncached().read(start + done, len(part), memory)
            part[:count] = memory[begin : begin + count]
            if count < len(part):
                self.drop_cached(name)
                _fill(file, start + done, part, count)

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """False: every read goes to the device."""
        return False

    def _at(self, path: Path) -> UncachedStorage:
        return UncachedStorage(path, before_read=self._before_read)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    if not entry.is_symlink():
        return entry.is_dir()
    return (os.path.isdir(entry.path) or not os.path.exists(entry.path)) and not leads_beside(entry.path)


class _Descriptor:
    """A file open for reading. It closes with its last reference.

    So a thread may continue to read after another thread dropped the file from the storage's cache.
    """

    __slots__ = ("_pages", "_uncached", "number", "path")

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.path = path
        self._pages: PageCache | None = None
        self._uncached: UncachedReader | None = None
        try:  # O_NONBLOCK: to open a pipe must not wait for its writer
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            mode = os.fstat(self.number).st_mode
        except FileNotFoundError as error:
            raise (lost_link(path) or storage_error(error, "read", path)) from error
        except OSError as error:
            raise storage_error(error, "read", path) from error
        if not stat.S_ISREG(mode):
            where = printable(path)
            raise StorageError(
                f"cannot read {where}: it is not a regular file: remove it or name another path",
                file=where,
                missing=False,
            )

    def pages(self) -> PageCache:
        """The file's pages in memory. Two concurrent first calls may each make one; one of them stays."""
        if self._pages is None:
            self._pages = PageCache(self.number)
        return self._pages

    def uncached(self) -> UncachedReader:
        """The file opened for direct reads, at the first call."""
        if self._uncached is None:
            self._uncached = UncachedReader(self.path)
        return self._uncached

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def _fill(file: _Descriptor, start: int, buffer: memoryview, done: int = 0) -> None:
    """Read through the page cache until `buffer` is full; its first `done` bytes are already there."""
    while done < len(buffer):
        try:
            count = os.preadv(file.number, [buffer[done:]], start + done)
        except OSError as error:
            raise storage_error(error, "read", file.path) from error
        if count == 0:
            raise _short(file.path, start, len(buffer), done)
        done += count


def _short(path: Path, start: int, expected: int, found: int) -> StorageError:
    where = printable(path)
    return StorageError(
        f"{where} is too short: expected {expected} bytes from byte {start} on, found {found}. "
        "The file was truncated or replaced: restore it from a copy, or load another step.",
        file=where,
        missing=False,
        byte_start=start,
        byte_count=expected,
    )


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
