"""What a save that was refused leaves behind, as far as a rank may remove it itself."""

from __future__ import annotations

import logging

from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format import index_name, read_manifest, shard_name
from shardproof.storage import Storage

__all__ = ["remove_uncommitted"]

_log = logging.getLogger("shardproof")


def remove_uncommitted(storage: Storage, rank: int, attempt: str) -> None:
    """Removes a rank's files of a save that was refused. What cannot be removed is logged.

    Note "Whose files": a file may be removed only when no manifest can name it, now or later. A refusal
    that came from the coordinator is such a case unless it says that the manifest is or may be in place
    (`details["committed"]`): another node may see an older state of the folder, so a rank does not decide
    that by itself. It looks once more all the same, for a manifest that another node put there. A silent
    coordinator is not such a case: it may be slow, and commit. Nor is an interrupt on this rank, which says
    nothing of what the coordinator will do. Prune removes what stays.

    Args:
        storage: of the step.
        rank: whose files; the coordinator wrote the index, too.
        attempt: of the save.
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
    """The attempt that is committed here."""
    try:
        return read_manifest(storage).attempt
    except NotCommittedError:
        return None
