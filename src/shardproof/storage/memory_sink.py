"""Anonymous files (memfd), and the new file of a `MemoryStorage`.

Note: why writes copy twice
    A save copies a chunk into its write buffer, hashes it there, and writes the buffer to the file. A copy
    into a mapping of the file would save the second copy, but cost a page fault for every page. The page
    faults take longer (`benchmarks/memory_tier.py`, "mapped").
"""

from __future__ import annotations

import fcntl
import logging
import os
from typing import Any

from shardproof._utils import forks
from shardproof._utils.humanize import counted, gigabytes
from shardproof.errors import StorageError
from shardproof.storage.durable import write_all
from shardproof.storage.memory_keeper import SEALS
from shardproof.storage.memory_link import Connection

__all__ = ["AnonymousFile", "MemorySink", "check_room", "short_read"]

_log = logging.getLogger("shardproof")


class MemorySink:
    """A new file of a `MemoryStorage`; see `Sink`. The keeper gets it when `finish` is called.

    Args:
        keeper: the connection that the file belongs to.
        key: name of the file.
        place: URL of the file, for messages.
        seen: gets `key` when the file is finished.
    """

    def __init__(self, keeper: Connection, key: str, place: str, seen: set[str]) -> None:
        self._keeper, self._key, self._place, self._seen = keeper, key, place, seen
        self._lock = forks.lock()
        self._reserved = 0
        self._is_open = True
        self._memory = AnonymousFile(place)
        try:
            self._reserve(0)
        except BaseException:
            self._memory.close()
            raise

    def write_at(self, start: int, buffer: memoryview) -> None:
        """Write the bytes of `buffer` at byte `start`."""
        self._check_open("write")
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        if start + len(data) > self._reserved:
            self._reserve(start + len(data))
        self._memory.write(data, start)

    def finish(self, size: int) -> None:
        """Give the file `size` bytes, make it unchangeable and hand it to the keeper."""
        self._check_open("finish")
        try:
            self._reserve(size)
            self._memory.seal(size)
            self._is_open = False
            answer, _ = self._keeper.ask("finish", self._memory.number, name=self._key)
            check_room(answer, self._place)
        finally:
            self._memory.close()
        self._seen.add(self._key)

    def abort(self) -> None:
        """Drop the file. Does nothing after `finish` or `abort`."""
        if self._is_open:
            self._is_open = False
            self._memory.close()
            try:
                self._keeper.ask("cancel", name=self._key)
            except StorageError as error:  # the keeper ended, and the file with it
                _log.debug("%s: %s", self._place, error)

    def _reserve(self, size: int) -> None:
        """Asks the keeper for `size` bytes in all."""
        with self._lock:
            if size > self._reserved or not size:
                answer, _ = self._keeper.ask("reserve", name=self._key, size=size)
                if answer.get("error") == "exists":
                    raise StorageError(
                        f"cannot create {self._place}: there is already a file of this name", file=self._place
                    )
                check_room(answer, self._place)
                self._reserved = size

    def _check_open(self, doing: str) -> None:
        if not self._is_open:
            raise StorageError(
                f"cannot {doing} {self._place}: the file is already finished or aborted", file=self._place
            )


class AnonymousFile:
    """An anonymous file that this process has open: a new one if it has no number yet.

    It closes with its last reference, and in children.
    """

    def __init__(self, place: str, number: int | None = None, size: int = 0) -> None:
        self.number = -1
        self.place, self.size = place, size
        try:
            self.number = (
                os.memfd_create("shardproof", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                if number is None
                else number
            )
        except OSError as error:
            raise _failed("create", place, error) from error
        forks.close_in_child(self)

    def write(self, data: memoryview, start: int) -> None:
        """Writes `data` at byte `start`."""
        try:
            write_all(self.number, data, start)
        except OSError as error:
            raise _failed("write", self.place, error) from error

    def seal(self, size: int) -> None:
        """Gives the file its size. After this no process can change it."""
        try:
            os.ftruncate(self.number, size)
            fcntl.fcntl(self.number, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            raise _failed("finish", self.place, error) from error

    def fill(self, start: int, buffer: memoryview) -> None:
        """Reads from byte `start` until `buffer` is full."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.number, [buffer[done:]], start + done)
            except OSError as error:
                raise _failed("read", self.place, error) from error
            if count == 0:
                raise short_read(self, start, len(buffer), done)
            done += count

    def close(self) -> None:
        """Closes the descriptor. A second call does nothing."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


def check_room(answer: dict[str, Any], place: str) -> None:
    """Raises if the answer to a request is that the budget or the descriptors do not suffice."""
    if answer.get("error") == "descriptors":
        raise StorageError(
            f"cannot write {place}: the keeper process may have {answer['limit']} open files, and has "
            f"{counted(answer['files'], 'file')} of the run and {counted(answer['clients'], 'client')}. Keep "
            "fewer steps (keep=KeepLatest(1)), or raise the hard limit (RLIMIT_NOFILE, `ulimit -Hn`) before "
            "the first process of the run starts the keeper",
            file=place,
            errno="EMFILE",
            limit=answer["limit"],
        )
    if answer.get("error") == "full":
        missing = answer["used"] + answer["more"] - answer["budget"]
        raise StorageError(
            f"cannot write {place}: {gigabytes(missing)} are missing in the memory budget of the run. It is "
            f"{gigabytes(answer['budget'])}, and {gigabytes(answer['used'])} are used, by "
            f"{counted(answer['files'], 'file')} and by files that are being written. A save needs room for "
            "one step more than the run keeps: keep fewer steps (keep=KeepLatest(1)), or give "
            "MemoryStorage(budget=) more",
            file=place,
            errno="ENOSPC",
            missing_bytes=missing,
        )


def _failed(doing: str, place: str, error: OSError) -> StorageError:
    return StorageError(
        f"cannot {doing} {place} in memory: {error.strerror or error}. See the limits of this process "
        "(`ulimit -a`) and of its control group",
        file=place,
        damaged=False,
    )


def short_read(memory: AnonymousFile, start: int, expected: int, found: int) -> StorageError:
    """The error for a file that ends before the last byte of a read."""
    return StorageError(
        f"{memory.place} is too short: expected {expected} bytes from byte {start} on, found {found}",
        file=memory.place,
        missing=False,
        byte_start=start,
        byte_count=expected,
    )
