"""The protocols `Storage` and `Sink`, and the names that files may have in a storage."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from shardproof.errors import StorageError

__all__ = ["CachedStorage", "Sink", "Storage", "check_folder", "check_name", "name_fault"]


@runtime_checkable
class Sink(Protocol):
    """A new file under construction. It exists for readers only as a name until `finish` has returned."""

    def write_at(self, start: int, buffer: memoryview) -> None:
        """Write the bytes of `buffer` at byte `start`. Several threads may write disjoint ranges at once."""
        ...

    def finish(self, size: int) -> None:
        """Give the file `size` bytes, flush it and its directory entry to stable storage, close it."""
        ...

    def abort(self) -> None:
        """Close and remove the file. After `finish`, or a second time, it does nothing. Never raises."""
        ...


@runtime_checkable
class Storage(Protocol):
    """Named byte sequences. Names are relative, with "/" between their parts (see `check_name`).

    Every method raises `StorageError` with the file, the cause and what to do where the place refuses or
    fails; a file that does not exist is an error with ``details["missing"]`` true.
    """

    @property
    def location(self) -> str:
        """The place, for messages, in valid Unicode."""
        ...

    @property
    def folder(self) -> str:
        """The name by which `sibling` of a storage beside this one gives this one."""
        ...

    @property
    def linked(self) -> bool:
        """Whether this storage's folder is a symbolic link: its files belong to another place.

        They are read as any others. Nobody removes them for the sake of the folder that the link lies in.
        """
        ...

    def create(self, name: str) -> Sink:
        """Begin a new file, with the folders on its way. A file of that name is a `StorageError`."""
        ...

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name`: whole or not at all, on stable storage when this returns.

        A file that got its name is never taken back: a reader may use it already, and a storage that cannot
        flush the name cannot make the removal durable either.

        Raises:
            AlreadyCommittedError: there is a file of that name and `replace` is false. Of several that
                publish one name at a time, exactly one gets through.
            StorageError: the storage failed. With ``details["in_place"]`` true, readers see `data` under
                `name`, and a crash of the machine may bring back what was there.
        """
        ...

    def flush(self, name: str) -> None:
        """Put the bytes and the name of a finished or published file on stable storage, whoever wrote it."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` (to the end if None) of the file as it is now. Fewer is an error."""
        ...

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; fewer bytes is an error.

        Meant for files that never change once they are finished: descriptors may be kept between calls.
        """
        ...

    def size(self, name: str) -> int | None:
        """Bytes of the file; None if there is no such file."""
        ...

    def folders(self) -> list[str]:
        """Sorted names of the folders directly in this storage, linked ones too (see `linked`)."""
        ...

    def siblings(self) -> list[str]:
        """Sorted names of the folders beside this storage's own, and its own if it exists."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of all files in the folder `prefix` and below, leftovers of `publish` included."""
        ...

    def delete(self, name: str) -> None:
        """Remove the file durably, and the folders this leaves empty. No such file: nothing to do."""
        ...

    def within(self, prefix: str) -> Storage:
        """The part of this storage below the folder `prefix`, as a storage."""
        ...

    def sibling(self, folder: str) -> Storage:
        """The storage in the folder of this name beside this storage's own.

        Raises:
            StorageError: `folder` is not the plain name of one folder.
        """
        ...

    def close(self) -> None:
        """Give back what is kept open. The storage stays usable."""
        ...


@runtime_checkable
class CachedStorage(Protocol):
    """A storage whose files the operating system caches. `Storage` does not ask for these methods.

    A load reads a storage without them as if nothing were cached: in large requests, several in flight. Who
    overrides `read_into` of such a storage, or wraps it, changes these methods too.
    """

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """Whether most of `count` bytes from byte `start` on are in memory.

        A wrong answer costs time and nothing else.

        Raises:
            StorageError: the file is missing or cannot be opened.
        """
        ...

    def read_uncached(self, name: str, start: int, count: int, memory: memoryview) -> memoryview:
        """Read a range without the cache, where the system can; else as `read_into` does.

        Args:
            name: of the file.
            start: first byte of the range.
            count: bytes of it.
            memory: from `aligned_buffer`, at least `memory_for(count)` bytes. All of it may be overwritten.

        Returns:
            The part of `memory` that has the bytes.

        Raises:
            StorageError: the file is missing, short or unreadable.
        """
        ...


def name_fault(name: str) -> str | None:
    """Why `name` cannot be the name of a file in a storage; None if it can.

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
    try:  # a name that a file system gave may have bytes that are not UTF-8, in Python's own spelling
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    return None


def check_name(name: str, location: str = "a storage") -> str:
    """`name`, if it stays inside the storage.

    Args:
        name: relative, parts with "/" between them, none of them empty, "." or "..".
        location: the storage, for the message.

    Raises:
        StorageError: the name could leave the storage, or is none.

    >>> check_name("shards/00000-a.safetensors")
    'shards/00000-a.safetensors'
    """
    fault = name_fault(name)
    if fault is not None:
        raise StorageError(
            f"{name!r} cannot name a file in {location}: {fault}. Names are relative and stay inside.",
            file=name,
        )
    return name


def check_folder(name: str, location: str = "a storage") -> str:
    """`name`, if it is the plain name of one folder.

    Args:
        name: without "/", and neither "." nor "..".
        location: where the folder is to be, for the message.

    Raises:
        StorageError: it could lead anywhere else, or is no name.

    >>> check_folder("step-00001000")
    'step-00001000'
    """
    fault = 'it has a "/"' if "/" in name else name_fault(name)
    if fault is not None:
        raise StorageError(f"{name!r} cannot name a folder in {location}: {fault}.", file=name)
    return name
