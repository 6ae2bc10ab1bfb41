"""Paths of local files, folders below the root of a storage, rights of new files, and errors of the system.

Note "No links below the root": the root may lead through links, because its user named it. A folder below it
may be a link that another user made, to any place. So every file is created, renamed and removed through the
descriptor of its folder, and each folder below the root is opened from the one above, without following a
link. Reads follow links, because a step may be moved to another disk.

Note "Rights": without the environment variable SHARDPROOF_FILE_MODE, the system decides: 0666 for files and
0777 for folders, less the umask. With it, new files have exactly this mode, whatever the umask is, and new
folders have it with the right to enter for everyone who may read. A file or folder is made with the rights of
its owner alone, and then gets its mode. So it never has more rights than it should have. Files and folders
that exist keep their mode.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from shardproof._utils.arguments import unexpanded_home
from shardproof._utils.humanize import printable as printable_text
from shardproof.errors import StorageError

StrOrBytesPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_OPEN_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_TRIES = 100
_MODE_VARIABLE = "SHARDPROOF_FILE_MODE"
_OWNER_MODE = 0o600
_LARGEST_MODE = 0o666


def absolute(path: StrOrBytesPath) -> Path:
    """The absolute form of `path`.

    Symbolic links stay, except those before a "..", which leads to the folder above the link's target.

    Raises:
        StorageError: `path` is invalid or has a ``~``, or it is relative and the working directory does not
            exist.

    >>> str(absolute("/runs/./gpt/"))
    '/runs/gpt'
    """
    text = os.fsdecode(path)
    fault = "it is empty" if not text else "it has a NUL character" if "\0" in text else None
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        fault = fault or "it is not valid Unicode"
    fault = fault or unexpanded_home(text)
    if fault is not None:
        raise StorageError(f"{text!r} cannot be the path of a folder: {fault}", file=ascii(text))
    try:
        parts = Path(text if os.path.isabs(text) else os.path.join(os.getcwd(), text)).parts
    except FileNotFoundError as error:
        raise storage_error(error, "find the working directory, to which this is relative:", text) from error
    if ".." not in parts:
        return Path(*parts)
    after = len(parts) - parts[::-1].index("..")
    return Path(os.path.realpath(Path(*parts[:after])), *parts[after:])


def lost_link(path: Path) -> StorageError | None:
    """The error for a `path` behind a dangling symbolic link, most often a lost mount; None without one."""
    lowest = next(above for above in (path, *path.parents) if os.path.lexists(above))
    if os.path.exists(lowest) or not os.path.islink(lowest):  # another process may remove it meanwhile
        return None
    return StorageError(
        f"cannot look at {printable(path)}: {printable(lowest)} is a symbolic link to "
        f"{printable(os.path.realpath(lowest))}, and nothing is there. Mount it, or remove the link",
        file=printable(path),
        errno="ENOENT",
        missing=False,
        lost_link=True,
    )


def leads_beside(link: str) -> bool:
    """True if a symbolic link points to an entry of its own folder, even one that does not exist."""
    return os.path.dirname(os.path.realpath(link)) == os.path.realpath(os.path.dirname(link))


_ADVICE = {
    errno.ENOSPC: "The disk is full: free space, then save again. `shardproof prune RUN` removes the files "
    "of dead saves, and `shardproof prune RUN --keep 1 --yes` all steps but the newest.",
    errno.EDQUOT: "The quota is used up: free space or ask for more, then save again.",
    errno.EFBIG: "The file is larger than allowed: raise the limit (`ulimit -f`) or that of the file system.",
    errno.EROFS: "The file system is mounted read-only: remount it or choose another place.",
    errno.EACCES: "The process may not do this here: check owner and mode of the file and its folders.",
    errno.EPERM: "The process may not do this here: check owner, mode and attributes of the file.",
    errno.ENOENT: "There is no such file: check the path, and whether it is mounted on this node.",
    errno.ENOTDIR: "A file stands where a folder is needed: check the path.",
    errno.EISDIR: "A folder stands where a file is needed: check the path.",
    errno.EEXIST: "There is already a file of this name: another save wrote it.",
    errno.EIO: "The device failed: see the kernel log (`dmesg`), do not trust this disk.",
    errno.ESTALE: "The file was removed or moved on the file server while it was open: try again.",
    errno.ENOTCONN: "The mount is lost: see `mount` and the kernel log (`dmesg`), and mount it again.",
    errno.EMFILE: "Too many open files: raise the limit (`ulimit -n`).",
    errno.ENFILE: "Too many open files on this machine: raise `fs.file-max`.",
    errno.ENAMETOOLONG: "The path is too long for this file system: choose a shorter one.",
    errno.ELOOP: "Replace the symbolic link in the path by a folder.",
}


def printable(path: str | Path) -> str:
    r"""A path for messages: a byte that is not UTF-8, or a character that does not print, becomes an escape.

    >>> import os
    >>> printable(os.fsdecode(b"/runs/caf\xe9"))
    '/runs/caf\\xe9'
    """
    return printable_text(os.fsencode(path).decode("utf-8", "backslashreplace"))


def storage_error(cause: OSError, doing: str, path: str | Path) -> StorageError:
    """The `StorageError` for `cause`, an error of the operation `doing` ("write", "read") on `path`.

    >>> error = storage_error(OSError(errno.ENOENT, "No such file or directory"), "read", "/runs/a/0")
    >>> print(error)
    cannot read /runs/a/0: No such file or directory (ENOENT). There is no such file: check the path, \
