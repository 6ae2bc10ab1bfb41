"""Requests to a storage with a latency: several at a time, the errors of those that fail, and its time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import chain, pairwise
from typing import TypeVar

from shardproof.engine.storage.base import Storage
from shardproof.errors import StorageError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_IN_FLIGHT = 16
"""Requests for small files. A run of 500 steps needs 1,000 of them to list its steps."""
_SIZES_IN_FLIGHT = 32
"""Requests for sizes. They carry no bytes, so a server answers more of them at a time."""
_SIZES_OF_A_THREAD = 8
"""In a folder, a thread starts for this many sizes: on a local disk it costs more than they do."""


def map_requests(
    storage: Storage, request: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[_Result]:
    """The results of a function for each item, in order. For a remote storage it is called in threads.

    If no thread can be started, as at the end of the interpreter, this thread makes the remaining calls (also
    those of `file_sizes`).

    Args:
        storage: the storage that `request` reads, or that contains it.
        request: reads little, and writes nothing. It may be called twice for an item. Its first error is
            raised, and later items are left out.
        items: its arguments.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> folder = LocalStorage(tempfile.mkdtemp())
        >>> list(map_requests(folder, folder.size, ["a", "b"]))
        [None, None]
    """
    if storage.is_remote:
        return _map_in_threads(request, items, _IN_FLIGHT)
    return map(request, items)


def file_sizes(files: Sequence[tuple[Storage, str]]) -> list[int | None]:
    """The size of each file in bytes, in order; None for a file that does not exist.

    Threads ask for the sizes in a remote storage, and for those of more than a few files in folders, because
    a shared file system may need milliseconds for each.

    Args:
        files: storage and name of each.

    Raises:
        StorageError: a storage cannot tell a size.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> folder = LocalStorage(tempfile.mkdtemp())
        >>> file_sizes([(folder, "a"), (folder, "b")])
        [None, None]
    """

    def sizes_of(share: Sequence[tuple[Storage, str]]) -> list[int | None]:
        return [storage.size(name) for storage, name in share]

    is_remote = bool(files) and files[0][0].is_remote
    threads = min(_SIZES_IN_FLIGHT, len(files) // (1 if is_remote else _SIZES_OF_A_THREAD))
    if threads <= 1:
        return sizes_of(files)
    bounds = [len(files) * thread // threads for thread in range(threads + 1)]
    shares = [files[start:stop] for start, stop in pairwise(bounds)]
    return list(chain.from_iterable(_map_in_threads(sizes_of, shares, threads)))


def _map_in_threads(
    request: Callable[[_Item], _Result], items: Iterable[_Item], threads: int
) -> Iterator[_Result]:
    remaining = iter(items)
    futures: deque[Future[_Result]] = deque()
    refused: list[_Item] = []
    failed = [math.inf]

    def ask(number: int, item: _Item) -> _Result:
        if number > failed[0]:  # the caller sees the error of the earlier item
            raise CancelledError
        try:
            return request(item)
        except BaseException:
            failed[0] = min(failed[0], number)
            raise

    with ThreadPoolExecutor(threads, "shardproof-requests") as pool:
        try:
            for number, item in enumerate(remaining):
                try:
                    futures.append(pool.submit(ask, number, item))
                except RuntimeError:
                    refused.append(item)
                    break
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()
    yield from map(request, chain(refused, remaining))


def request_error(message: str, file: str, *, missing: bool, unanswered: bool = False) -> StorageError:
    """The error of a request that the storage refused or did not answer. It is no sign of damage.

    Args:
        message: the whole text.
        file: location of the file.
        missing: True if the storage has no such file.
        unanswered: True if the storage may have carried out the request.

    >>> request_error("cannot read s3://bucket/a: denied", "s3://bucket/a", missing=False).details
    {'file': 's3://bucket/a', 'missing': False, 'damaged': False}
    """
    if missing:
        error = StorageError(message, file=file, missing=True)
    else:
        error = StorageError(message, file=file, missing=False, damaged=False)
    if unanswered:
        error.details["unanswered"] = True
    return error


def short_remote_read(file: str, start: int, stop: int, end: int) -> StorageError:
    """The error of a read of bytes `start` to `stop` of a file that ends at byte `end`."""
    return StorageError(
        f"short read of {file}: expected bytes {start} to {stop}, it ends at byte {end}",
        file=file,
        missing=False,
    )


def time_at(storage: Storage) -> float:
    """The time now, Unix seconds, by the clock that dates the files of a storage. May write a file.

    The age of a file is the difference of this time and the time of its last write. The clock of this machine
    may differ from that of a store by hours.

    Raises:
        StorageError: the store does not tell its time.

    Example:
        >>> import tempfile, time
        >>> from shardproof.storage import LocalStorage
        >>> time_at(LocalStorage(tempfile.mkdtemp())) <= time.time()
        True
    """
    now = storage.now()
    if now is None:
        raise StorageError(f"{storage.location}: the store does not tell its time", file=storage.location)
    return now
