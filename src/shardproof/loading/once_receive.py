"""What other ranks read for this one: messages unpacked into their destinations."""

from __future__ import annotations

import numpy as np
import torch

from shardproof.loading.once_orders import Orders
from shardproof.loading.placing import Placing
from shardproof.planning import ChunkTable

__all__ = ["Receiver"]


class Receiver:
    """Places what is received, round by round.

    Args:
        table: the chunks of the checkpoint.
        placing: of this rank's read plan.
        orders: of this rank.
        world_size: number of ranks.
    """

    def __init__(self, table: ChunkTable, placing: Placing, orders: Orders, world_size: int) -> None:
        self.received = 0
        """Bytes placed so far."""
        self.sizes = [[0] * world_size for _ in range(orders.rounds)]
        """Bytes from each rank, by round."""
        self._placing = placing
        received = np.frombuffer(orders.received, np.int64).reshape(-1, 4)
        chunks = np.frombuffer(orders.received_chunks, np.int64).reshape(-1, 2)
        self._chunks: list[list[int]] = chunks.tolist()
        self._count: list[int] = table.byte_count[chunks[:, 0]].tolist()
        self._parts = placing.parts_of(chunks[:, 0].tolist())
        self._messages: list[list[tuple[int, range]]] = [[] for _ in range(orders.rounds)]
        done = 0
        for rank, number, nbytes, count in received.tolist():
            self._messages[number].append((rank, range(done, done + count)))
            self.sizes[number][rank] += nbytes
            done += count
        most = max((sum(sizes) for sizes in self.sizes), default=0)
        self.buffer = torch.empty(most, dtype=torch.uint8, device="cpu")

    def place(self, number: int) -> int:
        """Places a round that has been received.

        Returns:
            Its bytes.
        """
        done = 0
        # A rank's messages keep their order, which is that in which it packed them.
        for _, rows in sorted(self._messages[number], key=lambda message: message[0]):
            for row in rows:
                chunk, cut = self._chunks[row]
                if not cut:
                    count = self._count[row]
                    self._placing.put(chunk, self._parts[row], self.buffer[done : done + count])
                    done += count
                    continue
                for part in self._parts[row]:
                    count = int(self._placing.part_bytes[part])
                    self._placing.put_part(part, self.buffer[done : done + count])
                    done += count
        self.received += done
        return done
