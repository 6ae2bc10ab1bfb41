"""The messages of an upload: reports of the ranks, and answers of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shardproof.engine.format import FileRecord
from shardproof.errors import ShardproofError


class UploadShare(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of the upload of a step."""

    step: int
    attempt: str
    files: tuple[FileRecord, ...]
    """The files that this rank copies. Each has its folder, even if that is the step's own."""
    rate: float | None
    """Bytes a second for this rank; None: no bound."""


class UploadAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's answer: the uploads that ended, and the next one."""

    next: UploadShare | None = None
    """None: the round is over."""
    uploaded: tuple[tuple[int, str], ...] = ()
    """Step and attempt of each save that is known to be whole on the second tier."""
    skipped: tuple[tuple[int, str, str], ...] = ()
    """Step and attempt of each save that is not uploaded, and the reason."""
    error: dict[str, object] | None = None
    """The reason why a step still waits at the end of the round."""


class UploadReport(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report of the files that it copied."""

    error: dict[str, object] | None = None
    """The error of a rank that could not copy its files."""
    of_first: bool = False
    """True if a file of the first tier cannot be read, so that only this step fails."""
    is_damage: bool = False
    """True if the error is damage of the first tier."""


@dataclass(slots=True, eq=False)
class UploadRequest:
    """A save whose upload the program may wait for, on one rank."""

    overwrite: bool = False
    """True if the save may replace another save of its step."""
    step: int = -1
    attempt: str = ""
    """Both are known after the commit on the first tier."""
    is_over: bool = False
    error: ShardproofError | None = None
    """The reason why it is not uploaded."""
