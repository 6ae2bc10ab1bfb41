"""Suspects: checkpoints of steps whose validation failed, until it is known what was wrong.

Note "Settled for one attempt": what settles a suspect stands in a file beside its manifest and names the
attempt that it speaks of. So a suspect that is saved again, over one that was settled, is not settled, at
whatever moment the save of it dies.
"""

from __future__ import annotations

import logging
import time

import msgspec

from shardproof.checkpointer.step_folders import SETTLED_NAME, StepFolder, parse_folder
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format import MANIFEST_NAME, read_manifest
from shardproof.storage import Storage

__all__ = ["Settled", "read_settled", "settled_suspects", "unsettled_suspects", "write_settled"]

_LONGEST = 1 << 20
"""Bytes of `SETTLED_NAME` that are read; a longer one is cut, and so cannot be read."""

_log = logging.getLogger("shardproof")


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a suspect."""

    attempt: str
    """Of the checkpoint that it speaks of; empty if its manifest could not be read then."""
    verdict: str
    time: float
    """Unix seconds."""


def read_settled(folder: Storage) -> Settled | None:
    """What settled the suspect in a folder; None while nothing has.

    Raises:
        StorageError: it cannot be had just now.
    """
    try:
        data = folder.read(SETTLED_NAME, 0, min(folder.size(SETTLED_NAME) or 0, _LONGEST))
    except StorageError as error:
        if error.details.get("missing"):
            return None
        raise
    try:
        settled = msgspec.json.decode(data, type=Settled)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _log.warning(
            "%s/%s cannot be read (%s), so the suspect counts as not settled: settle it again",
            folder.location,
            SETTLED_NAME,
            error,
        )
        return None
    return settled if settled.attempt == _attempt(folder) else None


def write_settled(folder: Storage, verdict: str) -> bool:
    """Settles the suspect in a folder, durably. False, and nothing is written, if no suspect is there.

    Raises:
        StorageError: the storage failed.
    """
    if folder.size(MANIFEST_NAME) is None:
        return False
    settled = Settled(attempt=_attempt(folder), verdict=verdict, time=time.time())
    folder.publish(SETTLED_NAME, msgspec.json.encode(settled) + b"\n", replace=True)
    return True


def unsettled_suspects(run: Storage) -> list[StepFolder]:
    """Committed suspects of a run that nothing has settled, ascending."""
    return [folder for folder in _suspects(run) if read_settled(run.within(folder.name)) is None]


def settled_suspects(run: Storage) -> list[StepFolder]:
    """Committed suspects of a run that are settled, ascending."""
    return [folder for folder in _suspects(run) if read_settled(run.within(folder.name)) is not None]


def _suspects(run: Storage) -> list[StepFolder]:
    folders = filter(None, map(parse_folder, run.folders()))
    return sorted(
        folder
        for folder in folders
        if folder.suspect and run.within(folder.name).size(MANIFEST_NAME) is not None
    )


def _attempt(folder: Storage) -> str:
    try:
        return read_manifest(folder).attempt
    except (FormatError, NotCommittedError):
        return ""
