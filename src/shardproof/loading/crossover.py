"""Whether reading once pays: what storage and process group are measured to give, and one rule.

Reading all: every rank reads each chunk that it wants any part of. What ranks of one node both want, the
first gets from the storage and the others from the node's page cache. Reading once: every chunk is read by
one rank, and the group, or on one node its memory, carries the rest. With bytes D that differ within a node,
A read by its ranks in all, and O read by them once; S, the ranks' storage speeds added up; C, the same where
it is above `CACHE_SPEED` a rank, else that; X, the most that a rank sends or receives, and G, the slowest
rank's speed of exchange:

    all  = max over nodes (D / S + (A - D) / C)
    once = max over nodes (O / S) + X / G

A load that saves less than `WORTH_BYTES` a rank is not measured: it reads all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from shardproof.loading.chunks import Chunks
from shardproof.loading.once_orders import Loads

__all__ = ["memory_speed", "pays", "storage_speed", "worth_measuring"]

WORTH_BYTES = 32 << 20
CACHE_SPEED = float(2 << 30)
"""Bytes a second that a rank reads and verifies from the page cache, at least, on what is sold today."""
_SAMPLES = 8
_SAMPLE_BYTES = 256 << 10
_COPIED_BYTES = 4 << 20


def worth_measuring(loads: Loads) -> bool:
    """Whether reading once saves enough to ask how fast storage and group are."""
    saved = int(loads.read_all.sum() - loads.read_once.sum())
    return saved > WORTH_BYTES * len(loads.read_all)


def pays(loads: Loads, speeds: Sequence[tuple[float, float]]) -> bool:
    """Whether reading once takes less time than reading all.

    Args:
        loads: from the plan.
        speeds: of each rank, bytes a second of storage and of exchange.

    >>> loads = Loads(*(np.array(column) for column in ([0, 1], [8, 8], [8, 8], [4, 4], [4, 4], [4, 4])))
    >>> pays(loads, [(1.0, 8.0)] * 2), pays(loads, [(CACHE_SPEED, 1.0)] * 2)
    (True, False)
    """
    storage = np.array([speed for speed, _ in speeds])
    nodes = len(loads.distinct_all)
    together = np.bincount(loads.node, storage, nodes)
    cached = np.bincount(loads.node, np.maximum(storage, CACHE_SPEED), nodes)
    read_all = np.bincount(loads.node, loads.read_all, nodes)
    read_once = np.bincount(loads.node, loads.read_once, nodes)
    moved = max(int(loads.sent.max()), int(loads.received.max()))
    seconds_all = (loads.distinct_all / together + (read_all - loads.distinct_all) / cached).max()
    seconds_once = (read_once / together).max() + moved / min(speed for _, speed in speeds)
    return bool(seconds_once < seconds_all)


def storage_speed(chunks: Chunks) -> float:
    """Bytes a second at which this rank reads, from a few samples of what it wants. Nothing is verified.

    Raises:
        StorageError: a sample cannot be read.
    """
    if not len(chunks):
        return CACHE_SPEED
    memory = memoryview(bytearray(_SAMPLE_BYTES))
    begun, done = time.perf_counter(), 0
    for at in np.unique(np.linspace(0, len(chunks) - 1, _SAMPLES).astype(np.int64)).tolist():
        done += chunks.sample(at, memory)
    return done / max(time.perf_counter() - begun, 1e-9)


def memory_speed() -> float:
    """Bytes a second at which this rank copies memory, while the others do too."""
    source, target = (torch.zeros(_COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    begun = time.perf_counter()
    target.copy_(source)
    return _COPIED_BYTES / max(time.perf_counter() - begun, 1e-9)
