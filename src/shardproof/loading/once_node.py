"""Reading once on one node: units are read into shared memory, from where every rank takes its parts.

Note: Two halves
    A rank's memory has two halves, which rounds take in turn. All ranks agree that nobody has failed after a
    round is read and the round before is placed. So what is placed was read before an agreement, and a half
    is read into again only after the agreement by which all have placed what was in it.
"""

from __future__ import annotations

import numpy as np
import torch

from shardproof.format import Manifest
from shardproof.loading.chunks import Chunks, Files
from shardproof.loading.node_memory import NodeMemory, PeerMemory
from shardproof.loading.node_plan import NodeOrders
from shardproof.loading.placing import Placing
from shardproof.loading.threads import in_threads
from shardproof.planning import ChunkTable

__all__ = ["ThroughMemory"]


class ThroughMemory:
    """One rank's part (see `shardproof.loading.once.Handing`).

    Args:
        files: of the checkpoint.
        manifest: of the checkpoint.
        table: its chunks.
        placing: of this rank's read plan.
        orders: of this rank.
        memory: this rank's.
        peers: that of every rank, None for this one.
        threads: reads in flight.

    Raises:
        StorageError: there is too little memory.
    """

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        table: ChunkTable,
        placing: Placing,
        orders: NodeOrders,
        memory: NodeMemory,
        peers: list[PeerMemory | None],
        threads: int,
    ) -> None:
        self.read = 0
        """Bytes read so far."""
        self.received = 0
        """Bytes placed so far that another rank read."""
        self._placing = placing
        self._threads = threads
        self._half = orders.nbytes
        self._peers = peers
        self._rank = peers.index(None)
        self._memory: list[torch.Tensor | None] = [None] * len(peers)
        self._memory[self._rank] = memory.reserve(2 * orders.nbytes[self._rank])
        read = np.frombuffer(orders.read, np.int64).reshape(-1, 3)
        self._chunks = Chunks(files, manifest, table, np.frombuffer(orders.read_chunks, np.int64))
        ends = np.cumsum(read[:, 2]).tolist()
        self._begun: list[list[tuple[int, range]]] = [[] for _ in range(orders.rounds)]
        for (number, byte, count), end in zip(read.tolist(), ends, strict=True):
            self._begun[number].append((byte, range(end - count, end)))
        placed = np.frombuffer(orders.placed, np.int64).reshape(-1, 4)
        self._places: list[list[int]] = placed.tolist()
        self._count: list[int] = table.byte_count[placed[:, 3]].tolist()
        self._parts = placing.parts_of(placed[:, 3].tolist())
        self._ends: list[int] = np.searchsorted(placed[:, 0], np.arange(orders.rounds + 1)).tolist()
        self._part_bytes = np.append(0, np.cumsum(placing.part_bytes)).tolist()

    def prepare(self, number: int) -> int:
        """Reads and verifies the units of a round; their bytes.

        Raises:
            CorruptChunkError: stored bytes do not match their digest.
            StorageError: a file is missing, short or unreadable.
        """
        half = number % 2 * self._half[self._rank]
        data = memoryview(self._of(self._rank).numpy().data)

        def read(unit: tuple[int, range]) -> None:
            byte, batch = unit
            self._chunks.read(batch, data[half + byte :][: self._chunks.span(batch)])

        in_threads(read, self._begun[number], self._threads)
        done = sum(self._chunks.span(batch) for _, batch in self._begun[number])
        self.read += done
        return done

    def start(self, number: int) -> None:
        """The other ranks see the memory as it is."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def place(self, number: int) -> int:
        """Puts this rank's parts of a round where they belong; their bytes."""
        done = 0
        for at in range(self._ends[number], self._ends[number + 1]):
            _, rank, byte, row = self._places[at]
            begin = number % 2 * self._half[rank] + byte
            stored = self._of(rank)[begin : begin + self._count[at]]
            parts = self._parts[at]
            self._placing.put(row, parts, stored)
            if self._peers[rank] is not None:
                done += self._part_bytes[parts.stop] - self._part_bytes[parts.start]
        self.received += done
        return done

    def _of(self, rank: int) -> torch.Tensor:
        """A rank's memory: mapped once it is there, which the first agreement says."""
        found = self._memory[rank]
        if found is None:
            peer = self._peers[rank]
            assert peer is not None
            found = self._memory[rank] = peer.map(2 * self._half[rank])
        return found
