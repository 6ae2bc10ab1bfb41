"""Sends several requests to a remote storage at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardproof.storage.base import RemoteStorage, Storage

__all__ = ["map_requests"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_IN_FLIGHT = 16
"""Requests for small files. A run of 500 steps needs 1,000 of them to list its steps."""


def map_requests(
    storage: Storage, request: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[_Result]:
    """The results of a function for each item, in order. For a remote storage it is called in threads.

    Args:
        storage: the storage that `request` reads, or that contains it.
        request: reads little, and writes nothing. Its first error is raised, and later items are left out.
        items: its arguments.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> folder = LocalStorage(tempfile.mkdtemp())
        >>> list(map_requests(folder, folder.size, ["a", "b"]))
        [None, None]
    """
    if not isinstance(storage, RemoteStorage):
        yield from map(request, items)
        return
    with ThreadPoolExecutor(_IN_FLIGHT, "shardproof-requests") as pool:
        yield from pool.map(request, items)
