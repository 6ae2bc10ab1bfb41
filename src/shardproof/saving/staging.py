"""Host memory in which copies of tensors wait until they are written, kept from save to save.

Memory touched for the first time costs more than writing it, so segments are touched once, away from the
training thread, and reused. A pool never holds more than its budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shardproof.storage import address

__all__ = ["Staged", "StagingPool"]

_SMALLEST, _LARGEST = 1 << 20, 64 << 20
"""Bytes of a segment, a power of two: page-locked memory is handed out in such sizes."""
_ALIGNMENT = 64


@dataclass(eq=False, slots=True)
class _Segment:
    memory: memoryview
    address: int
    used: int = 0
    holds: int = 0
    """Copies in it that are still needed."""


class Staged(msgspec.Struct, frozen=True, gc=False):
    """Memory for one copy."""

    address: int
    segment: _Segment


class StagingPool:
    """Segments of host memory, handed out piece by piece.

    All methods but `grow` are called with `changed` held.

    Args:
        budget: bytes that it may hold at most.
        allocate: makes memory that has been touched (and is page-locked, for device memory).
    """

    def __init__(self, budget: int, allocate: Callable[[int], memoryview]) -> None:
        self.budget = budget
        self.changed = threading.Condition()
        """Notified when memory comes free or is added."""
        self.size = 0
        """Bytes of all segments."""
        self._allocate = allocate
        self._free: list[_Segment] = []
        self._current: _Segment | None = None
        self._scratch = memoryview(b"")

    def take(self, nbytes: int) -> Staged | None:
        """Memory of `nbytes`, or None while there is none free."""
        segment = self._current
        if segment is None or segment.used + nbytes > len(segment.memory):
            at = next((at for at, free in enumerate(self._free) if len(free.memory) >= nbytes), None)
            if at is None:
                return None
            if segment is not None and not segment.holds:
                self._recycle(segment)
            segment = self._current = self._free.pop(at)
        staged = Staged(segment.address + segment.used, segment)
        segment.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        segment.holds += 1
        return staged

    def give(self, staged: Staged) -> None:
        """A copy that is needed no more."""
        segment = staged.segment
        segment.holds -= 1
        if not segment.holds:
            if segment is self._current:
                segment.used = 0
            else:
                self._recycle(segment)
            self.changed.notify_all()

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for one chunk on its way, beside the budget; the same at every call."""
        if len(self._scratch) < nbytes:
            self._scratch = self._allocate(nbytes)
        return self._scratch

    def _recycle(self, segment: _Segment) -> None:
        segment.used = 0
        self._free.append(segment)

    def grow(self, size: int, largest: int, wanted: Callable[[], bool]) -> None:
        """Adds segments until the pool holds `size` bytes, or the budget is used up. Takes `changed` itself.

        Args:
            size: bytes in all that would be of use.
            largest: bytes of the largest single copy.
            wanted: asked before each segment whether somebody still waits.
        """
        while wanted():
            with self.changed:
                if self.size >= size:
                    return
                useful = max(largest, min(size - self.size, _LARGEST), _SMALLEST)
                count = _power_of_two(useful, self.budget - self.size)
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


def _power_of_two(useful: int, most: int) -> int:
    """The smallest power of two that holds `useful`, or the largest below `most`; 0 if there is none."""
    wanted = 1 << (useful - 1).bit_length()
    return wanted if wanted <= most else 1 << (most.bit_length() - 1) if most > 0 else 0
