"""The proof that the boxes which the ranks declare tile every tensor, and what to say where they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.errors import TilingError
from shardproof.geometry import Boxes, TilingFault, deduplicate, tiling_faults
from shardproof.planning.merge import Declared, Merged

__all__ = ["Distinct", "prove"]


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """The distinct boxes of one number of dimensions, and which holding is of which."""

    boxes: Boxes
    """m boxes, sorted by tensor, offsets, sizes."""
    tensor: NDArray[np.int64]
    """(m,) row of the merged tensor table."""
    group: NDArray[np.int64]
    """(n,) for each holding, the row of its distinct box."""
    rank: NDArray[np.int64]
    """(n,) the holder."""
    piece: NDArray[np.int64]
    """(n,) row of the box in the holder's own structure."""


def prove(merged: Merged, declared: Mapping[int, Declared]) -> list[Distinct]:
    """The distinct boxes by ascending number of dimensions, shown to tile every tensor.

    Raises:
        TilingError: the boxes of a tensor do not cover it exactly once.
    """
    return [_proved(merged, dimensions, boxes) for dimensions, boxes in sorted(declared.items())]


def _proved(merged: Merged, dimensions: int, declared: Declared) -> Distinct:
    first, group = deduplicate(declared.tensor, declared.boxes)
    boxes, tensor = declared.boxes, declared.tensor
    if len(first) < len(group) or (first[1:] < first[:-1]).any():
        boxes, tensor = boxes.take(first), tensor[first]
    of_this = np.flatnonzero(merged.ndims == dimensions)
    shapes = np.array([merged.shapes[row] for row in of_this.tolist()], np.int64)
    local = np.zeros(len(merged.ndims), np.int64)  # of each tensor, its row among those of this number
    local[of_this] = np.arange(len(of_this))
    faults = tiling_faults(shapes.reshape(len(of_this), dimensions), local[tensor], boxes)
    if faults:
        key = merged.keys[int(of_this[faults[0].tensor])]
        raise _tiling_error(key, merged, declared, group, faults[0], len(faults))
    return Distinct(boxes, tensor, group, declared.rank, declared.piece)


def _tiling_error(
    key: str, merged: Merged, declared: Declared, group: NDArray[np.int64], fault: TilingFault, faults: int
) -> TilingError:
    """The first fault in words: the boxes at fault and the ranks that hold them."""
    row = merged.keys.index(key)
    holders: dict[str, list[int]] = {}
    for distinct in fault.boxes:
        held = np.flatnonzero(group == distinct)
        box = _interval(declared.boxes.offsets[held[0]].tolist(), declared.boxes.sizes[held[0]].tolist())
        holders[box] = sorted(set(declared.rank[held].tolist()))
    at = _interval(fault.offsets, fault.sizes)
    shape = list(merged.shapes[row])
    said = ", ".join(f"{box} on {_ranks(ranks)}" for box, ranks in holders.items())
    if fault.kind == "gap":
        had = sorted(set(declared.rank[declared.tensor == row].tolist()))
        said = f"no rank holds {at}; pieces of it are on {_ranks(had)}" if had else "no rank holds any of it"
        advice = "a rank that holds this part did not declare it, or offsets are wrong"
    elif fault.kind == "overlap":
        said = f"{at} is held by different boxes: {said}"
        advice = "replicas must be equal boxes; different boxes must not share an element"
    else:
        said = f"the box {said} reaches outside"
        advice = "offsets and sizes must lie within the global shape"
    more = f" ({faults - 1} more tensors have such faults)" if faults > 1 else ""
    return TilingError(
        f"tensor {key!r} of shape {shape}: {fault.kind}: {said}. Expected: boxes that cover it exactly once; "
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
