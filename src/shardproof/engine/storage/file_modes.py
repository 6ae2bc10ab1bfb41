"""The rights of new files and folders.

Without the environment variable SHARDPROOF_FILE_MODE, the system decides: 0666 for files and 0777 for
folders, less the umask. With it, new files have exactly this mode, whatever the umask is, and new folders
have it with the right to enter for everyone who may read.

Note: never wider
    A file or folder is made with the rights of its owner alone, and then gets its mode. So it never has more
    rights than it should have. Files and folders that exist keep their mode.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from shardproof.errors import StorageError

_VARIABLE = "SHARDPROOF_FILE_MODE"
_OWNER = 0o600
_LARGEST = 0o666


def create_file(name: str, flags: int, folder: int) -> int:
    """Creates a file in an open folder; returns its descriptor.

    Raises:
        StorageError: the variable is no mode.
        OSError: the system refused, or the file system does not keep modes.
    """
    mode = _users_mode()
    if mode is None:
        return os.open(name, flags, 0o666, dir_fd=folder)
    descriptor = os.open(name, flags, _OWNER, dir_fd=folder)
    try:
        _give(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)
        raise
    return descriptor


def make_folder(name: str | Path, above: int | None = None) -> None:
    """Makes a folder.

    Args:
        name: its name in `above`, or its path.
        above: descriptor of the folder above.

    Raises:
        FileExistsError: there is something of this name.
        StorageError: the variable is no mode.
        OSError: the system refused, or the file system does not keep modes.
    """
    mode = _users_mode()
    if mode is None:
        os.mkdir(name, dir_fd=above)
        return
    os.mkdir(name, 0o700, dir_fd=above)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=above)
    try:
        _give(descriptor, mode | (mode & 0o444) >> 2)
    except BaseException:
        os.rmdir(name, dir_fd=above)
        raise
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> list[Path]:
    """Makes a folder and the missing ones above it. Does nothing if it exists.

    Returns:
        The folders that were missing, the last one first.

    Raises:
        NotADirectoryError: a file stands where a folder is needed.
        StorageError: the variable is no mode.
        OSError: see `make_folder`.
    """
    missing = []
    above = path
    while not above.exists():
        missing.append(above)
        above = above.parent
    for folder in [*reversed(missing)] or [path]:
        try:
            make_folder(folder)
        except OSError as error:
            if isinstance(error, FileExistsError) and not folder.is_dir():  # callers take it to mean the file
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder)) from error
            if not folder.is_dir():  # a system may refuse before it looks, such as a read-only one
                raise
    return missing


def _users_mode() -> int | None:
    """The mode in the environment; None without one."""
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return None
    mode = -1
    with contextlib.suppress(ValueError):
        mode = int(text, 8)
    if not 0 <= mode <= _LARGEST or mode & 0o111 or mode & _OWNER != _OWNER:
        raise StorageError(
            f"the environment variable {_VARIABLE} is {text!r}: set it to the mode of new files in octal, "
            "from 0600 to 0666 and without the right to run, for example 0640, or unset it",
            missing=False,
            damaged=False,
        )
    return mode


def _give(descriptor: int, mode: int) -> None:
    """Sets the mode of a file or folder. A folder keeps the bit that gives its group to new files."""
    special = os.fstat(descriptor).st_mode & 0o7000
    with contextlib.suppress(PermissionError):  # a file system with fixed modes; the next lines tell
        os.fchmod(descriptor, special | mode)
    found = os.fstat(descriptor).st_mode & 0o777
    if found != mode:
        text = f"the file system gives the mode {found:04o}, and {_VARIABLE} requires {mode:04o}"
        raise PermissionError(errno.EPERM, text)
