"""Whether reading once pays: what storage, processors and process group are measured to give, and one rule.

Reading all: every rank reads and verifies the blocks that it wants any part of. Reading once: every chunk is
read by one rank, and the group, or on one node its memory, carries the rest. For the ranks of a node, with A
bytes that they read in all, D of these that differ, O that they read once, and a and o those of one rank:

    all  = max over nodes of max((D + q (A - D)) / S, a / C)
    once = max over nodes of max(O / S, o / C) + x / G + `FIXED`

Storage (S) and processors (C: reading what the system has kept, and verifying) work at the same time, so the
slower one counts. q is what reading again takes of the storage's time, as a part of what reading took: 0
where the system keeps what was read, 1 where it does not. x is the most that a rank hands on or gets, through
memory all that it takes from there, and G the speed.

Note: What a few milliseconds can tell
    Ranks of one node take their samples at the same moment, as they will read, and where the storage is
    theirs together, each finds a part of its speed. What processors do is measured in their own time and
    shared out, and what is waited for by the median: it does not matter who was put aside for a moment.

A load that saves less than `WORTH_BYTES` a rank is not measured: it reads all.
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
from shardproof.loading.read_once.orders import Loads
from shardproof.loading.threads import reading_threads

__all__ = ["Sampled", "expected", "memory_speed", "pays", "sample", "worth_measuring"]

WORTH_BYTES = 32 << 20
FIXED = 0.02
"""Seconds that handing on takes whatever the bytes are: for memory, threads, messages."""
_SAMPLES = 8
_SAMPLE_BYTES = 256 << 10
_COPIED_BYTES = 4 << 20
_TICK = 5e-3
"""Seconds between moments at which ranks begin to take samples."""
_WAITS = 1.3
"""Reading waits for the storage where it takes so many times what a processor works for it, or more."""


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """What a rank found when it took samples of what it wants."""

    nbytes: int
    begun: float
    """Seconds of the clock that all processes of a node share."""
    first: float
    """Seconds that reading took."""
    again: float
    """Seconds that reading the same took again."""
    work: float
    """Seconds of a processor in `first`, verifying included."""
    processors: float
    """This rank's share of those of the node."""


def worth_measuring(loads: Loads) -> bool:
    """Whether reading once saves enough to ask how fast storage and group are."""
    return loads.saved > WORTH_BYTES * len(loads.read_all)


def pays(loads: Loads, found: Sequence[tuple[Sampled, float]], *, through_memory: bool) -> bool:
    """Whether reading once takes less time than reading all.

    Args:
        loads: from the plan.
        found: of each rank, its samples, and the bytes a second at which it hands on.
        through_memory: of the node, not over a group.

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
    """Seconds of reading all and of reading once, beyond what both take; arguments as for `pays`."""
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
    handing = np.array([speed for _, speed in found])
    if through_memory:
        handed = (_taken(loads) / handing).max()
    else:
        handed = max(loads.sent.max(), loads.received.max()) / handing.min()
    return float(seconds_all), float(seconds_once + handed + FIXED)


def sample(chunks: Chunks) -> Sampled:
    """Takes samples of what this rank wants, and takes them again. They are hashed, not verified.

    Places are random, so that ranks that want the same do not find what another has just read.

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
    """Bytes a second at which this rank copies memory, when the others of its node do too."""
    source, target = (torch.ones(_COPIED_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
    before = time.thread_time()
    target.copy_(source)
    return _COPIED_BYTES / max(time.thread_time() - before, 1e-9) * min(1.0, _processors())


def _take(chunks: Chunks, places: Sequence[int], memory: memoryview) -> tuple[int, float, float]:
    """Bytes of the samples, and seconds and seconds of a processor that they took."""
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
    """What this rank may use of the node's processors: no more than it has threads that read."""
    return min(reading_threads(), processors())


def _speed(sampled: Sequence[Sampled]) -> float:
    """Bytes a second of a node's storage: of all samples, over the time in which any rank took one."""
    seconds, end = 0.0, float("-inf")
    for one in sorted(sampled, key=lambda one: one.begun):
        over = one.begun + one.first
        seconds += max(0.0, over - max(one.begun, end))
        end = max(end, over)
    nbytes = sum(one.nbytes for one in sampled)
    return nbytes / max(seconds, 1e-9) if nbytes else float("inf")


def _again(sampled: Sequence[Sampled]) -> float:
    """Time that the storage takes again for the same, as a part of what it took, from 0 to 1."""
    first, again, work = (sum(getattr(one, name) for one in sampled) for name in ("first", "again", "work"))
    if first <= _WAITS * work:  # it was kept already
        return 0.0
    return float(min(1.0, max(0.0, (again - work) / (first - work))))


def _taken(loads: Loads) -> NDArray[np.float64]:
    """(ranks,) bytes that a rank takes from memory: of what it reads itself the same part as of the rest."""
    part = loads.received / np.maximum(loads.read_all - loads.read_once, 1)
    return np.asarray(loads.received + part * loads.read_once, np.float64)
