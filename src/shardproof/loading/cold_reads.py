"""Reads of bytes that are not in the page cache: large requests, several in flight, into aligned memory.

Note: depth and memory
    A disk or a file server idles between requests that come one after another. So a rank keeps up to
    `MOST_THREADS` requests of up to `REQUEST_BYTES` in flight. Each request has its own memory, from which
    the rank hashes the bytes and copies them once. All memory together stays below `MEMORY_BYTES` a
    rank, and `REMOTE_MEMORY_BYTES` for a remote storage, whose requests take longer: there are fewer
    requests if chunks must be read whole.

Note: past the cache or through it
    A read past the page cache saves a copy and the memory of the pages. But bytes that two processes of a
    node read past the cache are read from the disk twice, for example by data parallel replicas. So
    a rank reads past the cache only if no other rank of its node reads much of the same.

Note: samples
    A rank does not know what other ranks read, and posting all of it is too much for thousands of ranks. So
    each rank posts at most `SAMPLES` of its chunks: those with the smallest scrambled numbers (a bottom-k
    sketch, Cohen and Kaplan, 2007). All ranks use the same scrambling. The bound of a rank that posts only
    some of its chunks is the largest number that it posts. Up to the smallest bound on a node, the samples
    contain every chunk that a rank of the node reads. So they show which share of these chunks is read twice.
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
from shardproof.storage import CachedStorage, RemoteStorage, Storage, aligned_buffer, memory_for

__all__ = [
    "MEMORY_BYTES",
    "MOST_THREADS",
    "REMOTE_MEMORY_BYTES",
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
REMOTE_MEMORY_BYTES = 64 << 20
"""The same for a remote storage. With 30 ms a request, eight requests in flight take 0.8 of the time of four
(benchmarks/results/2026-11-25-object-store-load.json)."""
SAMPLES = 32
_LEAST_THREADS = 2
_SHARE = 8
"""`reads_twice` is True if the ranks of a node read more than an eighth of the bytes of the sampled chunks
again."""
_SCRAMBLE = np.uint64(0x9E3779B97F4A7C15)
"""An odd number: the products of distinct numbers with it are distinct."""


class Cold(enum.Enum):
    """The way in which a load reads bytes that are not in the page cache."""

    AS_CACHED = enum.auto()
    """As if they were cached. Suffices for small reads."""
    THROUGH_CACHE = enum.auto()
    """In large requests, through the page cache."""
    PAST_CACHE = enum.auto()
    """In large requests that bypass the page cache, where the storage can."""


class Fetcher:
    """The reads of one load that miss the page cache.

    Args:
        past_cache: True to read past the page cache where the storage can.
        longest: bytes of the longest request.
        memory: bytes of memory for all requests.
    """

    def __init__(self, past_cache: bool, longest: int, memory: int = MEMORY_BYTES) -> None:
        self._past_cache = past_cache
        self._memory = memory
        self._longest = max(longest, 1)
        self._local = threading.local()

    @property
    def threads(self) -> int:
        """Number of requests in flight."""
        return max(_LEAST_THREADS, min(MOST_THREADS, self._memory // self._longest))

    def read(self, storage: Storage, name: str, start: int, count: int) -> memoryview:
        """Reads a range into memory that the next call of this thread may overwrite.

        Raises:
            StorageError: the file is missing, short or unreadable.
        """
        if isinstance(storage, RemoteStorage):
            return storage.read_buffer(name, start, count)
        memory: memoryview | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < memory_for(count):
            memory = self._local.memory = aligned_buffer(memory_for(max(count, self._longest)))
        if self._past_cache and isinstance(storage, CachedStorage):
            return storage.read_uncached(name, start, count, memory)
        storage.read_into(name, start, memory[:count])
        return memory[:count]


def is_cached(storage: Storage, name: str, start: int, count: int) -> bool:
    """True if the storage finds a range in the page cache."""
    return count == 0 or (isinstance(storage, CachedStorage) and storage.is_cached(name, start, count))


class Sketch(msgspec.Struct, frozen=True, array_like=True):
    """Samples of the chunks that one rank reads."""

    node: str
    """Name of the machine."""
    samples: tuple[tuple[int, int, int], ...]
    """Scrambled number of a chunk, bytes of it that the rank reads, and bytes of the chunk; ascending."""
    complete: bool
    """True if the samples are all chunks that the rank reads."""

    @staticmethod
    def of(rows: NDArray[np.int64], read: NDArray[np.int64], count: NDArray[np.int64]) -> Sketch:
        """Returns the sketch of this rank.

        Args:
            rows: (n,) distinct rows of the chunk table.
            read: (n,) bytes that the rank reads of each.
            count: (n,) bytes of each.
        """
        if (large := count >= LARGE_BYTES).any():  # small chunks may be many, and take little time
            rows, read, count = rows[large], read[large], count[large]
        numbers = (rows.astype(np.uint64) + np.uint64(1)) * _SCRAMBLE
        least = np.argsort(numbers)[:SAMPLES]
        columns = (numbers[least].tolist(), read[least].tolist(), count[least].tolist())
        return Sketch(socket.gethostname(), tuple(zip(*columns, strict=True)), len(rows) <= SAMPLES)


def reads_twice(sketches: Iterable[Sketch]) -> bool:
    """True if ranks of a node read much of the same.

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
    """True if these ranks, all of one node, read much of the same."""
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
