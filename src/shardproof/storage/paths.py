"""Paths of folders as users give them: absolute, printable, and behind symbolic links."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from shardproof.errors import StorageError
from shardproof.storage.failures import printable, storage_error

__all__ = ["StrOrBytesPath", "absolute", "leads_beside", "lost_link"]

StrOrBytesPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def absolute(path: StrOrBytesPath) -> Path:
    """The path from the root of the file system, for any working directory.

    Symbolic links are kept, except those before a "..", which leads to the folder above the link's target.

    Raises:
        StorageError: it cannot be a path, or it is relative and the working directory is gone.

    >>> str(absolute("/runs/./gpt/"))
    '/runs/gpt'
    """
    text = os.fsdecode(path)
    fault = "it is empty" if not text else "it has a NUL character" if "\0" in text else _encoding_fault(text)
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
    """The error to raise where nothing is at `path` because a symbolic link on its way leads nowhere.

    Such a link is a lost mount more often than not. None if there is no such link.
    """
    lowest = next(above for above in (path, *path.parents) if os.path.lexists(above))
    if os.path.exists(lowest):
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
    """Whether a symbolic link is a second name for an entry of its own folder, present or not."""
    return os.path.dirname(os.path.realpath(link)) == os.path.realpath(os.path.dirname(link))


def _encoding_fault(text: str) -> str | None:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    return None
