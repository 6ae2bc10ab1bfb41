"""Destinations of a load: memory that chunks are read into, copied and converted to, or uploaded from.

Uploads run while the load reads on.

Note: Uploads have a stream of their own
    The threads of a load enqueue copies on a *side* stream of each device. Side waits once for the work that
    the caller had enqueued when the load began, which may still use the destinations. A load waits on the
    host for side before it returns, so the caller's later work finds the values. Hence no `record_stream` is
    needed for destinations, and temporaries belong to side.

Note: A thread reads while the device copies
    A copy from page-locked memory runs without the host. Each thread reads into two buffers in turn, and
    waits for the copies from a buffer before it reads into it again. A thread may end before its last
    copies. Torch gives freed page-locked memory to other threads, so `Uploads` owns the buffers.

Note: Small parts share one upload
    A copy to the device costs the host 20 to 40 microseconds, as much as a copy of a megabyte takes. So the
    small parts of a buffer go to the device in one copy, and a kernel distributes them there. One thread at
    a time does this: each call of torch gives up the interpreter's lock, and threads that wait for it slow
    each other down. See benchmarks/results/2026-11-27-gpu-small-tensors.md.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shardproof._utils.accelerator import CurrentStreams, has_streams, on_stream, page_locked
from shardproof.dtypes import DTYPES
from shardproof.engine.format import Extents, TensorRecord
from shardproof.engine.geometry import row_major_strides
from shardproof.engine.planning import ChunkTable, ReadPlan
from shardproof.engine.state import is_plain_memory

UPLOAD_BYTES = 8 << 20
"""Bytes of one copy, at most. With smaller ones, threads wait for the interpreter's lock. See
benchmarks/results/2026-11-26-gpu.md."""

SMALL_BYTES = 1 << 20
"""Smaller chunks share reads and uploads."""

_COPY_BYTES = 512 << 10
"""A device copies about this many bytes in the time that the host needs to enqueue one copy."""


class Destination(msgspec.Struct, frozen=True, gc=False):
    """Memory for a wanted box. A load converts values if its dtype differs from the stored one."""

    key: str
    dtype: str
    """Torch's name of the dtype of the view."""
    view: torch.Tensor
    address: int
    """Address of the first element of the view, on its device."""
    is_plain: bool
    """See `shardproof.state.is_plain_memory`."""

    @staticmethod
    def of(key: str, dtype: str, view: torch.Tensor) -> Destination:
        """The destination of a view."""
        return Destination(key, dtype, view, view.data_ptr(), is_plain_memory(view))


class _DirectRanges(NamedTuple):
    """For each chunk the bytes that are read straight into their destination."""

    address: list[int]
    """Address in the destination; 0 if no bytes can be read straight."""
    begin: list[int]
    """First of these bytes in the chunk."""
    nbytes: list[int]