and whether it is mounted on this node.
    >>> error.details
    {'file': '/runs/a/0', 'errno': 'ENOENT', 'missing': True}
    """
    code, path = cause.errno or 0, printable(path)
    name = errno.errorcode.get(code, str(code))
    text = f"cannot {doing} {path}: {cause.strerror or cause} ({name}). {_ADVICE.get(code, '')}".rstrip()
    details = {"unanswered": True} if code == errno.ETIMEDOUT else {}
    return StorageError(text, file=path, errno=name, missing=code == errno.ENOENT, **details)


@contextmanager
def system_errors(doing: str, path: str | Path) -> Iterator[None]:
    """Turns an `OSError` of the block into its `storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing, path) from error


def unconfirmed_error(cause: OSError, path: str | Path) -> StorageError:
    """The `StorageError` for `cause`, an error of the flush of the name of the published file `path`.

    >>> error = unconfirmed_error(OSError(errno.EIO, "Input/output error"), "/runs/a/manifest.json")
    >>> print(error)
    cannot flush the name of /runs/a/manifest.json: Input/output error (EIO). The device failed: see the \
kernel log (`dmesg`), do not trust this disk. The file is in place and readers see it, but a crash of the \
machine may undo that.
    >>> error.details["in_place"]
    True
    """
    error = storage_error(cause, "flush the name of", path)
    text = (
        f"{error.message} The file is in place and readers see it, but a crash of the machine may undo that."
    )
    return StorageError(text, **error.details, in_place=True)


class RealFolder:
    """A folder at or below a root, open for operations on the names in it. A context manager that closes it.

    With `make`, missing folders are made, those above the root, too.

    Raises:
        FileNotFoundError: a folder is missing.
        NotADirectoryError: a file stands where a folder is needed.
        OSError: a folder below the root is a link (ELOOP), or the system refused.
    """

    def __init__(self, root: Path, path: Path, *, make: bool = False) -> None:
        self.path = path
        self.made: list[Path] = []
        """The folders that were made."""
        if make:
            self.made += make_folders(root)
        self.number = os.open(root, _OPEN_FOLDER)
        above = root
        for part in path.relative_to(root).parts:
            above = above / part
            try:
                inner = self._open(part, above, make=make)
            finally:
                os.close(self.number)
                self.number = -1
            self.number = inner

    def __enter__(self) -> RealFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes the folder. Does nothing the second time."""
        number, self.number = getattr(self, "number", -1), -1
        if number >= 0:
            os.close(number)

    def _open(self, part: str, path: Path, *, make: bool) -> int:
        """Opens a folder in this one."""
        try:
            if not make:
                return os.open(part, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=self.number)
            for attempt in range(_MOST_TRIES):  # a peer may remove the empty folder that was just made
                try:
                    return os.open(part, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=self.number)
                except FileNotFoundError:
                    if attempt == _MOST_TRIES - 1:
                        raise
                try:
                    make_folder(part, self.number)
                    self.made.append(path)
                except FileExistsError:
                    pass
        except NotADirectoryError as error:
            is_link = False
            with suppress(OSError):
                is_link = stat.S_ISLNK(os.stat(part, dir_fd=self.number, follow_symlinks=False).st_mode)
            if is_link:
                text = f"{printable(path)} is a symbolic link, behind which no file is written or removed"
                raise OSError(errno.ELOOP, text, str(path)) from error
            raise
        raise AssertionError("unreachable")


def create_file(name: str, flags: int, folder: int) -> int:
    """Creates a file in an open folder; returns its descriptor.

    Raises:
        StorageError: the variable is no mode.
        OSError: the system refused, or the file system does not keep modes.
    """
    mode = _users_mode()
    if mode is None:
        return os.open(name, flags, 0o666, dir_fd=folder)
    descriptor = os.open(name, flags, _OWNER_MODE, dir_fd=folder)
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

    Returns the folders that were missing, the last one first.

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
    text = os.environ.get(_MODE_VARIABLE, "")
    if not text:
        return None
    mode = -1
    with contextlib.suppress(ValueError):
        mode = int(text, 8)
    if not 0 <= mode <= _LARGEST_MODE or mode & 0o111 or mode & _OWNER_MODE != _OWNER_MODE:
        raise StorageError(
            f"the environment variable {_MODE_VARIABLE} is {text!r}: set it to the mode of new files in "
            "octal, from 0600 to 0666 and without the right to run, for example 0640, or unset it",
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
        text = f"the file system gives the mode {found:04o}, and {_MODE_VARIABLE} requires {mode:04o}"
        raise PermissionError(errno.EPERM, text)
