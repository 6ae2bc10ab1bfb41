"""The time by the clock that dates the files of a storage."""

from __future__ import annotations

from shardproof.engine.storage.base import Storage
from shardproof.errors import StorageError


def time_at(storage: Storage) -> float:
    """The time now, Unix seconds, by the clock that dates the files of a storage. May write a file.

    The age of a file is the difference of this time and the time of its last write. The clock of this machine
    may differ from that of a store by hours.

    Raises:
        StorageError: the store does not tell its time.

    Example:
        >>> import tempfile, time
        >>> from shardproof.storage import LocalStorage
        >>> time_at(LocalStorage(tempfile.mkdtemp())) <= time.time()
        True
    """
    now = storage.now()
    if now is None:
        raise StorageError(f"{storage.location}: the store does not tell its time", file=storage.location)
    return now