class DestinationWriter:
    """Copies the parts of a read plan to their destinations. `plan.requested` is an index into them.

    Any thread may call it after it has entered `streams`.
    """

    def __init__(
        self,
        tensors: Sequence[TensorRecord],
        table: ChunkTable,
        plan: ReadPlan,
        destinations: Sequence[Destination],
    ) -> None:
        self._table = table
        self._plan = plan
        self._destinations = destinations
        self.devices = {
            there.view.device for there in destinations if not (there.is_plain or there.view.is_cpu)
        }
        """Devices of the destinations, the host's left out."""
        self.streams = CurrentStreams(self.devices)
        """Streams of the thread that made this, for helper threads to enter."""
        tensor, volumes = table.tensor[plan.chunk], plan.sizes.prod(axis=1)
        tensor_of = np.zeros(len(destinations), np.int64)
        tensor_of[plan.requested] = tensor
        names = [tensors[row].dtype for row in tensor_of.tolist()]
        known: dict[str, torch.dtype] = {name: getattr(torch, name) for name in set(names)}
        self._dtypes = [known[name] for name in names]
        """Stored dtype, by destination."""
        sizes = {name: dtype.itemsize for name, dtype in known.items()}
        itemsizes = np.array([sizes[name] for name in names], np.int64)[plan.requested]
        base = [
            there.address if there.is_plain and there.dtype == name else 0
            for there, name in zip(destinations, names, strict=True)
        ]
        elements = np.zeros(len(destinations), np.int64)
        np.add.at(elements, plan.requested, volumes)
        self.overlapping = _overlapping(elements, destinations)
        """Rows of destinations that share memory. Nothing is read straight into them: another thread may
        overwrite the bytes before they are hashed."""
        for row in self.overlapping:
            base[row] = 0
        into = np.array(base, np.uint64)[plan.requested]
        is_contiguous = plan.chunk_stop - plan.chunk_start == volumes
        straight = is_contiguous & (plan.requested_start >= 0) & (into != 0)
        inside = plan.requested_start * itemsizes
        self._address = np.where(straight, into + inside.astype(np.uint64), np.uint64(0))
        """By part: destination address; 0 if the part is not contiguous in both, or needs a conversion."""
        self._uploaded = np.where(
            is_contiguous & (plan.requested_start >= 0) & self._is_uploaded()[plan.requested], inside, -1
        )
        """By part: its first byte in the destination, if it can be copied to a device unchanged; else -1."""
        self._begin = plan.chunk_start * itemsizes
        """By part: first byte in the chunk."""
        self._end = plan.chunk_stop * itemsizes
        """By part: end in the chunk, exclusive."""
        self._want: list[int] = plan.requested.tolist()
        self.part_bytes: NDArray[np.int64] = volumes * itemsizes
        """By part: bytes in the stored dtype."""

    def wanted(self, rows: NDArray[np.int64]) -> Extents:
        """For each chunk the range from the first byte that a part needs to the last.

        Args:
            rows: (n,) rows of the chunk table, each with at least one part.
        """
        if not len(rows):
            return rows, rows
        first = np.flatnonzero(np.diff(self._plan.chunk, prepend=-1))
        at = np.searchsorted(self._plan.chunk[first], rows)
        return np.minimum.reduceat(self._begin, first)[at], np.maximum.reduceat(self._end, first)[at]

    def straight(self, rows: Sequence[int]) -> _DirectRanges:
        """The bytes to read straight into a destination, for each row of the chunk table.

        The address is 0 for a chunk with several parts, and for a chunk whose part is not contiguous or needs
        a conversion.
        """
        first, last = self._bounds(rows)
        alone = last - first == 1
        part = first[alone]
        address, begin, nbytes = np.zeros(len(first), np.uint64), *np.zeros((2, len(first)), np.int64)
        address[alone] = self._address[part]
        begin[alone], nbytes[alone] = self._begin[part], self.part_bytes[part]
        return _DirectRanges(address.tolist(), begin.tolist(), nbytes.tolist())

    @torch.inference_mode(False)  # the slices are written by threads that are not in inference mode
    def device_ranges(self, rows: Sequence[int], least: int) -> dict[int, DeviceRange]:
        """The bytes to copy unchanged to contiguous memory of a device, by position in `rows`.

        Ranges of fewer than `least` bytes are left out.
        """
        if not self.devices:
            return {}
        first, last = self._bounds(rows)
        alone = np.flatnonzero(last - first == 1)
        part = first[alone]
        large = (self._uploaded[part] >= 0) & (self.part_bytes[part] >= least)
        ranges: dict[int, DeviceRange] = {}
        for at, row in zip(alone[large].tolist(), part[large].tolist(), strict=True):
            view = self._destinations[self._want[row]].view.detach()
            view = view.as_strided((view.numel(),), (1,)).view(torch.uint8)
            start, count = int(self._uploaded[row]), int(self.part_bytes[row])
            target = view if count == view.numel() else view[start : start + count]
            ranges[at] = DeviceRange(target, int(self._begin[row]))
        return ranges

    def parts_of(self, rows: Sequence[int]) -> list[range]:
        """The parts of each row of the chunk table."""
        return [range(*bounds) for bounds in np.column_stack(self._bounds(rows)).tolist()]

    def _bounds(self, rows: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first part of each row of the chunk table, and the part after the last."""
        chunk = self._plan.chunk
        return np.searchsorted(chunk, rows, "left"), np.searchsorted(chunk, rows, "right")

    def _is_uploaded(self) -> NDArray[np.bool_]:
        """By destination: True for contiguous memory of a device with streams, of the stored dtype."""
        found = np.zeros(len(self._destinations), bool)
        devices = set(filter(has_streams, self.devices))
        for row, there in enumerate(self._destinations if devices else ()):
            if not there.is_plain and (view := there.view).device in devices:
                is_stored_dtype = view.dtype == self._dtypes[row]
                found[row] = (
                    is_stored_dtype and view.is_contiguous() and not (view.is_conj() or view.is_neg())
                )
        found[self.overlapping] = False
        return found

    def put(
        self, row: int, parts: range, stored: torch.Tensor, first: int = 0, *, non_blocking: bool = False
    ) -> None:
        """Copies the parts of a chunk to their destinations.

        Args:
            row: row of the chunk table.
            parts: parts of the chunk.
            stored: (count,) uint8 host memory: the chunk, or a range of it that contains the parts.
            first: first byte of that range in the chunk, a multiple of the item size.
            non_blocking: True if a copy to a device may still run when this returns.
        """
        if len(parts) == 1 and (address := int(self._address[parts.start])):
            begin, count = int(self._begin[parts.start]), int(self.part_bytes[parts.start])
            ctypes.memmove(address, stored.data_ptr() + begin - first, count)
            return
        if not self.is_aligned(parts, stored):
            stored, non_blocking = stored.clone(), False
        with torch.no_grad():
            for target, source in self.views(row, parts, stored, first):
                # torch converts or arranges host values in temporary memory, which no copy may outlive.
                is_direct = non_blocking and source.is_contiguous() and source.dtype == target.dtype
                target.copy_(source, non_blocking=is_direct)

    def is_aligned(self, parts: range, stored: torch.Tensor) -> bool:
        """True if the memory can be viewed as elements of the stored dtype, as `views` needs."""
        return can_view(stored, self._dtypes[self._want[parts.start]])

    def views(
        self, row: int, parts: range, stored: torch.Tensor, first: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each part of a chunk its destination and its stored bytes, as views; arguments as for `put`."""
        table, plan, these = self._table, self._plan, slice(parts.start, parts.stop)
        sizes = table.box_sizes[table.box_start[row] : table.box_start[row + 1]].tolist()
        memory, ndim = stored.view(self._dtypes[self._want[parts.start]]), len(sizes)
        strides, offset = row_major_strides(sizes), memory.storage_offset() - first // memory.itemsize
        return [
            (
                part_of(self._destinations[want].view.detach(), into, extent),
                memory.as_strided(extent, strides, offset + start),
            )
            for want, into, start, extent in zip(
                self._want[these],
                plan.in_requested[these, :ndim].tolist(),
                plan.chunk_start[these].tolist(),
                plan.sizes[these, :ndim].tolist(),
                strict=True,
            )
        ]

    def put_part(self, part: int, stored: torch.Tensor) -> None:
        """Copies one part of the plan to its destination, from its elements in row-major order as uint8."""
        view, plan = self._destinations[self._want[part]].view.detach(), self._plan
        sizes, offsets = plan.sizes[part, : view.ndim].tolist(), plan.in_requested[part, : view.ndim].tolist()
        with torch.no_grad():
            source = shaped(stored, self._dtypes[self._want[part]], sizes)
            part_of(view, offsets, sizes).copy_(source)


def shaped(stored: torch.Tensor, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """Bytes as a tensor. Copies only if they cannot be viewed as elements."""
    if not can_view(stored, dtype):
        stored = stored.clone()
    return stored.view(dtype).view(sizes)


def can_view(stored: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if both the address and the storage offset of bytes are multiples of the item size.

    >>> can_view(torch.zeros(16, dtype=torch.uint8)[4:], torch.float32)
    True
    >>> can_view(torch.zeros(16, dtype=torch.uint8)[4:], torch.float64)
    False
    """
    return stored.data_ptr() % dtype.itemsize == 0 and stored.storage_offset() % dtype.itemsize == 0


def part_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _overlapping(elements: NDArray[np.int64], destinations: Sequence[Destination]) -> list[int]:
    """Rows of destinations whose memory overlaps that of another.

    Equal addresses on two devices count as an overlap. That costs a second read and nothing else.
    """
    if not destinations:
        return []
    start = np.array([destination.address for destination in destinations], np.int64)
    order = np.argsort(start, kind="stable")
    start, stop = start[order], (start + _extents(elements, destinations))[order]
    furthest = np.maximum.accumulate(stop)
    touches = np.flatnonzero(start[1:] < furthest[:-1]) + 1
    holders = np.searchsorted(furthest, furthest[touches - 1])  # the destination that ends there
    return sorted({*order[touches].tolist(), *order[holders].tolist()})


def _extents(elements: NDArray[np.int64], destinations: Sequence[Destination]) -> NDArray[np.int64]:
    """(destinations,) bytes from the first element to the end of the last."""
    itemsizes = [DTYPES[destination.dtype].itemsize for destination in destinations]
    extents = elements * np.array(itemsizes, np.int64)
    for row, destination in enumerate(destinations):
        if not destination.is_plain:
            view = destination.view
            reach = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
            extents[row] = (reach + 1) * view.element_size()
    return extents


class DeviceRange(NamedTuple):
    """A contiguous range of a chunk that is copied unchanged to contiguous memory of a device."""

    target: torch.Tensor
    """(n,) uint8."""
    begin: int
    """First byte in the chunk."""


class Uploads:
    """The side streams of one load, and the buffers of its threads.

    Args:
        devices: the devices of the destinations. Those without streams are ignored.

    >>> uploads = Uploads([torch.device("cpu")])
    >>> uploads.devices
    []
    >>> with uploads.entered():
    ...     value = torch.ones(2)
    >>> uploads.finish()
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = [device for device in devices if has_streams(device)]
        """The devices with streams."""
        self._sides = [torch.Stream(device) for device in self.devices]
        for side, device in zip(self._sides, self.devices, strict=True):
            side.wait_event(torch.accelerator.current_stream(device).record_event())
        self._buffers: list[UploadBuffers] = []
        self.one_at_a_time = threading.Lock()
        """Held by the thread that uploads small parts. See "Small parts share one upload"."""

    def new_buffers(self) -> UploadBuffers:
        """Buffers for the calling thread, which live until `finish`."""
        buffers = UploadBuffers(self.devices)
        self._buffers.append(buffers)
        return buffers

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes the side streams current in the calling thread. Several threads may enter at once."""
        with ExitStack() as stack:
            for side, device in zip(self._sides, self.devices, strict=True):
                stack.enter_context(on_stream(side, device))
            yield

    def upload_small(
        self, memory: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]], *, non_blocking: bool
    ) -> bool:
        """Copies small parts of host memory. See "Small parts share one upload".

        Args:
            memory: (count,) uint8 host memory.
            parts: first byte of each part in `memory`, and its (n,) uint8 target on one of `devices`.
            non_blocking: True if the memory is page-locked and may still be read when this returns.

        Returns:
            False if a device has no room for the upload, or a copy of each part costs less. Some targets may
            be filled then.
        """
        for device in self.devices:
            here = [part for part in parts if part[1].device == device]
            if not here:
                continue
            first, end = (
                min(start for start, _ in here),
                max(start + target.numel() for start, target in here),
            )
            if end - first > len(here) * _COPY_BYTES:
                return False
            try:
                uploaded = memory[first:end].to(device, non_blocking=non_blocking)
            except torch.OutOfMemoryError:
                return False
            sources = [uploaded[start - first :][: target.numel()] for start, target in here]
            with torch.no_grad():
                torch._foreach_copy_([target for _, target in here], sources)
        return True

    def finish(self) -> None:
        """Waits for all copies, including those of a thread that ended with an error. Drops the buffers."""
        for side in self._sides:
            side.synchronize()
        self._buffers.clear()


class UploadBuffers:
    """Two page-locked buffers of one thread, for some devices. Their owner drops them after their copies."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._memory = [memoryview(b""), memoryview(b"")]
        self._tensors = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._copied: list[list[torch.Event]] = [[], []]
        self._at = 0

    def next(self, count: int) -> memoryview:
        """Memory of `count` bytes that no copy uses. The previous memory stays valid until the next call."""
        at = self._at = 1 - self._at
        for event in self._copied[at]:
            event.synchronize()
        self._copied[at].clear()
        if len(self._memory[at]) < count:
            locked = page_locked(count)
            self._memory[at] = memoryview(bytearray(count)) if locked is None else locked
            self._tensors[at] = torch.frombuffer(self._memory[at], dtype=torch.uint8)
        return self._memory[at][:count]

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of the last `next`, and perhaps more behind it, as uint8."""
        return self._tensors[self._at]

    def enqueued(self) -> None:
        """Notes that all copies from the memory of the last `next` are on the current streams."""
        self._copied[self._at] = [
            torch.accelerator.current_stream(device).record_event() for device in self._devices
        ]
