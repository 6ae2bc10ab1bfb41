"""Copies of tensors that wait to be written: host memory for them, and transfers from devices.

The first touch of memory costs more than a write to it. So a separate thread touches new segments, and later
saves reuse them. A pool is never larger than its budget.

Copies of device memory run while training goes on. Three parties take part: the *main* stream, on which the
caller enqueues training; a *side* stream of each save; and the host. Several threads may copy at the same
time.

Note: Side waits for main, once
    A save stores the values that main has written when the save begins. The save records an event on main
    then, and side waits for it before its first copy. Side waits for no later work, so copies overlap the
    next forward and backward. The caller joins work on other streams to the current one, as any use of its
    results requires.

Note: The host waits for copies
    `copy` returns when the bytes are in host memory; `enqueue` leaves that to `wait`. Code that overwrites a
    tensor after its copy (see "Why no torn value can be written") waits on the host until then. So main gets
    that work after the copy is done, and does not wait for side. For the same reason no `record_stream` is
    needed: the caller holds a reference until then, and after that no work of side reads the tensor.

Note: Temporaries belong to side
    A strided, conjugated or negated tensor is first copied into row-major order on the device. Side is the
    current stream of the thread when this memory is allocated. So the allocator reuses it only for side,
    whose later work comes after the copy. It is no larger than one copied part. Small tensors are gathered
    in such memory, too: for them, the start of a copy to the host takes longer than the transfer.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shardproof._utils.accelerator import has_streams, on_stream, page_locked
from shardproof._utils.libc import address
from shardproof._utils.topology import available_memory, ranks_here
from shardproof.engine.geometry import row_pointers
from shardproof.engine.state import Piece
from shardproof.engine.storage import ALIGNMENT, aligned_buffer

_SMALLEST, _LARGEST = 1 << 20, 64 << 20
"""Bytes of a segment, a power of two: page-locked memory is handed out in such sizes."""
SLOT_BYTES = 64
"""Each copy begins at a multiple of this. No two copies share bytes between two such multiples."""
_SHARE = 4
"""A quarter of the available memory may hold copies."""

_Ints = NDArray[np.int64]
_SMALL_BYTES = 64 << 10
"""Slices in device memory of at most this size are copied together."""

_TOGETHER_BYTES = 1 << 20
"""Bytes of such a copy, at most."""


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


class DeviceCopies:
    """Copies of one device's tensors, with their values when this object was made.

    On a device without streams, copies run in the device's default order.

    >>> copies = DeviceCopies(torch.device("cpu"))
    >>> bytes_of = memoryview(bytearray(4))
    >>> copies.copy(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T, bytes_of)
    >>> bytes_of.tolist()
    [1, 3, 2, 4]
    >>> copies.wait()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.Stream | None = None
        if has_streams(device):  # see "Side waits for main, once"
            self._side = torch.Stream(device)
            self._side.wait_event(torch.accelerator.current_stream(device).record_event())

    def copy(self, source: torch.Tensor, into: memoryview) -> None:
        """Copies a tensor's elements in row-major order; returns when they are in host memory.

        Several threads may call this at once. Page-locked memory (`pinned_buffer`) is fastest.

        Args:
            source: on the device, of any strides and dtype. No code may write to it until this returns.
            into: writable memory of the size of the elements.

        Raises:
            torch.OutOfMemoryError: the device has no room for a row-major copy of a strided `source`.
        """
        if (done := self.enqueue(source, into)) is not None:
            done.synchronize()

    def enqueue_together(
        self, sources: Sequence[torch.Tensor], starts: Sequence[int], into: memoryview
    ) -> None:
        """As `enqueue` for several small tensors, which a single copy brings to the host.

        Args:
            sources: as `source` of `copy`, and not empty.
            starts: first byte of each tensor in `into`.
            into: writable memory. Bytes between the tensors are overwritten, too.
        """
        if self._side is not None:
            with on_stream(self._side, self._device):
                if _gather(sources, starts, into):
                    return
        for source, start in zip(sources, starts, strict=True):
            self.enqueue(source, into[start : start + source.nbytes])

    def wait(self) -> None:
        """Waits for all copies, including those whose `copy` ended with an error."""
        if self._side is not None:
            self._side.synchronize()

    def enqueue(self, source: torch.Tensor, into: memoryview) -> torch.Event | None:
        """As `copy`, but the elements are in host memory only when a later `wait` has returned.

        So the host prepares the next copy during this one. Returns an event after the copy, if it has to be
        waited for.
        """
        assert len(into) == source.numel() * source.element_size(), (len(into), source.shape, source.dtype)
        if len(into) == 0:
            return None
        target = torch.frombuffer(into, dtype=torch.uint8).view(source.dtype).view(source.shape)
        if self._side is None:
            target.copy_(source.detach())
            return None
        with on_stream(self._side, self._device):
            row_major = source.detach().resolve_conj().resolve_neg().contiguous()
            target.copy_(row_major, non_blocking=True)
            done = self._side.record_event()
            del row_major  # see "Temporaries belong to side"
        return done

    def gathered(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The concatenation of 1-D tensors of one dtype on the device, in host memory."""
        if self._side is None:
            return torch.cat(list(parts)).cpu()
        with on_stream(self._side, self._device):
            return torch.cat(list(parts)).cpu()


def _gather(sources: Sequence[torch.Tensor], starts: Sequence[int], into: memoryview) -> bool:
    """Enqueues one copy for all tensors, on the current stream; False if the device has no room for it."""
    try:
        gathered = torch.empty(len(into), dtype=torch.uint8, device=sources[0].device)
        row_major = [source.detach().resolve_conj().resolve_neg().contiguous() for source in sources]
    except torch.OutOfMemoryError:
        return False
    # A contiguous tensor of one element may have any stride.
    parts = [each.as_strided((each.numel(),), (1,)).view(torch.uint8) for each in row_major]
    torch._foreach_copy_(
        [gathered[start : start + part.numel()] for start, part in zip(starts, parts, strict=True)], parts
    )
    torch.frombuffer(into, dtype=torch.uint8).copy_(gathered, non_blocking=True)
    return True


def copies_of(tensors: Iterable[torch.Tensor]) -> dict[torch.device, DeviceCopies]:
    """A `DeviceCopies` for each device that a tensor is on; none for host memory."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return {device: DeviceCopies(device) for device in devices}


def pinned_buffer(nbytes: int) -> memoryview:
    """New memory that starts on a page; page-locked if this process uses an accelerator that supports it.

    Otherwise, and if the system refuses to lock more memory, it is `aligned_buffer(nbytes)`. See
    `page_locked`.

    >>> buffer = pinned_buffer(10_000)
    >>> len(buffer), buffer.readonly
    (10000, False)
    """
    locked = page_locked(nbytes, ALIGNMENT) if nbytes > 0 else None
    return aligned_buffer(nbytes) if locked is None else locked


class _SmallCopies:
    """Small slices of one device that are copied together to neighbouring memory of one allocation."""

    def __init__(self, copies: DeviceCopies, to: int, segment: object) -> None:
        self.copies = copies
        self.segment = segment
        self.first = self.end = to
        self.rows: list[int] = []
        self.parts: list[torch.Tensor] = []
        self.starts: list[int] = []

    def accepts(self, copies: DeviceCopies, to: int, count: int, segment: object) -> bool:
        """True if a slice can be copied together with these."""
        is_next = 0 <= to - self.end < SLOT_BYTES and to + count - self.first <= _TOGETHER_BYTES
        return is_next and copies is self.copies and segment is self.segment

    def add(self, row: int, part: torch.Tensor, to: int, count: int) -> None:
        """Adds a slice that `accepts` allows."""
        self.rows.append(row)
        self.parts.append(part)
        self.starts.append(to - self.first)
        self.end = to + count


class SliceSource:
    """n slices, each a box within one piece.

    Args:
        pieces: pieces of the rank.
        piece: (n,) row of the piece of each slice.
        start: (n,) first element of the slice in the row-major order of the piece.
        byte_count: (n,) bytes of the slice.
        offsets: flat global offsets of the slice's box, one for each dimension of its piece.
        sizes: flat sizes of the slice's box.
        copies: copies of device memory, by device.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        piece: _Ints,
        start: _Ints,
        byte_count: _Ints,
        offsets: _Ints,
        sizes: _Ints,
        copies: Mapping[torch.device, DeviceCopies],
    ) -> None:
        self.piece: list[int] = piece.tolist()
        self.byte_counts: list[int] = byte_count.tolist()
        self._pieces = pieces
        # `Piece.address` may be stale: a later visit of the walk may have moved the tensor.
        self._pointers = [each.view.data_ptr() for each in pieces]
        is_plain = np.array([each.is_plain for each in pieces], bool)
        base = np.where(is_plain, np.array(self._pointers, np.uint64), np.uint64(0))[piece]
        if start.any():
            itemsize = np.array([each.view.element_size() for each in pieces], np.int64)
            base = np.where(base != 0, base + (start * itemsize[piece]).astype(np.uint64), base)
        self.addresses: list[int] = base.tolist()
        """Address of each slice in host memory; 0 if `read` has to gather its bytes."""
        self._columns = piece, offsets, sizes
        self.copies = copies
        self._small: _SmallCopies | None = None
        """Slices of `read` without `wait` whose copies are not enqueued yet."""
        self._freed: list[int] = []
        """Rows to return from `wait`."""

    def is_in_place(self, row: int) -> bool:
        """True if the piece of a slice still has its memory.

        A freed storage (`resize_(0)`) must not be read.
        """
        view, pointer = self._pieces[at := self.piece[row]].view, self._pointers[at]
        return view.data_ptr() == pointer and (pointer != 0 or view.numel() == 0)

    def read(self, row: int, to: int, *, wait: bool = True, segment: object = None) -> None:
        """Copies a whole slice.

        Args:
            row: row of the slice.
            to: address of the destination.
            wait: False if the caller calls `wait` before it uses the copy. Each destination then begins at a
                multiple of `SLOT_BYTES`, because small slices of a device that are next to each other are
                copied together, with the bytes between them.
            segment: the allocation of the destination; only slices of one allocation are copied together.
        """
        if (address := self.addresses[row]) != 0:
            ctypes.memmove(to, address, self.byte_counts[row])
        else:
            self._gather(row, to, wait, segment)

    def wait(self) -> list[int]:
        """Waits for all copies of device memory.

        Returns rows of slices whose memory was freed before their copy. These and others were not copied.
        """
        try:
            self._copy_small()
        finally:
            for copies in self.copies.values():
                copies.wait()
        freed, self._freed = self._freed, []
        return freed

    @cached_property
    def _boxes(self) -> tuple[list[int], list[int], list[int]]:
        """The row of each slice's box in the flat columns of offsets and sizes, and these columns."""
        piece, offsets, sizes = self._columns
        ndims = np.array([len(each.offsets) for each in self._pieces], np.int64)[piece]
        return row_pointers(ndims).tolist(), offsets.tolist(), sizes.tolist()

    @torch.no_grad()
    def _gather(self, row: int, to: int, wait: bool, segment: object) -> None:
        """Copies a slice that is in device memory, or in another order than row-major."""
        count = self.byte_counts[row]
        piece = self._pieces[self.piece[row]]
        part = piece.view
        begins, offsets, sizes = self._boxes
        box = slice(begins[row], begins[row + 1])
        for dim, (offset, size, first) in enumerate(
            zip(offsets[box], sizes[box], piece.offsets, strict=True)
        ):
            if size != part.shape[dim]:
                part = part.narrow(dim, offset - first, size)
        copies = self.copies.get(part.device)
        if copies is None:
            gathered = part.resolve_conj().resolve_neg().contiguous()
            ctypes.memmove(to, gathered.data_ptr(), count)
        elif not wait and 0 < count <= _SMALL_BYTES:
            if self._small is None or not self._small.accepts(copies, to, count, segment):
                self._copy_small()
                self._small = _SmallCopies(copies, to, segment)
            self._small.add(row, part, to, count)
        else:
            into = memoryview((ctypes.c_char * count).from_address(to)).cast("B")
            if wait:
                copies.copy(part, into)
            else:
                copies.enqueue(part, into)

    def _copy_small(self) -> None:
        """Enqueues one copy of the small slices that were collected."""
        small, self._small = self._small, None
        if small is None:
            return
        # A kernel that reads freed memory would end the use of the device by this process.
        freed = [row for row in small.rows if not self.is_in_place(row)]
        if freed:
            self._freed += freed
            return
        memory = (ctypes.c_char * (small.end - small.first)).from_address(small.first)
        small.copies.enqueue_together(small.parts, small.starts, memoryview(memory).cast("B"))

    def finish(self) -> None:
        """Waits for all copies, and releases the pieces."""
        self._small = None
        self.wait()
        self._pieces = ()
