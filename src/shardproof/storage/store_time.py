"""The time by the clock that dates the files of a storage."""

from __future__ import annotations

import time

from shardproof.errors import StorageError
from shardproof.storage.base import ClockedStorage, Storage

__all__ = ["time_at", "time_without_writes"]


def time_at(storage: Storage) -> float:
    """The time now, Unix seconds, by the clock that dates the files of a storage. May write a file.

    The age of a file is the difference of this time and the time of its last write. The clock of this machine
    may differ from that of a store by hours.

    Raises:
        StorageError: the store does not tell its time.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> time_at(LocalStorage(tempfile.mkdtemp())) <= time.time()
        True
    """
    now = storage.now() if isinstance(storage, ClockedStorage) else time.time()
    if now is None:
        raise StorageError(f"{storage.location}: the store does not tell its time", file=storage.location)
    return now


def time_without_writes(storage: Storage) -> float | None:
    """As `time_at`, for programs that only read. None if the store tells it only to a program that writes.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> time_without_writes(LocalStorage(tempfile.mkdtemp())) is None
        False
    """
    return storage.now(writes=False) if isinstance(storage, ClockedStorage) else time.time()
