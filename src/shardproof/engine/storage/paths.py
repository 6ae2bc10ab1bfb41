"""Paths of local files, and the errors that the operating system reports about them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TypeAlias

from shardproof._utils.arguments import unexpanded_home
from shardproof._utils.humanize import printable as printable_text
from shardproof.errors import StorageError

StrOrBytesPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


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
