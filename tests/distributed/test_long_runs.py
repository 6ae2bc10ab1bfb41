"""Saves leave no descriptors, threads or keys of the store behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks

SAVES = 60
"""A leak in every second save makes a difference of 10 or more between early and late counts."""
BEATS = 4
"""After a first long wait, a rank has a heartbeat in each of 2 rendezvous: its keys and connections."""


def counts(store: object) -> tuple[int, int, int]:
    """Open descriptors, threads, and keys of the store."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), store.num_keys()  # type: ignore[attr-defined]


def save_again_and_again(root: str) -> tuple[list[tuple[int, int, int]], int]:
    meetings = rendezvous(deadline=30.0)
    checkpointer = sp.Checkpointer(
        root, rendezvous=meetings, keep=sp.KeepLatest(2), incremental=True, check_replicas="all"
    )
    weights = {str(number): torch.zeros(64) for number in range(8)}
    found = []
    for step in range(SAVES):
        weights["0"].add_(1)
        checkpointer.save(step, weights).result()
        meetings.meet("test", "count", b"", lambda posts: b"")
        found.append(counts(meetings._store.underlying_store))
    return found, rank()


def test_descriptors_threads_and_keys_do_not_grow_with_saves(tmp_path: Path) -> None:
    for outcome in run_ranks(2, save_again_and_again, str(tmp_path), timeout=90):
        found, _ = outcome.value
        early, late = found[4:20], found[40:]
        # Background work may still use some, so the minimum is compared with the maximum.
        for at, name in enumerate(("descriptors", "threads", "keys")):
            most, least = max(one[at] for one in early), min(one[at] for one in late)
            bound = most if name == "threads" else most + BEATS
            assert least <= bound, f"{name} grew from {most} to {least}: {found}"
