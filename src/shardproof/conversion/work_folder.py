"""The folder beside the destination in which a conversion works until it publishes.

    DST.converting/plan       digest of the plan
    DST.converting/units/     a record for each unit that is written
    DST.converting/files/     the checkpoint that becomes DST

A record is published when the files of its unit are durable. A conversion that was interrupted, even by
SIGKILL, goes on with the units that have no record.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from shardproof.conversion.mapped_source import HashedBox
from shardproof.errors import AlreadyCommittedError, FormatError, StorageError, StructureError
from shardproof.storage import LocalStorage, is_url, publish_path

__all__ = ["UnitRecord", "WorkFolder"]

_PLAN, _UNITS, _FILES, _LOCK = "plan", "units", "files", "lock"
_SPARE_BYTES = 64 << 20
"""Bytes of metadata that a conversion may write beside the tensors."""


class UnitRecord(msgspec.Struct, frozen=True):
    """A unit that is written."""

    name: str
    written: dict[str, Any]
    """What the writer needs to know at the commit."""
    boxes: list[HashedBox]
    """What the unit holds, with digests."""
    nbytes: int


class WorkFolder:
    """The work folder of a destination.

    Args:
        destination: path of the new checkpoint.
    """

    def __init__(self, destination: str) -> None:
        if is_url(destination):
            raise StructureError(
                f"a conversion writes to a folder, and {destination} is the URL of an object store or of a "
                "run in memory. Convert to a folder. `shardproof convert SRC URL --standalone` copies steps "
                "of shardproof's format"
            )
        self.destination = Path(os.path.abspath(destination))
        self.path = self.destination.with_name(f"{self.destination.name}.converting")
        self.storage = LocalStorage(self.path)
        self.files = LocalStorage(self.path / _FILES)
        """Where units write the new checkpoint."""
        self._lock: int | None = None

    def begin(self, digest: str, nbytes: int) -> None:
        """Takes the folder for a plan: a new folder, or that of an interrupted conversion of the same plan.

        Args:
            digest: of the plan.
            nbytes: of the tensors to write.

        Raises:
            AlreadyCommittedError: there is something at the destination.
            StructureError: another process uses the folder, or it belongs to another plan.
            StorageError: the file system has too little space, or fails.
        """
        if os.path.lexists(self.destination):
            raise AlreadyCommittedError(
                f"{self.destination} exists. It was not touched: choose another destination, or remove it",
                path=str(self.destination),
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StructureError(
                f"{self.path}: another process converts to {self.destination} now"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be made: {error.strerror}", file=str(self.path)
            ) from error
        if self.storage.size(_PLAN) is None:
            self.storage.publish(_PLAN, digest.encode())
        elif (found := self.storage.read(_PLAN).decode(errors="replace")) != digest:
            raise StructureError(
                f"{self.path} is left from an interrupted conversion with another source or other options "
                f"(plan {found[:32]}, now {digest}). Repeat that conversion, or remove the folder"
            )
        written = sum(record.nbytes for record in self.records().values())
        free = shutil.disk_usage(self.path).free
        if free < nbytes - written + _SPARE_BYTES:
            raise StorageError(
                f"{self.path}: {free:,} bytes are free, and the conversion writes {nbytes - written:,}. Free "
                "some space, or choose a destination on another file system",
                file=str(self.path),
            )

    def records(self) -> dict[str, UnitRecord]:
        """The units that are written, by name."""
        units = self.storage.within(_UNITS)
        found = {}
        for name in units.list():
            if name.endswith(".json"):
                try:
                    record = msgspec.json.decode(units.read(name), type=UnitRecord)
                except msgspec.DecodeError as error:
                    raise FormatError(
                        f"{units.location}/{name} is damaged ({error}): remove it, and its unit is written "
                        "again",
                        file=f"{units.location}/{name}",
                    ) from error
                found[record.name] = record
        return found

    def add(self, record: UnitRecord) -> None:
        """Publishes the record of a unit whose files are durable."""
        name = f"{_UNITS}/{record.name}.json"
        self.storage.publish(name, msgspec.json.encode(record), replace=True)

    def publish(self) -> None:
        """Moves the new checkpoint to the destination and removes the work folder.

        A destination with the suffix of a file gets the only file.

        Raises:
            AlreadyCommittedError: something appeared at the destination meanwhile.
            StructureError: the destination names a file, and the checkpoint has several.
            StorageError: the file system failed.
        """
        source = self.path / _FILES
        if is_file_name(self.destination.name):
            names = self.files.list()
            if len(names) != 1:
                raise StructureError(
                    f"{self.destination} names a file, and the checkpoint has {len(names)} files. Give a "
                    f"folder, or no --max-file-size. What was written is in {source}"
                )
            source /= names[0]
        publish_path(source, self.destination)
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        """Gives the folder free for another process."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_file_name(name: str) -> bool:
    """True if a destination of this name is a file.

    >>> is_file_name("model.safetensors"), is_file_name("step-00001000")
    (True, False)
    """
    return name.endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt"))
