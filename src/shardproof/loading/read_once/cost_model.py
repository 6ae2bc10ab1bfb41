"""The cost model of the read-once exchange: it compares the time of two ways to load, from measured speeds.

Without an exchange, every rank reads and verifies all blocks that it wants a part of. With an exchange, one
rank reads each chunk, and the process group or the shared memory of the node carries it to the others:

    all  = max over nodes of max((D + q (A - D)) / S, a / C)
    once = max over nodes of max(O / S, o / C) + x / G + `FIXED`

    A, a    bytes that all ranks of a node, and one rank, read without an exchange
    D       distinct bytes among A
    O, o    bytes that all ranks of a node, and one rank, read with an exchange
    S       speed of the storage
    C       speed of the processors, which copy from the page cache and verify
    q       time to read bytes again, relative to the first time: 0 if the page cache serves them
    x, G    largest number of bytes that a rank sends or receives, and the speed of the exchange

Storage and processors work at the same time, so the slower one counts.

Note: How samples of a few milliseconds suffice
    The ranks of a node take their samples at the same moment, because they will also read at the same time.
    If they share the storage, each rank measures its share of the speed. The work of processors is measured
    in thread time, and waiting by the median. So a thread that is suspended for a moment changes neither.

A load that saves less than `WORTH_BYTES` a rank is not measured, and every rank reads for itself.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from shardproof._utils.topology import processors
from shardproof.loading.chunk_reader import Chunks
from shardproof.loading.read_executor import reading_threads
from shardproof.loading.read_once.orders import Loads

__all__ = ["Sampled", "expected", "memory_speed", "pays", "sample", "worth_measuring"]

WORTH_BYTES = 32 << 20
FIXED = 0.02
"""Seconds that an exchange takes for memory, threads and messages, independent of the bytes."""
_SAMPLES = 8
_SAMPLE_BYTES = 256 << 10
_COPIED_BYTES = 4 << 20
_TICK = 5e-3
"""Ranks begin to take samples at multiples of this many seconds."""
_WAITS = 1.3
"""A read that takes at least this many times its processor time waits for the storage."""


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """The samples of one rank."""

    nbytes: int
    begun: float
    """Seconds of the monotonic clock, which all processes of a node share."""
    first: float
    """Seconds of the first read."""
    again: float
    """Seconds of the second read of the same bytes."""
    work: float
    """Processor seconds in `first`, with the digests."""
    processors: float
    """This rank's share of the node's processors."""


def worth_measuring(loads: Loads) -> bool:
    """True if the exchange saves enough reads to justify the measurement."""
    return loads.saved > WORTH_BYTES * len(loads.read_all)


def pays(loads: Loads, found: Sequence[tuple[Sampled, float]], *, through_memory: bool) -> bool:
    """True if the exchange takes less time than a read by every rank.

    Args:
        loads: from the plan.
        found: the samples of each rank, and its speed of the exchange in bytes a second.
        through_memory: True for shared memory of the node, False for a process group.

    >>> loads = Loads(*(np.array(column) for column in ([0, 1], [8, 8], [8, 8], [4, 4], [4, 4], [4, 4])))
    >>> slow, fast = (Sampled(1, 0.0, seconds, seconds, 0.01, 1.0) for seconds in (1.0, 0.01))
    >>> [pays(loads, [(one, 8.0)] * 2, through_memory=False) for one in (slow, fast)]
    [True, False]
    """
    seconds_all, seconds_once = expected(loads, found, through_memory=through_memory)
    return seconds_once < seconds_all


def expected(
    loads: Loads, found: Sequence[tuple[Sampled, float]], *, through_memory: bool
) -> tuple[float, float]:
    """Seconds without and with the exchange, beyond what both take. Arguments as for `pays`."""
    nodes = len(loads.distinct_all)
    of_node: list[list[Sampled]] = [[] for _ in range(nodes)]
    for node, (sampled, _) in zip(loads.node.tolist(), found, strict=True):
        of_node[node].append(sampled)
    storage = np.array([_speed(ranks) for ranks in of_node])
    again = np.array([_again(ranks) for ranks in of_node])
    work = np.array([one.work / max(one.nbytes, 1) / one.processors for one, _ in found])
    read_all = np.bincount(loads.node, loads.read_all, nodes)
    read_once = np.bincount(loads.node, loads.read_once, nodes)
    stored = loads.distinct_all + again * (read_all - loads.distinct_all)
    seconds_all = max((stored / storage).max(), (loads.read_all * work).max())
    seconds_once = max((read_once / storage).max(), (loads.read_once * work).max())
    speeds = np.array([speed for _, speed in found])
    if through_memory:
        exchange = (_copied(loads) / speeds).max()
    else:
        exchange = max(loads.sent.max(), loads.received.max()) / speeds.min()
    return float(seconds_all), float(seconds_once + exchange + FIXED)


def sample(chunks: Chunks) -> Sampled:
    """Reads samples of the chunks that this rank wants, twice. They are hashed, not verified.

    The chunks are chosen at random, so that ranks with the same chunks rarely read the same samples.

    Raises:
        StorageError: a sample cannot be read.
    """
    memory = memoryview(bytearray(_SAMPLE_BYTES))
    places = random.Random().sample(range(len(chunks)), min(_SAMPLES, len(chunks)))
    time.sleep(-time.monotonic() % _TICK)
    begun = time.monotonic()
    nbytes, first, work = _take(chunks, places, memory)
    _, again, _ = _take(chunks, places, memory)
    return Sampled(nbytes, begun, first, again, work, _processors())


def memory_speed() -> float:
    """Bytes a second at which this rank copies memory while all ranks of its node copy."""
    source, target = (torch.ones(_COPIED_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
    before = time.thread_time()
    target.copy_(source)
    return _COPIED_BYTES / max(time.thread_time() - before, 1e-9) * min(1.0, _processors())


def _take(chunks: Chunks, places: Sequence[int], memory: memoryview) -> tuple[int, float, float]:
    """Bytes of the samples, the seconds they took, and the processor seconds."""
    nbytes, seconds, work = 0, [], []
    for at in places:
        begun, worked = time.monotonic(), time.thread_time()
        count = chunks.sample(at, memory)
        xxhash.xxh3_128_digest(memory[:count])
        seconds.append(time.monotonic() - begun)
        work.append(time.thread_time() - worked)
        nbytes += count
    if not places:
        return 0, 0.0, 0.0
    return nbytes, statistics.median(seconds) * len(places), statistics.median(work) * len(places)


def _processors() -> float:
    """This rank's share of the node's processors, at most one for each reading thread."""
    return min(reading_threads(), processors())


def _speed(sampled: Sequence[Sampled]) -> float:
    """Bytes a second of a node's storage: bytes of all samples over the time in which any rank read one."""
    seconds, end = 0.0, float("-inf")
    for one in sorted(sampled, key=lambda one: one.begun):
        over = one.begun + one.first
        seconds += max(0.0, over - max(one.begun, end))
        end = max(end, over)
    nbytes = sum(one.nbytes for one in sampled)
    return nbytes / max(seconds, 1e-9) if nbytes else float("inf")


def _again(sampled: Sequence[Sampled]) -> float:
    """Storage time of the second read divided by that of the first, from 0 to 1."""
    first, again, work = (sum(getattr(one, name) for one in sampled) for name in ("first", "again", "work"))
    if first <= _WAITS * work:  # the page cache had it before
        return 0.0
    return float(min(1.0, max(0.0, (again - work) / (first - work))))


def _copied(loads: Loads) -> NDArray[np.float64]:
    """(ranks,) bytes that a rank copies from shared memory.

    The model assumes that the rank wants the same fraction of its own reads and of those of other ranks.
    """
    part = loads.received / np.maximum(loads.read_all - loads.read_once, 1)
    return np.asarray(loads.received + part * loads.read_once, np.float64)
