"""The base class `Storage`, the protocol `Sink`, and the names that files may have in a storage."""

from __future__ import annotations

import builtins
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from shardproof.errors import FormatError, StorageError

if TYPE_CHECKING:
    from shardproof.engine.storage.multipart_uploads import Upload

T = TypeVar("T")


@runtime_checkable
class Sink(Protocol):
    """A new file that is being written. Until `finish` returns, readers see at most its name."""

    def write_at(self, start: int, buffer: memoryview) -> None:
        """Write the bytes of `buffer` at byte `start`. Several threads may write disjoint ranges at once."""
        ...

    def finish(self, size: int) -> None:
        """Give the file `size` bytes, flush it and its directory entry to stable storage, close it."""
        ...

    def abort(self) -> None:
        """Close and remove the file. Does nothing after `finish` or `abort`. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """The bytes that new files of a storage may take.

    Example:
        >>> FreeSpace(file_system=1, free=3_000_000, upper_bound=3_100_000).upper_bound
        3100000
    """

    file_system: int
    """A number of 64 bits that is equal for all storages that share these bytes. With `upper_bound`, storages
    of different file systems must have different numbers, also on different machines."""
    free: int
    """Bytes that this process may expect to write."""
    upper_bound: int | None
    """Bytes above which a write certainly fails. None: not known, for example because the file system may
    compress."""
    advice: str = ""
    """What else makes room here: the end of the message of `NoSpaceError` that begins "To save again"."""
    copies_on: int | None = None
    """Number of the file system that gets a second copy of each file; None: there is none."""


class Storage(ABC):
    """Named files. Names are relative, with "/" between their parts (see `check_name`).

    A storage derives from this class. It defines the abstract methods, and those of the others whose default
    is not right for it. The defaults are right for files that no other method of access reaches: not in a
    folder of this machine, and without a long latency. A storage that wraps another one decides about each.

    Every method raises `StorageError` if the storage refuses or fails. The message states the file, the cause
    and what to do. For a file that does not exist, ``details["missing"]`` is true.
    """

    @property
    @abstractmethod
    def location(self) -> str:
        """The location of the storage, for messages, in valid Unicode."""

    @property
    @abstractmethod
    def folder(self) -> str:
        """The name of this storage's folder, as `sibling` takes it."""

    @property
    @abstractmethod
    def linked(self) -> bool:
        """True if this storage's folder is a symbolic link, so that its files belong to another place.

        Readers treat them as any others. Retention and `shardproof prune` remove none of them.
        """

    @abstractmethod
    def create(self, name: str) -> Sink:
        """Begin a new file and make the missing folders above it. Fails if a file has that name."""

    @abstractmethod
    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name`: whole or not at all, on stable storage when this returns.

        The storage never removes a file again that already has its name. A reader may use it already. And a
        storage that cannot flush the name cannot make the removal durable either.

        Args:
            name: name of the file.
            data: all of its bytes.
            replace: replace a file of that name.

        Raises:
            AlreadyCommittedError: there is a file of that name and `replace` is false. Of several concurrent
                calls for one name, exactly one succeeds.
            StorageError: the storage failed. With ``details["in_place"]`` true, readers see `data` under
                `name`, but a crash of the machine may bring back the previous state. With
                ``details["unanswered"]`` true, the storage may still carry out the request later.
        """

    @abstractmethod
    def flush(self, name: str) -> None:
        """Put the bytes and the name of a finished file on stable storage, whichever process wrote it."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` (None: the end) of the file as it is now. Fewer bytes are an error."""

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; fewer bytes are an error.

        For files that never change once finished: the storage may keep descriptors open between calls.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of the file; None if there is no such file."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Sorted names of the folders directly in this storage, linked ones too (see `linked`)."""

    @abstractmethod
    def siblings(self) -> list[str]:
        """Sorted names of the sibling folders, with this storage's own folder if it exists."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of all files in the folder `prefix` and below, with leftovers of `publish`."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the file durably, and the folders that become empty. A missing file is no error."""

    @abstractmethod
    def within(self, prefix: str) -> Storage:
        """The part of this storage below the folder `prefix`, as a storage."""

    @abstractmethod
    def sibling(self, folder: str) -> Storage:
        """The storage in the sibling folder of this name.

        Raises:
            StorageError: `folder` is not the plain name of one folder.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the open descriptors. The storage stays usable."""

    @property
    def path(self) -> Path | None:
        """The folder of this machine that has the files, for callers that reach them by the operating system.

        Default: None. Then files are reached by the methods alone.
        """
        return None

    @property
    def direct(self) -> bool | None:
        """The choice of the user whether bytes go past the page cache. Default: None, a rule decides."""
        return None

    @property
    def in_memory(self) -> bool:
        """True if the files are in the memory of this node. Default: False."""
        return False

    @property
    def is_remote(self) -> bool:
        """True if every request has a long latency, and a change is durable when its request returns.

        Then a load reads in large requests by `read_buffer`, and rank 0 reads manifest and index for all
        ranks (`with_contents`). Default: False.
        """
        return False

    @property
    def bounds_reads(self) -> bool:
        """True if `read_at_most` learns the size of a file with its bytes. Default: False.

        Otherwise a reader of a file that may be large asks for its size first.
        """
        return False

    def read_at_most(self, name: str, most: int) -> bytes:
        """All bytes of a file that has a few, as it is now. Default: asks for the size, then reads.

        Args:
            name: name of the file.
            most: its bytes, at most.

        Raises:
            FormatError: it has more. They are not read.
            StorageError: the file is missing, or the storage failed.
        """
        size = self.size(name) or 0
        if size > most:
            raise too_large(f"{self.location}/{name}", size, most)
        return self.read(name)

    def read_buffer(self, name: str, start: int, count: int) -> memoryview:
        """Read a range into memory of the storage, which may save a copy. Default: `read_into`."""
        data = memoryview(bytearray(count))
        self.read_into(name, start, data)
        return data

    def with_contents(self, files: Mapping[str, bytes]) -> Storage:
        """The same storage with the bytes of some files, which `size` and `read` then need not request.

        Default: this storage.
        """
        return self

    def with_one_wait(self) -> Storage:
        """The same storage for one operation of many requests, which waits once if it gets no answer.

        Default: this storage. The operating system decides how long a folder waits.
        """
        return self

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """True if most of `count` bytes from byte `start` on are in memory. A wrong answer costs time only.

        Default: False. A load then reads in large requests, several in flight.

        Raises:
            StorageError: the file is missing or cannot be opened.
        """
        return False

    def past_cache(self) -> Storage:
        """The same files, read and written past the page cache. Default: this storage."""
        return self

    def modified(self, name: str) -> float | None:
        """Time of the last write to a file, Unix seconds; None if there is none of this name.

        `prune`, `doctor` and `watch` need it. Default: raises StorageError.
        """
        raise StorageError(
            f"{self.location} does not tell when its files were written: define `modified` in "
            f"{type(self).__name__}",
            file=self.location,
        )

    def now(self, *, writes: bool = True) -> float | None:
        """The time by the clock that dates the files, Unix seconds. Default: the clock of this machine.

        Args:
            writes: True if a file may be written to learn the time. It is removed again.

        Returns:
            The time; None if the storage tells it only to a program that writes, and `writes` is False.

        Raises:
            StorageError: the storage does not tell its time.
        """
        return time.time()

    def replace(self, name: str) -> Sink:
        """Begin a file that takes its name when `Sink.finish` is called: whole, in one step.

        Until then, and after `Sink.abort`, a file of that name stays as it is. Several processes may write
        the same bytes under one name at the same time. Uploads to a second tier do so.

        Default: `create`, which fails if there is a file of that name.
        """
        return self.create(name)

    def flush_names(self) -> None:
        """Make the names directly in this folder durable, whichever process added or removed them.

        Excludes names in folders below it. Does nothing if there is no folder. Default: flushes one of the
        files, which makes the names above it durable.

        Raises:
            StorageError: the storage failed.
        """
        failure: StorageError | None = None
        for name in sorted(self.list(), key=lambda name: "/" in name):
            try:
                self.flush(name)
                return
            except StorageError as error:  # such as a link of the user to nothing
                if not error.details.get("missing"):  # else another process removed the file
                    failure = error
        if failure is not None:
            raise failure

    def free_space(self) -> FreeSpace | None:
        """The space for new files at the moment. Never raises.

        Default: None, it is not known. Then a save begins to write without a check of the space.
        """
        return None

    def nearest(self, name: str) -> Storage:
        """The storage of the nearest copy of a file that never changes. Default: this storage.

        Args:
            name: name of the file.

        Returns:
            The storage that lists the file under the same name. Without a copy: any of the places.

        Raises:
            StorageError: a place cannot be listed.
        """
        return self

    def uploads(self, parts_before: float) -> builtins.list[Upload]:
        """Uploads below this storage that did not complete, whose parts no listing shows. Default: none.

        Args:
            parts_before: Unix seconds. For each upload that began before this time, the storage finds its
                bytes and the time of its last part.

        Raises:
            StorageError: the storage failed, or cannot list uploads.
        """
        return []

    def abort_upload(self, upload: Upload) -> None:
        """Remove the parts of an upload that `uploads` listed; one that ended is no error.

        Raises:
            StorageError: the storage failed. Default: it has no uploads.
        """
        raise StorageError(f"{self.location} has no incomplete uploads", file=upload.name)

    def hold(self, look: Callable[[], builtins.list[T]]) -> builtins.list[T]:
        """Mark the files as in use by this process until it ends.

        Args:
            look: called while no process uses the files.

        Returns:
            What `look` returned; an empty list if another process, or another storage here, uses them.
            Default: an empty list, because the storage does not know its other users.

        Raises:
            StorageError: the storage failed.
        """
        return []


