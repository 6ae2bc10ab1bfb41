"""Destinations that share memory: what two keys say of the same bytes must agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.errors import StructureError
from shardproof.loading.checkpoint import Checkpoint
from shardproof.loading.place import Destination, read_planned
from shardproof.planning import ReadPlan
from shardproof.state.tensors import as_bytes

__all__ = ["check_shared_memory"]


def check_shared_memory(checkpoint: Checkpoint, plan: ReadPlan, destinations: Sequence[Destination]) -> None:
    """Reads what went into shared memory once more, and compares.

    A view and its base may both be in a state. They are stored apart, and both are filled; had they been
    stored with different values, the last to be written would win by chance. Destinations whose extents touch
    are rare, so reading them twice is cheaper than reasoning about every stride.

    Raises:
        StructureError: two keys want different values in the same memory.
    """
    shared = _sharing(plan, destinations)
    if not shared:
        return
    place = {row: at for at, row in enumerate(shared)}
    part = plan.only(np.isin(plan.want, shared))
    again = [
        Destination.of(there.key, there.dtype, torch.empty_like(there.view))
        for there in (destinations[row] for row in shared)
    ]
    wanted = np.array([place[row] for row in part.want.tolist()], np.int64)
    read_planned(checkpoint, part.for_wants(wanted), again)
    for row, copy in zip(shared, again, strict=True):
        if not _same_bits(destinations[row].view, copy.view):
            raise StructureError(
                f"{copy.key!r} shares memory with another key of the target, and the checkpoint has "
                "different values for the two: exclude one of them, or give each memory of its own",
                key=copy.key,
            )


def _sharing(plan: ReadPlan, destinations: Sequence[Destination]) -> list[int]:
    """Rows of the destinations whose extents in memory touch another's.

    How much memory one takes is worked out from the plan: tensors that were filled are cold by now.
    Addresses of two devices may coincide by chance; that costs a second read and nothing else.
    """
    if not destinations:
        return []
    start = np.array([destination.address for destination in destinations], np.int64)
    order = np.argsort(start, kind="stable")
    start, stop = start[order], (start + _extents(plan, destinations))[order]
    furthest = np.maximum.accumulate(stop)
    touches = np.flatnonzero(start[1:] < furthest[:-1]) + 1
    holders = np.searchsorted(furthest, furthest[touches - 1])  # whose end reaches that far
    return sorted({*order[touches].tolist(), *order[holders].tolist()})


def _extents(plan: ReadPlan, destinations: Sequence[Destination]) -> NDArray[np.int64]:
    """(destinations,) bytes from the first element to the end of the last."""
    extents = np.zeros(len(destinations), np.int64)
    np.add.at(extents, plan.want, plan.sizes.prod(axis=1))
    extents *= [DTYPES[destination.dtype].itemsize for destination in destinations]
    for row, destination in enumerate(destinations):
        if not destination.is_plain:
            extents[row] = _extent(destination.view)
    return extents


def _extent(view: torch.Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
    return reach * view.element_size()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(as_bytes(one), as_bytes(other))
