"""File operations that are still there after the power went.

Note: durable names. `fsync` of a file keeps its bytes, not its name: the name is a line in the folder, and
the folder is a file of its own that must be flushed, too; so must the folder above, if the folder is new.
Who made a folder may have died before flushing it. Therefore the commit (`publish`) flushes every folder up
to the mount point, and other files those up to the one above the storage's root, whoever made them.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = [
    "flush_file",
    "flush_folders",
    "make_folders",
    "open_new",
    "rename_exclusively",
    "unlink_quietly",
    "write_all",
]

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_TRIES = 100


def make_folders(folder: Path) -> list[Path]:
    """Make `folder` and those above it that are missing; the ones that were missing."""
    missing: list[Path] = []
    above = folder
    while not above.exists():
        missing.append(above)
        above = above.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # said of the folder, it would be taken for the file
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder)) from error
    return missing


def open_new(path: Path, flags: int) -> tuple[int, list[Path]]:
    """Descriptor of a new file, and the folders made for it. An existing one is a FileExistsError.

    A peer that removes an empty folder may take away the one just made: then it is made again.
    """
    for attempt in range(_TRIES):
        made = make_folders(path.parent)
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), made
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """Write all of `data` at byte `start`, however many calls that takes."""
    while len(data):
        written = os.pwrite(descriptor, data, start)
        data = data[written:]
        start += written


def flush_file(descriptor: int) -> None:
    """Flush a file or folder; nothing to do where the file system cannot (a read-only image, for example)."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def flush_folders(folder: Path, last: Path | None) -> None:
    """Flush `folder` and those above it, up to `last`, or up to the mount point if None.

    A folder above that this process may not read was not made by it, and is left alone.
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


def rename_exclusively(source: Path, target: Path) -> None:
    """Give the file `source` the name `target`; FileExistsError if there is a file of that name.

    A link is exclusive everywhere that has links, NFS included, where the answer to a link that succeeded
    may be lost and the second try be told "exists": then the link count tells. Where there are no links,
    Linux's renameat2 does the same.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if os.stat(source).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_no_replace(source, target)
        return
    unlink_quietly(source)  # the rename has taken effect; a second name is a leftover for prune


def _rename_no_replace(source: Path, target: Path) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOTSUP, "neither links nor exclusive renames here", str(target))
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def unlink_quietly(path: Path) -> None:
    """Remove the file at `path` if that can be done."""
    try:
        os.unlink(path)
    except OSError:
        pass
