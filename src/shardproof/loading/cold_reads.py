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

Whether ranks of one node read the same bytes, from a few samples that each rank posts.

What two ranks of a node read past the page cache is read from the storage twice; through the cache, once. As
when data parallel replicas share a node. A rank does not know what the others read, and to post all of it is
too much for thousands of ranks. So each posts at most `SAMPLES` of its chunks: those whose numbers, scrambled
in the same way on all ranks, are the smallest (a bottom-k sketch, Cohen and Kaplan, 2007). Of the chunks
below the least bound of the node's ranks all are posted that are read, so the part that is read twice can be
counted among them.
"""

from __future__ import annotations

import enum
import socket
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.planning import LARGE_BYTES
from shardproof.storage import CachedStorage, Storage, aligned_buffer, memory_for

__all__ = [
    "MEMORY_BYTES",
    "MOST_THREADS",
    "REQUEST_BYTES",
    "SAMPLES",
    "Cold",
    "Fetcher",
    "Sketch",
    "is_cached",
    "reads_twice",
]

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


SAMPLES = 32


_SHARE = 8


"""Ranks read the same if they read more than an eighth of what there is again."""


_SCRAMBLE = np.uint64(0x9E3779B97F4A7C15)


"""An odd number: the products of distinct numbers with it are distinct."""


class Sketch(msgspec.Struct, frozen=True, array_like=True):
    """What one rank reads, as samples."""

    node: str
    """Name of the machine."""
    samples: tuple[tuple[int, int, int], ...]
    """Scrambled number of a chunk, bytes of it that the rank reads, and all its bytes; ascending."""
    complete: bool
    """Whether these are all chunks that it reads."""

    @staticmethod
    def of(rows: NDArray[np.int64], read: NDArray[np.int64], count: NDArray[np.int64]) -> Sketch:
        """The sketch of this rank.

        Args:
            rows: (n,) distinct rows of the chunk table.
            read: (n,) bytes that are read of each.
            count: (n,) bytes of each.
        """
        if (large := count >= LARGE_BYTES).any():  # there may be many small ones, which take no time
            rows, read, count = rows[large], read[large], count[large]
        numbers = (rows.astype(np.uint64) + np.uint64(1)) * _SCRAMBLE
        least = np.argsort(numbers)[:SAMPLES]
        columns = (numbers[least].tolist(), read[least].tolist(), count[least].tolist())
        return Sketch(socket.gethostname(), tuple(zip(*columns, strict=True)), len(rows) <= SAMPLES)


def reads_twice(sketches: Iterable[Sketch]) -> bool:
    """Whether ranks of some node read much of the same.

    >>> rows, whole = np.arange(4), np.full(4, 8)
    >>> one, other = (Sketch.of(part, whole[part], whole[part]) for part in (rows[:2], rows[2:]))
    >>> reads_twice([one, other]), reads_twice([one, one])
    (False, True)
    """
    nodes: defaultdict[str, list[Sketch]] = defaultdict(list)
    for sketch in sketches:
        nodes[sketch.node].append(sketch)
    return any(map(_reads_twice, nodes.values()))


def _reads_twice(ranks: Sequence[Sketch]) -> bool:
    """Whether ranks of one node do."""
    bound = min((one.samples[-1][0] for one in ranks if not one.complete), default=1 << 64)
    read: defaultdict[int, int] = defaultdict(int)
    count: dict[int, int] = {}
    for one in ranks:
        for number, nbytes, whole in one.samples:
            if number <= bound:
                read[number] += nbytes
                count[number] = whole
    again = sum(max(0, nbytes - count[number]) for number, nbytes in read.items())
    return again * _SHARE > sum(count.values())
