"""The comparison of a file's size with the size that the manifest records."""

from __future__ import annotations

from shardproof.errors import StorageError
from shardproof.format.manifest import FileRecord
from shardproof.storage import Storage

__all__ = ["check_size", "size_error", "size_fault"]


def size_fault(storage: Storage, name: str, size: int) -> tuple[str, bool] | None:
    """Compares the size of a file with the expected one, without reading the file.

    Args:
        storage: holds the file.
        name: name of the file in `storage`.
        size: expected bytes.

    Returns:
        None if the sizes are equal; else the fault in words, and whether the file is missing.

    Raises:
        StorageError: the storage cannot tell the size.
    """
    found = storage.size(name)
    if found == size:
        return None
    return f"expected {size} bytes, {'it is missing' if found is None else f'it has {found}'}", found is None


def size_error(
    storage: Storage, record: FileRecord, *, path: str | None = None, advice: str = ""
) -> StorageError | None:
    """The error for a shard file whose size is not the recorded one; None if the sizes are equal.

    Args:
        storage: the folder that holds the file (see `locate_files`).
        record: record of the file, in the manifest.
        path: what the message calls the file; None: `FileRecord.place`.
        advice: sentences that end the message.

    Raises:
        StorageError: the storage cannot tell the size.
    """
    fault = size_fault(storage, record.name, record.size)
    if fault is None:
        return None
    text, missing = fault
    end = f". {advice}" if advice else ""
    return StorageError(f"{path or record.place}: {text}{end}", file=record.place, missing=missing)


def check_size(storage: Storage, record: FileRecord, *, path: str | None = None, advice: str = "") -> None:
    """Checks that a shard file has its recorded size. Arguments are those of `size_error`.

    Raises:
        StorageError: the file is missing or has another size, or the storage cannot tell. Only in the first
            case the details have ``missing=True``.
    """
    error = size_error(storage, record, path=path, advice=advice)
    if error is not None:
        raise error
