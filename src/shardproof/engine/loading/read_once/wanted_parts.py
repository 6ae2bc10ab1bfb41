"""The parts of chunks that one rank copies from the shared memory of its node, round by round."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardproof.engine.geometry import row_pointers
from shardproof.engine.loading.destinations import DestinationWriter
from shardproof.engine.loading.read_once.orders import Int64s
from shardproof.engine.planning import ChunkTable

CUT_BYTES = 64 << 10
"""Least bytes of a chunk whose parts are copied through views that are made before the exchange."""


@dataclass(slots=True)
class _RoundParts:
    """The parts of one round."""

    nbytes: int = 0
    views: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Destination and source of each part of the large chunks that are cut."""
    rows: list[int] = field(default_factory=list)
    """Rows of the orders, for all other chunks."""


class WantedParts:
    """The parts of chunks that this rank wants, by their reader and its round.

    `copies` are `NodeOrders.copies`, (4 n,) or (n, 4).
    """

    def __init__(self, table: ChunkTable, writer: DestinationWriter, copies: Int64s, ranks: int) -> None:
        copies = copies.reshape(-1, 4)
        chunks: list[int] = copies[:, 3].tolist()
        self._writer = writer
        self._copies: list[list[int]] = copies.tolist()
        self._count: list[int] = table.byte_count[copies[:, 3]].tolist()
        self._parts = writer.parts_of(chunks)
        self._straight = writer.straight(chunks)
        self._of: list[dict[int, _RoundParts]] = [{} for _ in range(ranks)]
        before = row_pointers(writer.part_bytes).tolist()
        for at, (rank, number, _, _) in enumerate(self._copies):
            if (of_round := self._of[rank].get(number)) is None:
                of_round = self._of[rank][number] = _RoundParts()
            of_round.rows.append(at)
            of_round.nbytes += before[self._parts[at].stop] - before[self._parts[at].start]

    def rounds(self, rank: int) -> int:
        """Number of rounds of a rank that this rank copies from."""
        return len(self._of[rank])

    def prepare(self, rank: int, memory: torch.Tensor) -> None:
        """Makes the views of the parts in all of a reader's shared memory.

        Views that are made between the copies would take longer, because the copies displace the interpreter
        from the processor's caches.
        """
        for of_round in self._of[rank].values():
            rows, of_round.rows = of_round.rows, []
            for at in rows:
                stored, parts = self._stored(at, memory), self._parts[at]
                is_cut = self._count[at] >= CUT_BYTES and not self._straight.address[at]
                if is_cut and self._writer.is_aligned(parts, stored):
                    of_round.views += self._writer.views(self._copies[at][3], parts, stored)
                else:
                    of_round.rows.append(at)

    def copy(self, rank: int, number: int, memory: torch.Tensor) -> int:
        """Copies the parts of a round from the memory given to `prepare`. Called without gradients.

        Returns:
            Bytes copied.
        """
        of_round = self._of[rank].get(number)
        if of_round is None:
            return 0
        for target, source in of_round.views:
            target.copy_(source)
        for at in of_round.rows:
            self._writer.put(self._copies[at][3], self._parts[at], self._stored(at, memory))
        return of_round.nbytes

    def _stored(self, at: int, memory: torch.Tensor) -> torch.Tensor:
        byte = self._copies[at][2]
        return memory[byte : byte + self._count[at]]
