"""Staging: host memory for copies of tensors that wait to be written, reused from save to save.

The first touch of memory costs more than a write to it. So a separate thread touches new segments, and later
saves reuse them. A pool is never larger than its budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shardproof._utils.memcpy import address
from shardproof._utils.topology import available_memory, ranks_here

_SMALLEST, _LARGEST = 1 << 20, 64 << 20
"""Bytes of a segment, a power of two: page-locked memory is handed out in such sizes."""
SLOT_BYTES = 64
"""Each copy begins at a multiple of this. No two copies share bytes between two such multiples."""
_SHARE = 4
"""A quarter of the available memory may hold copies."""


@dataclass(eq=False, slots=True)
class _Segment:
    memory: memoryview
    address: int
    used: int = 0
    copies: int = 0
    """Number of copies in use."""


class Staged(msgspec.Struct, frozen=True, gc=False):
    """Memory for one copy."""

    address: int
    segment: _Segment


class StagingPool:
    """Segments of host memory, each with space for many copies.

    Callers hold `changed` while they call any method except `grow`.

    Args:
        budget: upper bound of the bytes of all segments.
        allocate: returns memory that is touched and, for copies of device memory, page-locked.
    """

    def __init__(self, budget: int, allocate: Callable[[int], memoryview]) -> None:
        self.budget = budget
        self.changed = threading.Condition()
        """Notified when memory becomes free."""
        self.size = 0
        """Bytes of all segments."""
        self._allocate = allocate
        self._free: list[_Segment] = []
        self._current: _Segment | None = None
        self._scratch = memoryview(b"")

    def take(self, nbytes: int) -> Staged | None:
        """Memory of `nbytes`; None if none is free."""
        segment = self._current
        if segment is None or segment.used + nbytes > len(segment.memory):
            at = next((at for at, free in enumerate(self._free) if len(free.memory) >= nbytes), None)
            if at is None:
                return None
            if segment is not None and not segment.copies:
                self._recycle(segment)
            segment = self._current = self._free.pop(at)
        staged = Staged(segment.address + segment.used, segment)
        segment.used += -(-nbytes // SLOT_BYTES) * SLOT_BYTES
        segment.copies += 1
        return staged

    def give(self, staged: Staged) -> None:
        """Frees the memory of a copy."""
        segment = staged.segment
        segment.copies -= 1
        if not segment.copies:
            if segment is self._current:
                segment.used = 0
            else:
                self._recycle(segment)
            self.changed.notify_all()

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for the chunks that are copied at a time, outside of the budget; the same at every call."""
        if len(self._scratch) < nbytes:
            self._scratch = self._allocate(nbytes)
        return self._scratch

    def _recycle(self, segment: _Segment) -> None:
        segment.used = 0
        self._free.append(segment)

    def grow(self, size: int, largest: int, wanted: Callable[[], bool]) -> None:
        """Adds segments until the pool has `size` bytes or the budget is used up. Takes `changed` itself.

        Args:
            size: bytes of all segments to reach.
            largest: bytes of the largest single copy.
            wanted: called before each segment; False ends the growth.
        """
        while wanted():
            with self.changed:
                if self.size >= size:
                    return
                useful = max(largest, min(size - self.size, _LARGEST), _SMALLEST)
                left = self.budget - self.size
                count = 1 << (useful - 1).bit_length()  # the smallest power of two that is enough
                if count > left:
                    count = 1 << (left.bit_length() - 1) if left > 0 else 0
                if count < largest:
                    return
                self.size += count
            try:
                memory = self._allocate(count)
            except BaseException:
                with self.changed:
                    self.size -= count
                raise
            with self.changed:
                self._free.append(_Segment(memory, address(memory)))
                self.changed.notify_all()


def default_budget() -> int:
    """Bytes: a quarter of the memory that is available, divided by the ranks of this node.

    >>> default_budget() > 0
    True
    """
    return available_memory() // _SHARE // ranks_here()
