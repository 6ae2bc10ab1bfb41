"""Names of files in a storage."""

from __future__ import annotations

from shardproof.errors import StorageError

__all__ = ["check_folder", "check_name", "name_fault"]


def name_fault(name: str) -> str | None:
    """Why `name` cannot be the name of a file in a storage; None if it can.

    >>> name_fault("shards/00000-a.safetensors")
    >>> name_fault("../other/manifest.json")
    'it has a part ".."'
    """
    if not name:
        return "it is empty"
    if "\0" in name:
        return "it has a NUL character"
    if name.startswith("/"):
        return "it is absolute"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f'it has a part "{part}"'
    try:  # a name that a file system gave may have bytes that are not UTF-8, in Python's own spelling
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    return None


def check_name(name: str, location: str = "a storage") -> str:
    """`name`, if it stays inside the storage.

    Args:
        name: relative, parts with "/" between them, none of them empty, "." or "..".
        location: the storage, for the message.

    Raises:
        StorageError: the name could leave the storage, or is none.

    >>> check_name("shards/00000-a.safetensors")
    'shards/00000-a.safetensors'
    """
    fault = name_fault(name)
    if fault is not None:
        raise StorageError(
            f"{name!r} cannot name a file in {location}: {fault}. Names are relative and stay inside.",
            file=name,
        )
    return name


def check_folder(name: str, location: str = "a storage") -> str:
    """`name`, if it is the plain name of one folder.

    Args:
        name: without "/", and neither "." nor "..".
        location: where the folder is to be, for the message.

    Raises:
        StorageError: it could lead anywhere else, or is no name.

    >>> check_folder("step-00001000")
    'step-00001000'
    """
    fault = 'it has a "/"' if "/" in name else name_fault(name)
    if fault is not None:
        raise StorageError(f"{name!r} cannot name a folder in {location}: {fault}.", file=name)
    return name
