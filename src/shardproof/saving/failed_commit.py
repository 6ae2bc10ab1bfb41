"""What a failed save leaves in storage: a manifest that may not be durable, and files without a manifest.

Note "Unconfirmed": if the storage fails after the manifest got its name, readers see the checkpoint, but a
crash of the machine may undo the commit. Such a save fails, and its files stay. The coordinator records the
attempt in memory, because a failing storage cannot record it. Until the commit is confirmed, the same saver
may replace it without `overwrite`, no incremental save refers to it, and retention does not count it. A later
save to the same place confirms it. A flush also confirms it, if the whole checkpoint was read and verified
before. Another process sees a committed checkpoint; `Checkpointer.restore` flushes the checkpoint that it
loads.
"""

from __future__ import annotations

import logging

from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format import index_name, read_manifest, shard_name
from shardproof.storage import Storage

__all__ = ["Unconfirmed", "is_in_place", "remove_own_files"]

_log = logging.getLogger("shardproof")


class Unconfirmed:
    """The attempts whose commit is not confirmed, by location."""

    def __init__(self) -> None:
        self._attempts: dict[str, str] = {}

    def add(self, storage: Storage, attempt: str = "") -> None:
        """Records an unconfirmed checkpoint in `storage`. With its attempt, the same saver may replace it."""
        self._attempts[storage.location] = attempt or self._attempts.get(storage.location, "")

    def confirm(self, storage: Storage) -> None:
        """Records that the checkpoint in `storage` is durable."""
        self._attempts.pop(storage.location, None)

    def __contains__(self, storage: Storage) -> bool:
        return storage.location in self._attempts

    def may_replace(self, storage: Storage) -> bool:
        """True if the manifest in `storage` is that of an unconfirmed attempt of this saver."""
        attempt = self._attempts.get(storage.location, "")
        return attempt != "" and is_in_place(storage, attempt) is True


def is_in_place(storage: Storage, attempt: str) -> bool | None:
    """True if the manifest in `storage` is that of `attempt`; None if the manifest cannot be read."""
    try:
        return _committed_attempt(storage) == attempt
    except (FormatError, StorageError):
        return None


def remove_own_files(storage: Storage, rank: int, attempt: str) -> None:
    """Removes this rank's files of a save that the coordinator refused; logs a file that it cannot remove.

    Rank 0 also removes the index.

    Note "Whose files": a file may be removed only if no manifest can name it, now or later. After a refusal
    by the coordinator no manifest can, unless the error states that the manifest is or may be in place
    (`details["committed"]`). The folder alone is no evidence, because another node may see an older state of
    it. A rank only checks once more for a manifest that another node wrote. A silent coordinator
    may be slow, and commit later. An interrupt of this rank does not stop the coordinator. In these cases the
    files stay, and prune removes them.
    """
    names = [shard_name(rank, attempt)]
    if rank == 0:
        names.append(index_name(attempt))
    try:
        if _committed_attempt(storage) != attempt:
            for name in names:
                storage.delete(name)
    except (FormatError, StorageError) as error:
        _log.warning("%s: %s stay for prune (%s)", storage.location, ", ".join(names), error)


def _committed_attempt(storage: Storage) -> str | None:
    try:
        return read_manifest(storage).attempt
    except NotCommittedError:
        return None
