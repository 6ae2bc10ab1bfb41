"""Reads the newest step into the page cache, so that a restart on the same node reads it from memory.

Note: one thread, at a bounded rate
    A save writes past the page cache. After the commit a thread of each rank reads the file that the rank
    wrote, at `BYTES_PER_SECOND` or less. The next save stops the thread. The thread also stops if less than
    `1 / _SPARE` of the node's memory is free, so that it displaces no pages of training. The commit of a
    newer step drops the pages of the older one.

Note: when a read costs little
    Reading each file once more costs a local disk little. Storage that many nodes share would serve the
    whole checkpoint again. So ``cache="auto"`` reads only from local file systems, and only files that leave
    a quarter of the memory free.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from shardproof.errors import StorageError
from shardproof.storage import LocalStorage

__all__ = ["BYTES_PER_SECOND", "NewestStep", "free_memory", "is_on_local_disk"]

_log = logging.getLogger("shardproof")

BYTES_PER_SECOND = 256 << 20
_REQUEST = 4 << 20
_SPARE = 8
"""An eighth of the node's memory stays free."""
_AMPLE = 4
"""With ``cache="auto"``, a quarter of the node's memory is free after a file is read."""
_MOUNTS = Path("/proc/self/mountinfo")
_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"}
"""File systems of disks that no other node uses."""


def free_memory() -> tuple[int, int]:
    """Bytes of this node's memory that nothing uses, and bytes in all; zeros if unknown."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0, 0


def is_on_local_disk(path: str) -> bool:
    """True if the file system that has `path` is known to be on a disk of this node."""
    try:
        device = os.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        mounts = [line.split(" - ", 1) for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
        kinds = {after.split()[0] for before, after in mounts if before.split()[2] == number}
    except (OSError, ValueError, IndexError):
        return False
    return bool(kinds) and kinds <= _LOCAL


class NewestStep:
    """This rank's file of the newest step, in the page cache.

    Args:
        drop_older: True to drop the file of the previous step. False if newer steps refer to that file.
        rate: bytes a second, at most.
        only_if_cheap: True to read a file only under the conditions of the note "when a read costs little".
    """

    def __init__(
        self, *, drop_older: bool = True, rate: int = BYTES_PER_SECOND, only_if_cheap: bool = False
    ) -> None:
        self._drop_older = drop_older
        self._rate = rate
        self._only_if_cheap = only_if_cheap
        self._cached: tuple[LocalStorage, str] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def stop(self) -> None:
        """Ends the read under way, without waiting for it. The pages that were read stay in the cache."""
        self._stop.set()

    def committed(self, storage: LocalStorage, name: str) -> None:
        """Begins to read a file of the newest step, and drops the file of the step before."""
        self.stop()
        older, self._cached = self._cached if self._drop_older else None, (storage, name)
        stop = self._stop = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(storage, name, older, stop), name="shardproof-page-cache", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the program is exiting, or at a limit of threads
            _log.debug("%s/%s stays out of the page cache: %s", storage.location, name, error)
        else:
            self._thread = thread

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the current read. Returns True if it ended."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _run(
        self, storage: LocalStorage, name: str, older: tuple[LocalStorage, str] | None, stop: threading.Event
    ) -> None:
        try:
            if older is not None:
                _drop(*older)
            size = storage.size(name)
            if size is None:  # this rank wrote nothing, or retention was faster
                return
            if self._only_if_cheap and not _is_cheap(storage, size):
                return
            memory = memoryview(bytearray(min(_REQUEST, size)))
            for start in range(0, size, _REQUEST):
                free, total = free_memory()
                if stop.is_set() or free * _SPARE < total:
                    return
                storage.read_into(name, start, memory[: size - start])
                stop.wait(_REQUEST / self._rate)
        except StorageError as error:
            _log.debug("%s/%s stays out of the page cache: %s", storage.location, name, error)
        finally:
            storage.close()


def _is_cheap(storage: LocalStorage, size: int) -> bool:
    """True if reading `size` bytes uses only a local disk, and leaves enough memory free."""
    free, total = free_memory()
    return (free - size) * _AMPLE >= total > 0 and is_on_local_disk(storage.location)


def _drop(storage: LocalStorage, name: str) -> None:
    """Drops the pages of an older step. A file that retention removed has none."""
    try:
        storage.drop_cached(name)
    except StorageError as error:
        if not error.details.get("missing"):
            raise
    finally:
        storage.close()
