"""Buffers that shard bytes pass through on their way to storage, allocated once and reused.

Memory touched for the first time costs more than the write itself, so a pool outlives a save.
"""

from __future__ import annotations

import queue

from shardproof.storage import aligned_buffer

__all__ = ["BufferPool"]


class BufferPool:
    """A few page-aligned buffers of one size.

    Args:
        nbytes: size of each, a multiple of 4,096 so that direct I/O takes it.
        count: how many; one is filled while the others are written.
    """

    def __init__(self, nbytes: int = 8 << 20, count: int = 3) -> None:
        self.nbytes = nbytes
        self._scratch = memoryview(b"")
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(aligned_buffer(nbytes))

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for one chunk that perhaps need not be written; the same at every call."""
        if len(self._scratch) < nbytes:
            self._scratch = aligned_buffer(nbytes)
        return self._scratch

    def take(self) -> memoryview:
        """A buffer that nobody uses; waits for a writer to give one back."""
        return self._free.get()

    def give(self, buffer: memoryview) -> None:
        """Returns a buffer whose bytes are written."""
        self._free.put(buffer)
