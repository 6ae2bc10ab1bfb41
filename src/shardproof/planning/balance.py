"""Which of the ranks that hold a box writes it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["balance_writers"]


def balance_writers(
    group: NDArray[np.int64], rank: NDArray[np.int64], byte_count: NDArray[np.int64], world_size: int
) -> NDArray[np.int64]:
    """Chooses one holder for each distinct box, so that the ranks' bytes are as even as holders allow.

    Boxes with one holder are given first. The others go, largest first, to the holder with the least so far
    (the longest-processing-time rule of Graham, 1969: the fullest rank gets at most 4/3 of the optimum when
    every rank holds every box). Ties go to the lowest rank, so the answer depends on the input alone.

    Args:
        group: (n,) for each holding, the row of its distinct box.
        rank: (n,) for each holding, the rank.
        byte_count: (m,) bytes of each distinct box.
        world_size: number of ranks.

    Returns:
        (m,) for each distinct box, the row (0 to n - 1) of the chosen holding.

    >>> group, rank = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0])
    >>> rank[balance_writers(group, rank, np.array([4, 6, 5]), 2)].tolist()
    [0, 1, 0]
    """
    order = np.lexsort((rank, group))
    holders = np.bincount(group, minlength=len(byte_count))
    first = np.cumsum(holders) - holders
    chosen = order[first] if len(byte_count) else np.zeros(0, np.int64)
    single = holders == 1
    load = np.bincount(rank[chosen[single]], weights=byte_count[single], minlength=world_size).astype(
        np.int64
    )
    shared = np.flatnonzero(~single)
    for box in shared[np.argsort(-byte_count[shared], kind="stable")].tolist():
        rows = order[first[box] : first[box] + holders[box]]
        ranks = rank[rows]
        least = int(np.argmin(load[ranks]))
        chosen[box] = rows[least]
        load[ranks[least]] += byte_count[box]
    return chosen
