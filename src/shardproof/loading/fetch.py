"""Reading what the page cache does not have: large requests, several in flight, into aligned memory.

Note: depth and memory
    A disk or a file server that is asked for one range after another idles in between. So a rank keeps up to
    `MOST_THREADS` requests of up to `REQUEST_BYTES` in flight. Each has memory of its own, from which bytes
    are hashed and copied to their destination once. All memory together stays below `MEMORY_BYTES` a rank:
    where chunks must be read whole, there are fewer requests.

Note: past the cache or through it
    Reads past the page cache spare the processor a copy and the node's memory the pages. But what two
    processes of a node read past the cache is read from the disk twice. So a rank reads past the cache
    only what no other rank of its node reads (`overlap`).
"""

from __future__ import annotations

import enum
import threading

from shardproof.storage import CachedStorage, Storage, aligned_buffer, memory_for

__all__ = ["MEMORY_BYTES", "MOST_THREADS", "REQUEST_BYTES", "Cold", "Fetcher", "is_cached"]

REQUEST_BYTES = 8 << 20
"""Bytes of one request, unless a chunk must be read whole."""
MOST_THREADS = 16
MEMORY_BYTES = 32 << 20
"""Bytes of memory for all requests of a rank."""
_LEAST_THREADS = 2


class Cold(enum.Enum):
    """How a load reads what the page cache does not have."""

    AS_CACHED = enum.auto()
    """As what the cache has: fine for a few bytes."""
    THROUGH_CACHE = enum.auto()
    PAST_CACHE = enum.auto()


class Fetcher:
    """The reads of one load that the page cache cannot answer.

    Args:
        past_cache: whether they may go past the page cache.
        longest: bytes of the longest request.
    """

    def __init__(self, past_cache: bool, longest: int) -> None:
        self._past_cache = past_cache
        self._longest = max(longest, 1)
        self._local = threading.local()

    @property
    def threads(self) -> int:
        """Requests in flight."""
        return max(_LEAST_THREADS, min(MOST_THREADS, MEMORY_BYTES // self._longest))

    def read(self, storage: Storage, name: str, start: int, count: int) -> memoryview:
        """Reads a range into memory of the calling thread, which its next call overwrites.

        Raises:
            StorageError: the file is missing, short or unreadable.
        """
        memory: memoryview | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < memory_for(count):
            memory = self._local.memory = aligned_buffer(memory_for(max(count, self._longest)))
        if self._past_cache and isinstance(storage, CachedStorage):
            return storage.read_uncached(name, start, count, memory)
        storage.read_into(name, start, memory[:count])
        return memory[:count]


def is_cached(storage: Storage, name: str, start: int, count: int) -> bool:
    """Whether the page cache has a range, as far as the storage knows."""
    return count == 0 or (isinstance(storage, CachedStorage) and storage.is_cached(name, start, count))
