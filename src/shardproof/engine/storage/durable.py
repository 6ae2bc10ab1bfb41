"""File operations that survive a loss of power, and early write-back.

Note: durable names
    `fsync` of a file keeps its bytes, not its name. The name is an entry of the folder, and the folder needs
    a flush of its own; so does the folder above a new folder. The process that made a folder may have died
    before it flushed it. Therefore the commit (`publish`) flushes every folder up to the mount point. Other
    files flush those up to the one above the storage's root, whichever process made them.

Note: early write-back
    Bytes written through the page cache stay in memory until a flush. With a single flush at the end, the
    disk would be idle until then. The flush would take as long as the writes, and report no progress. So
    `WriteBack` starts the write-back of every few MiB as soon as they are written
    (`sync_file_range`). A writer waits for the range that it started 64 MiB ago: the disk always has work,
    and the last flush is short. The kernel reports a disk error once, to the first call that asks: here or in
    the last flush. Both raise. Early write-back makes no byte durable; the flush at the end does (`fsync`).
    The pages stay in the cache, where a restart reads them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque
from pathlib import Path

from shardproof._utils import libc
from shardproof.engine.storage.paths import RealFolder, create_file, storage_error
from shardproof.errors import AlreadyCommittedError

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_TRIES = 100


def open_new(root: Path, path: Path, flags: int) -> tuple[int, RealFolder]:
    """Create a file below a root (note "No links below the root"); return its descriptor and its folder.

    A peer that removes empty folders may remove the one just made. Then this call makes it again.

    Raises:
        FileExistsError: there is a file at `path`.
        StorageError: the mode for new files in the environment is not valid.
        OSError: the system refused, or a folder below the root is a link.
    """
    made: list[Path] = []
    for attempt in range(_TRIES):
        folder = None
        try:
            folder = RealFolder(root, path.parent, make=True)
            flags |= os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = create_file(path.name, flags, folder.number)
        except BaseException as error:
            if folder is not None:
                made += folder.made
                folder.close()
            if not isinstance(error, FileNotFoundError) or attempt == _TRIES - 1:
                raise
        else:
            folder.made += made
            return descriptor, folder
    raise AssertionError("unreachable")


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """Write all of `data` at byte `start`, however many calls that takes."""
    while len(data):
        written = os.pwrite(descriptor, data, start)
        data = data[written:]
        start += written


def flush_file(descriptor: int) -> None:
    """Flush a file or folder. Does nothing where the file system has no flush (a read-only image)."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def flush_folders(folder: Path, last: Path | None) -> None:
    """Flush `folder` and those above it, up to `last`, or up to the mount point if None.

    Stops below a folder that this process may not read: this process did not make it.
    """
    device = folder.stat().st_dev
    first = folder
    while True:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            if folder == first:
                raise
            return
        try:
            if os.fstat(descriptor).st_dev != device:
                return
            flush_file(descriptor)
        finally:
            os.close(descriptor)
        if folder in (last, folder.parent):
            return
        folder = folder.parent


def rename_exclusively(source: Path | str, target: Path | str, folder: int | None = None) -> None:
    """Rename `source` to `target`, unless there is a file at `target`.

    A link is exclusive on every file system that has links. NFS may lose the answer to a link that succeeded
    and report "exists" to the second try; the link count then shows the success. Where there are no links,
    Linux's renameat2 is exclusive too.

    Relative names are in the folder with the descriptor `folder`; None: in the working directory.

    Raises:
        FileExistsError: there is a file at `target`.
        OSError: the file system has neither, or failed.
    """
    try:
        os.link(source, target, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        if os.stat(source, dir_fd=folder).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not libc.has("renameat2"):
            text = "the file system has neither links nor exclusive renames"
            raise OSError(errno.ENOTSUP, text, str(target)) from error
        old, new = (ctypes.c_char_p(os.fsencode(path)) for path in (source, target))
        at = ctypes.c_int(_AT_FDCWD if folder is None else folder)
        libc.call("renameat2", at, old, at, new, ctypes.c_uint(_RENAME_NOREPLACE))
        return
    unlink_quietly(source, folder)  # the rename has taken effect; a second name is a leftover for prune


def publish_path(source: Path, target: Path) -> None:
    """Move a durable file or folder to the name under which readers look for it, durably.

    Raises:
        AlreadyCommittedError: there is something at `target`.
        StorageError: the file system failed.
    """
    try:
        rename_exclusively(source, target)
        flush_folders(target.parent, target.parent)
    except FileExistsError as error:
        raise AlreadyCommittedError(
            f"{target} exists. It was not touched; the new data is in {source}", path=str(target)
        ) from error
    except OSError as error:
        raise storage_error(error, f"move {source} to", target) from error


def unlink_quietly(path: Path | str, folder: int | None = None) -> None:
    """Remove a file; ignore a failure. `folder` is as for `rename_exclusively`."""
    try:
        os.unlink(path, dir_fd=folder)
    except OSError:
        pass


_SPAN = 4 << 20
"""Bytes of one write-back request."""

_UNDERWAY = 64 << 20
"""Bytes under write-back before a writer waits."""

_FLUSH_EVERY = 256 << 20
"""Bytes between flushes where the system has no write-back of ranges."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_NO_RANGES = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.ENOTSUP, errno.EPERM)


class WriteBack:
    """Early write-back of a file, which is open for writing meanwhile. Threads may share it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ranges = libc.has("sync_file_range")
        self._lock = threading.Lock()
        self._start, self._stop, self._gathered = 0, 0, 0
        self._underway: deque[tuple[int, int, int]] = deque()
        self._underway_bytes = 0

    def wrote(self, start: int, count: int) -> None:
        """Count `count` bytes written at byte `start`; see "early write-back".

        Raises:
            OSError: the disk refused these or earlier bytes.
        """
        if count == 0:
            return
        with self._lock:
            self._start = min(self._start, start) if self._gathered else start
            self._stop = max(self._stop, start + count) if self._gathered else start + count
            self._gathered += count
            if self._gathered < (_SPAN if self._ranges else _FLUSH_EVERY):
                return
            span, self._gathered = (self._start, self._stop, self._gathered), 0
        if not self._sync(span[0], span[1], _WRITE):
            os.fdatasync(self._descriptor)
            return
        with self._lock:
            self._underway.append(span)
            self._underway_bytes += span[2]
        self._wait()

    def _wait(self) -> None:
        """Wait for the oldest ranges until no more than `_UNDERWAY` bytes are underway."""
        while True:
            with self._lock:
                if self._underway_bytes <= _UNDERWAY:
                    return
                start, stop, count = self._underway.popleft()
                self._underway_bytes -= count
            self._sync(start, stop, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)

    def _sync(self, start: int, stop: int, how: int) -> bool:
        """True if the system has this operation; once False, always False."""
        if not self._ranges:
            return False
        try:
            libc.call(
                "sync_file_range",
                ctypes.c_int(self._descriptor),
                ctypes.c_int64(start),
                ctypes.c_int64(stop - start),
                ctypes.c_uint(how),
            )
        except OSError as error:
            if error.errno not in _NO_RANGES:
                raise
            self._ranges = False
        return self._ranges
