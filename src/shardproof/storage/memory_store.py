"""`MemoryStorage`: files in the memory of a node. A keeper process has them, and outlives training.

    write_at --pwrite--> anonymous file (memfd) --seals, descriptor--> keeper --descriptor--> preadv

Note: descriptors
    A file's memory is free when no process has it open. So a descriptor is open during a write, or while a
    load reads, and forked children close their copies (`forks.close_in_child`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardproof._utils.arguments import check_number, check_whole
from shardproof.errors import AlreadyCommittedError, StorageError
from shardproof.storage.base import check_folder, check_name
from shardproof.storage.memory_link import RUN_NAME, MemoryLink, keepers_here
from shardproof.storage.memory_sink import AnonymousFile, MemorySink, check_room, short_read
from shardproof.storage.open_files import OpenFiles
from shardproof.storage.paths import printable

__all__ = ["MEMORY_SCHEME", "MemoryStorage", "MemoryUsage"]

MEMORY_SCHEME = "memory"

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The memory that the keeper of a run uses."""

    keeper: int
    """Number of the process."""
    budget: int
    """Bytes that it holds at most."""
    used: int
    """Bytes of its files, and of those that are being written."""
    files: int
    processes: int
    """Processes that have written to it, and still run."""


class MemoryStorage:
    """Files in the memory of this node; see `Storage` for the methods.

    The files are in anonymous memory of a keeper process, one for each run and node, which the first write
    starts. They outlive the training process, and end with the keeper and the node. Only processes of the
    same user on the same node see them. docs/memory_tier.md has what that means for a run.

    Args:
        url: ``memory://run``, or ``memory://run/folder``. The name of the run has letters, digits, ".", "-"
            and "_", at most 64.
        budget: bytes that the keeper holds at most; a write beyond them fails. None: half of the memory
            that is available when the keeper starts. A value also changes the budget of a running keeper.
        idle_timeout: seconds without a connected process after which the keeper ends and frees everything.
            None: four hours; `math.inf`: never. A value also changes that of a running keeper.

    Raises:
        StorageError: the URL is not valid.
        TypeError: budget is no whole number, or idle_timeout no number.
        ValueError: budget or idle_timeout are not positive.

    Example:
        >>> import os, shardproof as sp, torch
        >>> url = f"memory://example-{os.getpid()}"
        >>> storage = sp.storage.MemoryStorage(url, budget=1 << 30, idle_timeout=60)
        >>> checkpointer = sp.Checkpointer(storage, keep=sp.KeepLatest(1))
        >>> checkpointer.save(1, {"w": torch.ones(2)}).result().step
        1
        >>> sp.load(f"{url}/step-00000001", {"w": torch.zeros(2)}).bytes
        8
        >>> storage.drop()
        True
    """

    def __init__(self, url: str, *, budget: int | None = None, idle_timeout: float | None = None) -> None:
        scheme, _, rest = str(url).partition("://")
        run, _, prefix = rest.partition("/")
        if scheme.lower() != MEMORY_SCHEME or not re.fullmatch(RUN_NAME, run):
            raise StorageError(
                f"{url!r} names no run in memory. Give memory://RUN, where RUN begins with a letter or digit "
                'and has at most 64 letters, digits, ".", "-" and "_"',
                file=str(url),
            )
        check_whole("budget", budget, "of bytes")
        check_number("idle_timeout", idle_timeout, "of seconds")
        for what, value in (("budget", budget), ("idle_timeout", idle_timeout)):
            if value is not None and not value > 0:
                raise ValueError(f"{what} is a positive number or None, not {value!r}")
        budget = None if budget is None else int(budget)
        idle_timeout = None if idle_timeout is None else float(idle_timeout)
        self._start(
            MemoryLink(run, budget, idle_timeout), "/".join(part for part in prefix.split("/") if part)
        )
        if self._prefix:
            check_name(self._prefix, self._link.location)

    def _start(self, link: MemoryLink, prefix: str) -> None:
        self._link, self._prefix = link, prefix
        self._open_files = OpenFiles[AnonymousFile]()
        self._seen: set[str] = set()
        """Unpublished files that this storage wrote or saw. They disappear with their writer process."""

    @classmethod
    def _of(cls, link: MemoryLink, prefix: str) -> MemoryStorage:
        storage = cls.__new__(cls)
        storage._start(link, prefix)
        return storage

    def __repr__(self) -> str:
        return f"MemoryStorage({self.location!r})"

    @property
    def location(self) -> str:
        """The URL."""
        return f"{self._link.location}/{printable(self._prefix)}" if self._prefix else self._link.location

    @property
    def folder(self) -> str:
        """The last part of the URL."""
        return self._prefix.rpartition("/")[2] or self._link.name

    @property
    def linked(self) -> bool:
        """False: memory has no links."""
        return False

    def create(self, name: str) -> MemorySink:
        """Begin a new file; see `Storage.create`."""
        key = self._key(name)
        self._forget(name)
        return MemorySink(self._link.writer(), key, self._place(name), self._seen)

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name`; see `Storage.publish`.

        Fails if this storage has seen an unpublished file in the folder of `name`, and the file disappeared
        because the process that wrote it ended.
        """
        key, place = self._key(name), self._place(name)
        self._forget(name)
        folder = key[: key.rfind("/") + 1]
        seen = [other for other in sorted(self._seen) if other.startswith(folder)]
        memory = AnonymousFile(place)
        try:
            memory.write(memoryview(data), 0)
            memory.seal(len(data))
            writer = self._link.writer()
            answer, _ = writer.ask("publish", memory.number, name=key, replace=replace, seen=seen)
        finally:
            memory.close()
        if answer.get("error") == "exists":
            raise AlreadyCommittedError(
                f"{place} exists. It was not touched: choose another place or step, or ask for overwriting.",
                path=place,
                file=place,
            )
        self._seen.difference_update(seen)
        if answer.get("error") == "gone":
            raise self._gone(f"publish {place}", answer["names"])
        check_room(answer, place)

    def flush(self, name: str) -> None:
        """Does nothing: a flush cannot make memory more durable. A missing file is an error."""
        if self.size(name) is None:
            raise self._missing(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the file as it is now; see `Storage.read`."""
        memory = self._opened(name)
        try:
            stop = memory.size if stop is None else stop
            if not 0 <= start <= stop <= memory.size:
                raise short_read(memory, start, stop - start, max(0, memory.size - start))
            data = bytearray(stop - start)
            memory.fill(start, memoryview(data))
            return bytes(data)
        finally:
            memory.close()

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; see `Storage.read_into`."""
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        self._file(name).fill(start, data)

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """True: all of it is in memory; see `CachedStorage.is_cached`."""
        self._file(name)
        return True

    def size(self, name: str) -> int | None:
        """Bytes of the file; None if there is none.

        Raises:
            StorageError: this storage has seen the file, and it disappeared before it was published.
        """
        key, found = self._key(name), self._status(name)
        if found is None:
            if key in self._seen:
                self._seen.discard(key)
                raise self._gone(f"look at {self._place(name)}", [key])
            return None
        if found["pending"]:
            self._seen.add(key)
        return int(found["size"])

    def modified(self, name: str) -> float | None:
        """Time at which the file got its name, Unix seconds; None if there is none of this name."""
        found = self._status(name)
        return None if found is None else float(found["time"])

    def folders(self) -> list[str]:
        """Sorted names of the folders directly in this storage."""
        return sorted({name.partition("/")[0] for name in self.list() if "/" in name})

    def siblings(self) -> list[str]:
        """Sorted names of the sibling folders; for a run, the names of all runs on this node."""
        if not self._prefix:
            return keepers_here()
        return MemoryStorage._of(self._link, self._prefix.rpartition("/")[0]).folders()

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of all files in the folder `prefix` and below. Empty if there is no keeper."""
        below = self._key(prefix) if prefix else self._prefix
        got = self._link.read("names", prefix=f"{below}/" if below else "")
        if got is None:
            _log.info("%s: no keeper process on this node, so nothing is in memory", self._link.location)
            return []
        start = len(self._prefix) + 1 if self._prefix else 0
        return sorted(name[start:] for name in got[0]["names"])

    def delete(self, name: str) -> None:
        """Remove the file. A missing one is no error."""
        key = self._key(name)
        self._forget(name)
        self._seen.discard(key)
        self._link.read("delete", name=key)

    def within(self, prefix: str) -> MemoryStorage:
        """The part of this storage below the folder `prefix`, as a storage."""
        return MemoryStorage._of(self._link, self._key(prefix))

    def sibling(self, folder: str) -> MemoryStorage:
        """The storage in the sibling folder of this name; for a run, the run of this name."""
        check_folder(folder, self._link.location)
        if not self._prefix:
            return MemoryStorage(f"{MEMORY_SCHEME}://{folder}")
        above = self._prefix.rpartition("/")[0]
        found = MemoryStorage._of(self._link, f"{above}/{folder}" if above else folder)
        found._open_files = self._open_files
        return found

    def close(self) -> None:
        """Close the descriptors that reads keep open, also those of the siblings of this storage."""
        self._open_files.close()

    def usage(self) -> MemoryUsage | None:
        """The memory that the keeper of the run uses; None if there is no keeper.

        Raises:
            StorageError: the keeper cannot be reached.
        """
        got = self._link.read("status")
        if got is None:
            return None
        return MemoryUsage(*(got[0][name] for name in ("process", "budget", "used", "files", "writers")))

    def drop(self) -> bool:
        """End the keeper of the run, and so free all its files.

        Returns:
            False if there is no keeper.

        Raises:
            StorageError: the keeper cannot be reached.
        """
        self.close()
        self._link.close()
        return self._link.drop()

    def _key(self, name: str) -> str:
        check_name(name, self.location)
        return f"{self._prefix}/{name}" if self._prefix else name

    def _place(self, name: str) -> str:
        return f"{self.location}/{printable(name)}"

    def _status(self, name: str) -> dict[str, Any] | None:
        got = self._link.read("size", name=self._key(name))
        return got[0] if got is not None and got[0] else None

    def _file(self, name: str) -> AnonymousFile:
        """The open file of this name, from the cache or newly opened."""
        found = self._open_files.get((self._prefix, name), lambda: self._opened(name))
        if found.number < 0:  # closed in a forked child
            self._forget(name)
            found = self._open_files.get((self._prefix, name), lambda: self._opened(name))
        return found

    def _opened(self, name: str) -> AnonymousFile:
        got = self._link.read("open", name=self._key(name))
        if got is None or got[1] is None:
            raise self._missing(name)
        return AnonymousFile(self._place(name), got[1], int(got[0]["size"]))

    def _forget(self, name: str) -> None:
        self._open_files.forget((self._prefix, name))

    def _gone(self, doing: str, keys: Sequence[str]) -> StorageError:
        return StorageError(
            f"cannot {doing}: {', '.join(map(printable, keys))} went before the commit, with the process "
            "that wrote it or with the keeper process of this node. Nothing was published; save again",
            file=self.location,
        )

    def _missing(self, name: str) -> StorageError:
        place = self._place(name)
        return StorageError(
            f"cannot read {place}: there is no such file in the memory of this node. The keeper process may "
            "have ended: restore from another tier",
            file=place,
            missing=True,
        )
