"""Commits that this process could not confirm.

Note "Unconfirmed": where the storage fails after the manifest got its name, readers see the checkpoint, but
a crash of the machine may bring back what was there before. Such a commit is a failed save whose files stay.
The coordinator remembers the attempt in memory: a failing storage cannot be asked to. Until the commit is
confirmed, the same saver may replace it without being asked to overwrite, no incremental save refers to it,
and retention does not count it. A later save to the same place confirms it, and so does a flush after all of
it was read and verified. Another process sees a committed checkpoint; `Checkpointer.restore` flushes what it
takes.
"""

from __future__ import annotations

from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format import read_manifest
from shardproof.storage import Storage

__all__ = ["Unconfirmed", "is_in_place"]


class Unconfirmed:
    """The attempts whose commit is not confirmed, by location."""

    def __init__(self) -> None:
        self._attempts: dict[str, str] = {}

    def add(self, storage: Storage, attempt: str = "") -> None:
        """Remembers the checkpoint in `storage`; one with an attempt may be replaced by the same saver."""
        self._attempts[storage.location] = attempt or self._attempts.get(storage.location, "")

    def confirm(self, storage: Storage) -> None:
        """The checkpoint in `storage` is durable."""
        self._attempts.pop(storage.location, None)

    def __contains__(self, storage: Storage) -> bool:
        return storage.location in self._attempts

    def may_replace(self, storage: Storage) -> bool:
        """Whether the manifest in `storage` is that of an attempt of this saver."""
        attempt = self._attempts.get(storage.location, "")
        return attempt != "" and is_in_place(storage, attempt) is True


def is_in_place(storage: Storage, attempt: str) -> bool | None:
    """Whether the manifest in `storage` is that of `attempt`; None where that cannot be told."""
    try:
        return read_manifest(storage).attempt == attempt
    except NotCommittedError:
        return False
    except (FormatError, StorageError):
        return None
