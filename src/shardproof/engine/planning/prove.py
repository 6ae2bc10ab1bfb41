"""The proof that the boxes of all ranks tile every tensor, and the error if they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.geometry import Boxes, TilingFault, deduplicate, tiling_faults
from shardproof.engine.planning.merge import MergedStructures, RankBoxes
from shardproof.errors import TilingError


@dataclass(frozen=True, slots=True, eq=False)
class DistinctBoxes:
    """The distinct boxes of one number of dimensions, and the replicas of each: its copies on ranks."""

    boxes: Boxes
    """m boxes, sorted by tensor, then offsets, then sizes."""
    tensor: NDArray[np.int64]
    """(m,) row of the merged tensor table."""
    group: NDArray[np.int64]
    """(n,) row of the distinct box of each replica."""
    rank: NDArray[np.int64]
    """(n,) rank of each replica."""
    piece: NDArray[np.int64]
    """(n,) row of the box in that rank's structure."""


def prove(merged: MergedStructures, declared: Mapping[int, RankBoxes]) -> list[DistinctBoxes]:
    """Proves that the boxes of each tensor tile it, and returns the distinct boxes by number of dimensions.

    Raises:
        TilingError: the boxes of a tensor do not cover it exactly once.
    """
    return [_proved(merged, dimensions, boxes) for dimensions, boxes in sorted(declared.items())]


def _proved(merged: MergedStructures, dimensions: int, declared: RankBoxes) -> DistinctBoxes:
    first, group = deduplicate(declared.tensor, declared.boxes)
    boxes, tensor = declared.boxes, declared.tensor
    if len(first) < len(group) or (first[1:] < first[:-1]).any():
        boxes, tensor = boxes.take(first), tensor[first]
    rows = np.flatnonzero(merged.ndims == dimensions)
    shapes = np.array([merged.shapes[row] for row in rows.tolist()], np.int64)
    position = np.zeros(len(merged.ndims), np.int64)  # of each tensor in `rows`
    position[rows] = np.arange(len(rows))
    faults = tiling_faults(shapes.reshape(len(rows), dimensions), position[tensor], boxes)
    if faults:
        key = merged.keys[int(rows[faults[0].tensor])]
        raise _tiling_error(key, merged, declared, group, faults[0], len(faults))
    return DistinctBoxes(boxes, tensor, group, declared.rank, declared.piece)


def _tiling_error(
    key: str,
    merged: MergedStructures,
    declared: RankBoxes,
    group: NDArray[np.int64],
    fault: TilingFault,
    faults: int,
) -> TilingError:
    """The error for the first fault. It names the boxes at fault and the ranks that declare them."""
    row = merged.keys.index(key)
    holders: dict[str, list[int]] = {}
    for distinct in fault.boxes:
        rows = np.flatnonzero(group == distinct)
        box = _interval(declared.boxes.offsets[rows[0]].tolist(), declared.boxes.sizes[rows[0]].tolist())
        holders[box] = sorted(set(declared.rank[rows].tolist()))
    at = _interval(fault.offsets, fault.sizes)
    shape = list(merged.shapes[row])
    boxes = ", ".join(f"{box} on {_ranks(ranks)}" for box, ranks in holders.items())
    if fault.kind == "gap":
        others = sorted(set(declared.rank[declared.tensor == row].tolist()))
        what = (
            f"no rank holds {at}; {_ranks(others)} hold other parts" if others else "no rank holds any of it"
        )
        advice = "Check the offsets, and that every rank declares its part"
    elif fault.kind == "overlap":
        what = f"different boxes hold {at}: {boxes}"
        advice = "Replicas must be equal boxes; different boxes must not share an element"
    else:
        what = f"the box {boxes} exceeds the shape"
        advice = "Offsets and sizes must lie within the global shape"
    more = f" ({faults - 1} more tensors have faults)" if faults > 1 else ""
    return TilingError(
        f"tensor {key!r} of shape {shape}: {fault.kind}: {what}. Expected: boxes that cover it exactly once. "
        f"{advice}{more}",
        key=key,
        kind=fault.kind,
        box=[list(fault.offsets), list(fault.sizes)],
        holders=holders,
    )


def _interval(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    inner = ",".join(f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True))
    return f"[{inner}]"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
