"""The local folder in which a conversion works until it publishes: ``DST.converting``, or one in TMPDIR.

    DST.converting/plan       digest of the plan
    DST.converting/units/     a record for each unit that is written
    DST.converting/files/     the checkpoint that becomes DST

Note "The folder is private": a conversion believes the records in this folder, and writes and removes files
in it. So the folder has the mode 0700. One that another user made, that others can write to, or that is a
link is refused before anything in it is read. A file system may map owners or have fixed modes, as CIFS does,
so owner and mode are compared with those of a new private folder beside it.

A record is published when the files of its unit are durable. A conversion that was interrupted, even by
SIGKILL, continues with the units that have no record.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from dataclasses import dataclass
from typing import Any

import msgspec

from shardproof.engine.storage import LocalStorage, make_folders, storage_error
from shardproof.errors import FormatError, StorageError, StructureError
from shardproof.formats.conversion.destination import FILES, BucketDestination, destination_at

_PLAN, _UNITS, _LOCK = "plan", "units", "lock"
_SPARE_BYTES = 64 << 20
"""Bytes of metadata for which a conversion wants room in addition to the tensors, at most. A conversion with
fewer bytes of tensors wants as many as these."""
_SMALL_BYTES, _GROUP_FILES = 8 << 20, 64
"""Files of at most this size are uploaded in groups of this many: requests take most of their time."""


@dataclass(frozen=True, slots=True)
class HashedBox:
    """A box that was given to a writer, and the digest of its bytes."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: str
    """xxh3_128 of the dense bytes, 32 hexadecimal digits."""


class UnitRecord(msgspec.Struct, frozen=True):
    """A unit that is written."""

    name: str
    written: dict[str, Any]
    """Values that the writer needs at the commit."""
    boxes: list[HashedBox]
    """The boxes of the unit, with digests."""
    nbytes: int


class WorkFolder:
    """The work folder of a destination.

    Raises:
        StructureError: no conversion can write to the destination.
        StorageError: the destination is not valid.
    """

    def __init__(self, destination: str, temporary: str = "") -> None:
        self.destination = destination_at(destination, temporary)
        self.path = self.destination.work_path
        self.storage = LocalStorage(self.path)
        self.files = LocalStorage(self.path / FILES)
        """Where units write the new checkpoint."""
        self._lock: int | None = None

    def begin(self, digest: str, nbytes: int) -> None:
        """Locks the folder for a plan: a new folder, or that of an interrupted conversion of the same plan.

        Raises:
            AlreadyCommittedError: there is something at the destination.
            StructureError: another process uses the folder, or it belongs to another plan.
            StorageError: the folder is not private, or the file system has too little space, or it or the
                destination fails.
        """
        self.destination.begin(digest)
        is_made = self._make_private()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(self.path / _LOCK, flags, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StructureError(
                f"{self.path}: another process converts to {self.destination.location} now"
            ) from error
        except OSError as error:
            raise storage_error(error, "make", self.path) from error
        is_new = self.storage.size(_PLAN) is None
        if not is_new and (found := self.storage.read(_PLAN).decode(errors="replace")) != digest:
            raise StructureError(
                f"{self.path} is left from an interrupted conversion with another source or other options "
                f"(plan {found[:32]}, now {digest}). Repeat that conversion, or remove the folder"
            )
        written = sum(record.nbytes for record in self.records().values())
        free = shutil.disk_usage(self.path).free
        left = nbytes - written
        spare = min(left, _SPARE_BYTES)
        if free < left + spare:
            if is_made:
                shutil.rmtree(self.path)
                self.destination.end()
            raise StorageError(
                f"{self.path}: {free:,} bytes are free, and the conversion needs {left + spare:,}: {left:,} "
                f"for tensors and {spare:,} for metadata. Free some space, or "
                f"{self.destination.space_advice}",
                file=str(self.path),
                errno="ENOSPC",
            )
        if is_new:
            self.storage.publish(_PLAN, digest.encode())
        for name in self.files.list():
            if name.endswith(".tmp"):  # a process was killed in the `publish` of this file
                self.files.delete(name)

    def _make_private(self) -> bool:
        """Makes the folder, or checks the one that is there; see note "The folder is private".

        Returns:
            True if it made the folder.
        """
        try:
            make_folders(self.path.parent)
            try:
                self.path.mkdir(0o700)
                return True
            except FileExistsError:
                found = self.path.lstat()
                probe = tempfile.mkdtemp(prefix=".shardproof-", dir=self.path.parent)
                try:  # owner and mode of a private folder that this process makes
                    new = os.lstat(probe)
                finally:
                    os.rmdir(probe)
        except OSError as error:
            failure = storage_error(error, "make the work folder", self.path)
            advice = self.destination.work_advice
            raise StorageError(f"{failure.message} {advice}.", **failure.details) from error
        if not stat.S_ISDIR(found.st_mode):
            fault = "is a link or a file, where the conversion needs a folder of its own"
        elif found.st_uid != new.st_uid:
            fault = f"belongs to another user (user {found.st_uid})"
        elif found.st_mode & ~new.st_mode & 0o022:
            fault = f"has the mode {stat.S_IMODE(found.st_mode):04o}, so that other users can write to it"
        else:
            return False
        raise StorageError(f"{self.path} {fault}. {self.destination.work_advice}", file=str(self.path))

    def check_is_shared(self) -> None:
        """Raises if this is not the folder that the coordinator, perhaps on another node, has locked."""
        if self.storage.size(_PLAN) is None:
            raise StructureError(
                f"{self.path} is missing on {socket.gethostname()}: all nodes have to share it. "
                "If the destination is an object store, TMPDIR chooses its place"
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

    def uploads(self, last: str) -> list[list[str]]:
        """Names of the files to upload before `publish`, by task: large files, then groups of small ones.

        Args:
            last: name of the file that makes the checkpoint visible. `publish` uploads it, unless it is the
                only one.
        """
        if not isinstance(self.destination, BucketDestination):
            return []
        names = self.files.list()
        sizes = {name: self.files.size(name) or 0 for name in names if name != last or len(names) == 1}
        large = sorted((name for name in sizes if sizes[name] > _SMALL_BYTES), key=lambda name: -sizes[name])
        small = [name for name in sizes if sizes[name] <= _SMALL_BYTES]
        groups = [small[at : at + _GROUP_FILES] for at in range(0, len(small), _GROUP_FILES)]
        return [*([name] for name in large), *groups]

    def publish(self, last: str) -> None:
        """Publishes the new checkpoint at the destination and removes the work folder.

        Raises:
            AlreadyCommittedError: something appeared at the destination meanwhile.
            StorageError: the file system or the object store failed.
        """
        self.destination.publish(self.files, self.files.list(), last)
        self.close()
        shutil.rmtree(self.path)
        self.destination.end()

    def close(self) -> None:
        """Releases the folder for another process."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
