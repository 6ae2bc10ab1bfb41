"""Destinations that share memory: what two keys say of the same bytes must agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardproof.errors import StructureError
from shardproof.loading.checkpoint import Checkpoint
from shardproof.loading.destinations import Destination
from shardproof.planning import ReadPlan
from shardproof.state import as_bytes

__all__ = ["check_shared_memory"]


def check_shared_memory(
    checkpoint: Checkpoint, plan: ReadPlan, destinations: Sequence[Destination], rows: Sequence[int]
) -> None:
    """Reads what went into shared memory once more, and compares.

    A view and its base may both be in a state. They are stored apart, and both are filled; had they been
    stored with different values, the last to be written would win by chance. Destinations whose extents touch
    are rare, so reading them twice is cheaper than reasoning about every stride.

    Args:
        checkpoint: that was read.
        plan: of all that was read.
        destinations: of the plan.
        rows: of the destinations that share memory.

    Raises:
        StructureError: two keys want different values in the same memory.
    """
    if not rows:
        return
    place = {row: at for at, row in enumerate(rows)}
    part = plan.only(np.isin(plan.requested, rows))
    again = [
        Destination.of(there.key, there.dtype, torch.empty_like(there.view))
        for there in (destinations[row] for row in rows)
    ]
    wanted = np.array([place[row] for row in part.requested.tolist()], np.int64)
    checkpoint.fill(part.with_requested(wanted), again)
    for row, copy in zip(rows, again, strict=True):
        if not _same_bits(destinations[row].view, copy.view):
            raise StructureError(
                f"{copy.key!r} shares memory with another key of the target, and the checkpoint has "
                "different values for the two: exclude one of them, or give each memory of its own",
                key=copy.key,
            )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(as_bytes(one), as_bytes(other))
