"""The protocols `Storage` and `Sink`, and the names that files may have in a storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shardproof.errors import FormatError, StorageError

__all__ = [
    "BoundedStorage",
    "CachedStorage",
    "ClockedStorage",
    "CopiedStorage",
    "DatedStorage",
    "FreeSpace",
    "LimitedStorage",
    "RemoteStorage",
    "ReplacingStorage",
    "Sink",
    "Storage",
    "check_folder",
    "check_name",
    "name_fault",
    "read_at_most",
    "too_large",
    "write_file",
]


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


@runtime_checkable
class Storage(Protocol):
    """Named files. Names are relative, with "/" between their parts (see `check_name`).

    Every method raises `StorageError` if the storage refuses or fails. The message states the file, the cause
    and what to do. For a file that does not exist, ``details["missing"]`` is true.
    """

    @property
    def location(self) -> str:
        """The location of the storage, for messages, in valid Unicode."""
        ...

    @property
    def folder(self) -> str:
        """The name of this storage's folder, as `sibling` takes it."""
        ...

    @property
    def linked(self) -> bool:
        """True if this storage's folder is a symbolic link, so that its files belong to another place.

        Readers treat them as any others. Retention and `shardproof prune` remove none of them.
        """
        ...

    def create(self, name: str) -> Sink:
        """Begin a new file and make the missing folders above it. Fails if a file has that name."""
        ...

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
        ...

    def flush(self, name: str) -> None:
        """Put the bytes and the name of a finished file on stable storage, whichever process wrote it."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` (None: the end) of the file as it is now. Fewer bytes are an error."""
        ...

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; fewer bytes are an error.

        For files that never change once finished: the storage may keep descriptors open between calls.
        """
        ...

    def size(self, name: str) -> int | None:
        """Bytes of the file; None if there is no such file."""
        ...

    def folders(self) -> list[str]:
        """Sorted names of the folders directly in this storage, linked ones too (see `linked`)."""
        ...

    def siblings(self) -> list[str]:
        """Sorted names of the sibling folders, with this storage's own folder if it exists."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of all files in the folder `prefix` and below, with leftovers of `publish`."""
        ...

    def delete(self, name: str) -> None:
        """Remove the file durably, and the folders that become empty. A missing file is no error."""
        ...

    def within(self, prefix: str) -> Storage:
        """The part of this storage below the folder `prefix`, as a storage."""
        ...

    def sibling(self, folder: str) -> Storage:
        """The storage in the sibling folder of this name.

        Raises:
            StorageError: `folder` is not the plain name of one folder.
        """
        ...

    def close(self) -> None:
        """Close the open descriptors. The storage stays usable."""
        ...


@runtime_checkable
class CachedStorage(Protocol):
    """A storage whose files the operating system caches. This method is optional for a `Storage`.

    A load reads a storage without it as if nothing were cached: in large requests, several in flight.
    """

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """True if most of `count` bytes from byte `start` on are in memory. A wrong answer costs time only.

        Raises:
            StorageError: the file is missing or cannot be opened.
        """
        ...


@runtime_checkable
class DatedStorage(Storage, Protocol):
    """A storage that knows when its files were written, which `prune`, `doctor` and `watch` need."""

    def modified(self, name: str) -> float | None:
        """Time of the last write to a file, Unix seconds; None if there is none of this name."""
        ...


@runtime_checkable
class ClockedStorage(Protocol):
    """A storage whose files are dated by the clock of another machine. This method is optional.

    Without it, the clock of this machine dates the files.
    """

    def now(self, *, writes: bool = True) -> float | None:
        """The time by that clock, Unix seconds.

        Args:
            writes: True if a file may be written to learn the time. It is removed again.

        Returns:
            The time; None if the storage tells it only to a program that writes, and `writes` is False.

        Raises:
            StorageError: the storage does not tell its time.
        """
        ...


@runtime_checkable
class RemoteStorage(Protocol):
    """A storage with a long latency of every request. These methods are optional for a `Storage`.

    A load reads it in large requests, and rank 0 reads manifest and index for all ranks.
    """

    def read_buffer(self, name: str, start: int, count: int) -> memoryview:
        """Read a range into memory of the storage, which saves a copy. Otherwise the same as `read_into`."""
        ...

    def with_contents(self, files: Mapping[str, bytes]) -> Storage:
        """The same storage with the bytes of some files. `size` and `read` then send no request for them."""
        ...


@runtime_checkable
class BoundedStorage(Protocol):
    """A storage that learns the size of a file with its bytes. This method is optional for a `Storage`.

    Without it, `read_at_most` asks for the size first.
    """

    def read_at_most(self, name: str, most: int) -> bytes:
        """All bytes of a file as it is now; see the function `read_at_most`."""
        ...


@runtime_checkable
class ReplacingStorage(Protocol):
    """A storage that can replace a large file in one step. This method is optional for a `Storage`.

    Several processes may then write the same bytes under one name at the same time. Uploads to a second tier
    do so. In a storage without it, an upload fails if there is an incomplete file of the name.
    """

    def replace(self, name: str) -> Sink:
        """Begin a file that takes its name when `Sink.finish` is called: whole, in one step.

        Until then, and after `Sink.abort`, a file of that name stays as it is.
        """
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


@runtime_checkable
class LimitedStorage(Protocol):
    """A storage that knows its free space. This method is optional for a `Storage`.

    Without it, a save begins to write without a check of the space.
    """

    def free_space(self) -> FreeSpace | None:
        """The space for new files at the moment; None if it is not known. Never raises."""
        ...


@runtime_checkable
class NameFlush(Protocol):
    """A storage that can make the names in a folder durable. This method is optional for a `Storage`."""

    def flush_names(self) -> None:
        """Make the names directly in this folder durable, whichever process added or removed them.

        Excludes names in folders below it. Does nothing if there is no folder.

        Raises:
            StorageError: the storage failed.
        """
        ...


@runtime_checkable
class CopiedStorage(Protocol):
    """A storage whose files have copies in several places. This method is optional for a `Storage`."""

    def nearest(self, name: str) -> Storage:
        """The storage of the nearest copy of a file that never changes.

        Args:
            name: name of the file.

        Returns:
            The storage that lists the file under the same name. Without a copy: any of the places.

        Raises:
            StorageError: a place cannot be listed.
        """
        ...


def read_at_most(storage: Storage, name: str, most: int) -> bytes:
    """All bytes of a file that has a few.

    Args:
        storage: holds the file.
        name: name of the file.
        most: its bytes, at most.

    Raises:
        FormatError: it has more. They are not read.
        StorageError: the file is missing, or the storage failed.
    """
    if isinstance(storage, BoundedStorage):
        return storage.read_at_most(name, most)
    size = storage.size(name) or 0
    if size > most:
        raise too_large(f"{storage.location}/{name}", size, most)
    return storage.read(name)


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

    Args:
        name: without "/", and neither "." nor "..".
        location: location of the folder's parent, for the message.

    Raises:
        StorageError: the name is invalid, or leads to another folder.

    >>> check_folder("step-00001000")
    'step-00001000'
    """
    fault = 'it has a "/"' if "/" in name else name_fault(name)
    if fault is not None:
        raise StorageError(f"{name!r} cannot name a folder in {location}: {fault}.", file=name)
    return name
