"""What one rank takes out of the memory of the ranks of its node, round by round."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from shardproof.loading.once_orders import Int64s
from shardproof.loading.placing import Placing
from shardproof.planning import ChunkTable

__all__ = ["CUT_BYTES", "Takings"]

CUT_BYTES = 64 << 10
"""Chunks from here on whose parts are views made beforehand."""


@dataclass(slots=True)
class _Taking:
    """Of one round."""

    nbytes: int = 0
    views: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Where parts of the larger chunks that are cut belong, and where they are read."""
    rows: list[int] = field(default_factory=list)
    """Of the orders, for all other chunks."""


class Takings:
    """The parts of chunks that this rank wants, by the rank that reads them and its round.

    Args:
        table: all chunks.
        placing: of this rank's read plan.
        taken: (4 n,) or (n, 4) `NodeOrders.taken`.
        ranks: of the node.
    """

    def __init__(self, table: ChunkTable, placing: Placing, taken: Int64s, ranks: int) -> None:
        taken = taken.reshape(-1, 4)
        chunks: list[int] = taken[:, 3].tolist()
        self._placing = placing
        self._taken: list[list[int]] = taken.tolist()
        self._count: list[int] = table.byte_count[taken[:, 3]].tolist()
        self._parts = placing.parts_of(chunks)
        self._straight = placing.straight(chunks)
        self._of: list[dict[int, _Taking]] = [{} for _ in range(ranks)]
        before = np.append(0, np.cumsum(placing.part_bytes)).tolist()
        for at, (rank, number, _, _) in enumerate(self._taken):
            if (taking := self._of[rank].get(number)) is None:
                taking = self._of[rank][number] = _Taking()
            taking.rows.append(at)
            taking.nbytes += before[self._parts[at].stop] - before[self._parts[at].start]

    def rounds(self, rank: int) -> int:
        """Rounds of a rank of which this one takes something."""
        return len(self._of[rank])

    def found(self, rank: int, memory: torch.Tensor) -> None:
        """Makes the views of what is cut from a rank's memory.

        Made between the copies, which leave nothing of Python in the processor's caches, they took 6 % of a
        load of rows into columns.

        Args:
            rank: whose memory it is.
            memory: (n,) uint8, all of it.
        """
        for taking in self._of[rank].values():
            rows, taking.rows = taking.rows, []
            for at in rows:
                stored, parts = self._stored(at, memory), self._parts[at]
                is_cut = self._count[at] >= CUT_BYTES and not self._straight.address[at]
                if is_cut and self._placing.is_aligned(parts, stored):
                    taking.views += self._placing.views(self._taken[at][3], parts, stored)
                else:
                    taking.rows.append(at)

    def take(self, rank: int, number: int, memory: torch.Tensor) -> int:
        """Puts the parts of a round where they belong. Called without gradients.

        Args:
            rank: that has read it.
            number: of the round.
            memory: that was `found`.

        Returns:
            Their bytes.
        """
        taking = self._of[rank].get(number)
        if taking is None:
            return 0
        for target, source in taking.views:
            target.copy_(source)
        for at in taking.rows:
            self._placing.put(self._taken[at][3], self._parts[at], self._stored(at, memory))
        return taking.nbytes

    def _stored(self, at: int, memory: torch.Tensor) -> torch.Tensor:
        byte = self._taken[at][2]
        return memory[byte : byte + self._count[at]]
