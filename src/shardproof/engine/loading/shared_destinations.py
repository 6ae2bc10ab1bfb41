"""Checks destinations that share memory: the checkpoint must have equal values for the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from shardproof.engine.loading.checkpoint import Checkpoint
from shardproof.engine.loading.destinations import Destination
from shardproof.engine.planning import ReadPlan
from shardproof.engine.state import as_bytes
from shardproof.errors import StructureError


def check_shared_memory(
    checkpoint: Checkpoint, plan: ReadPlan, destinations: Sequence[Destination], rows: Sequence[int]
) -> None:
    """Reads the values of destinations that share memory again, and compares them with the memory.

    A state may contain a tensor and a view of it. The checkpoint stores both, and the load fills both. If the
    stored values differ, the result depends on the order of the writes. Overlapping extents are rare, so a
    second read is cheaper than a comparison of strides.

    Raises:
        StructureError: the checkpoint has different values for the same memory.
    """
    if not rows:
        return
    place = {row: at for at, row in enumerate(rows)}
    part = plan.take(np.isin(plan.requested, rows))
    again = [
        Destination.of(there.key, there.dtype, torch.empty_like(there.view))
        for there in (destinations[row] for row in rows)
    ]
    wanted = np.array([place[row] for row in part.requested.tolist()], np.int64)
    checkpoint.fill(replace(part, requested=wanted), again)
    for row, copy in zip(rows, again, strict=True):
        if not torch.equal(as_bytes(destinations[row].view), as_bytes(copy.view)):
            raise StructureError(
                f"{copy.key!r} shares memory with another key of the target, and the checkpoint has "
                "different values for the two: exclude one of them, or give each key its own memory",
                key=copy.key,
            )