def too_large(path: str, size: int, most: int) -> FormatError:
    """The error of a file with more bytes than any of its kind."""
    return FormatError(
        f"{path}: it has {size} bytes, expected at most {most}: it is damaged, or another file has this name",
        file=path,
    )


def write_file(storage: Storage, name: str, data: bytes) -> None:
    """Writes a small file as a new file and flushes it. On an error it removes the file.

    Raises:
        StorageError: the storage failed, or there is a file of this name.
    """
    sink = storage.create(name)
    try:
        sink.write_at(0, memoryview(data))
        sink.finish(len(data))
    except BaseException:
        sink.abort()
        raise


def name_fault(name: str) -> str | None:
    """The reason why `name` cannot name a file in a storage; None if it can.

    >>> name_fault("shards/00000-a.safetensors")
    >>> name_fault("../other/manifest.json")
    'it has a part ".."'
    """
    if not name:
        return "it is empty"
    if "\0" in name:
        return "it has a NUL character"
    if name.startswith("/"):
        return "it is absolute"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f'it has a part "{part}"'
    try:  # a listed name may have bytes that are not UTF-8, as surrogate escapes
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    return None


def check_name(name: str, location: str = "a storage") -> str:
    """Check that `name` stays inside the storage; return it.

    Args:
        name: relative, parts with "/" between them, none of them empty, "." or "..".
        location: the storage, for the message.

    Raises:
        StorageError: the name is invalid, or could leave the storage.

    >>> check_name("shards/00000-a.safetensors")
    'shards/00000-a.safetensors'
    """
    fault = name_fault(name)
    if fault is not None:
        raise StorageError(
            f'{name!r} cannot name a file in {location}: {fault}. Give a relative name without "..".',
            file=name,
        )
    return name


def check_folder(name: str, location: str = "a storage") -> str:
    """Check that `name` is the plain name of one folder; return it.

    Raises:
        StorageError: the name is invalid, or leads to another folder.

    >>> check_folder("step-00001000")
    'step-00001000'
    """
    fault = 'it has a "/"' if "/" in name else name_fault(name)
    if fault is not None:
        raise StorageError(f"{name!r} cannot name a folder in {location}: {fault}.", file=name)
    return name
