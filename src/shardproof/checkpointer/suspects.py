"""Suspects: checkpoints of steps whose validation failed. A verdict settles a suspect.

Note "Settled for one attempt": the verdict is a file in the folder of the suspect, and names its attempt. So
a new suspect that replaces a settled one is not settled, at whatever moment its save dies.
"""

from __future__ import annotations

import logging
import time

import msgspec

from shardproof.checkpointer.step_folders import SETTLED_NAME, StepFolder, parse_folder, read_note
from shardproof.errors import FormatError, NotCommittedError
from shardproof.format import MANIFEST_NAME, read_manifest
from shardproof.storage import Storage

__all__ = ["Settled", "read_settled", "settled_suspects", "unsettled_suspects", "write_settled"]

_log = logging.getLogger("shardproof")


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a suspect."""

    attempt: str
    """Attempt of the suspect; empty if its manifest could not be read."""
    verdict: str
    time: float
    """Unix seconds."""


def read_settled(folder: Storage) -> Settled | None:
    """The verdict on the suspect in a folder; None if it is not settled.

    Raises:
        StorageError: the storage cannot read it at the moment.
    """
    data = read_note(folder, SETTLED_NAME)
    if data is None:
        return None
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
    """Settles the suspect in a folder, durably. Returns False, and writes nothing, if there is none.

    Raises:
        StorageError: the storage failed.
    """
    if folder.size(MANIFEST_NAME) is None:
        return False
    settled = Settled(attempt=_attempt(folder), verdict=verdict, time=time.time())
    folder.publish(SETTLED_NAME, msgspec.json.encode(settled) + b"\n", replace=True)
    return True


def unsettled_suspects(run: Storage) -> list[StepFolder]:
    """Committed, unsettled suspects of a run, ascending."""
    return [folder for folder in _suspects(run) if read_settled(run.within(folder.name)) is None]


def settled_suspects(run: Storage) -> list[StepFolder]:
    """Committed, settled suspects of a run, ascending."""
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
