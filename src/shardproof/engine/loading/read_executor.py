"""Executes a read plan: reads ranges of files, verifies digests, and copies parts to their destinations.

A large part that is contiguous in the chunk and in a host tensor is read straight into the tensor. The rest
of its first and last block is read for the digest alone. All other parts pass through scratch memory, where
neighbouring chunks share one read. In both cases a block is hashed in the memory that it was read into,
while it is in the processor's cache.

Note: depth
    A disk or a file server idles between requests that come one after another. So if the page cache lacks
    bytes, a rank keeps several large requests in flight: `COLD_BYTES` each, `_IN_FLIGHT_BYTES` together. A
    remote storage takes longer for each request, so a rank keeps more in flight, in requests of up to
    `REQUEST_BYTES`.

Large contiguous parts for a device, and batches of smaller chunks, are read from the page cache into
page-locked memory. The device copies them during the next reads.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import TypeVar

import torch

from shardproof._utils.contexts import no_garbage_collection
from shardproof._utils.libc import address as address_of
from shardproof._utils.libc import copy_runs
from shardproof._utils.topology import processors
from shardproof.engine.format import BLOCK_BYTES
from shardproof.engine.loading.chunk_reader import COLD_BYTES, Chunks, Fetch
from shardproof.engine.loading.destinations import (
    SMALL_BYTES,
    UPLOAD_BYTES,
    DestinationWriter,
    DeviceRange,
    UploadBuffers,
    Uploads,
)
from shardproof.engine.planning import LARGE_BYTES
from shardproof.engine.storage import Storage

_MOST = 8
_LEAST_SCRATCH = 1 << 20

_Item = TypeVar("_Item")


def reading_threads() -> int:
    """Number of reads in flight: this rank's share of the processors, between 1 and 8.

    Reads from the page cache and digests keep a processor busy, so more threads than processors gain nothing.
    From a disk, the kernel reads ahead of each thread.
    """
    return max(1, min(_MOST, int(processors())))


def in_threads(
    work: Callable[[_Item], None],
    items: Sequence[_Item],
    threads: int,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Calls `work` for every item, in order. Each thread takes the next item, until a call fails.

    With one thread, the caller's thread does all work. Otherwise each thread works in a context that `within`
    makes.

    Raises:
        BaseException: `work` raised it. No call is running then, and none begins.
    """
    if threads <= 1 or len(items) <= 1:
        for item in items:
            work(item)
        return
    lock = threading.Lock()
    left = iter(items)
    stopped = False

    def run() -> None:
        nonlocal stopped
        try:
            with within():
                while not stopped:
                    with lock:
                        item = next(left, None)
                    if item is None:
                        return
                    work(item)
        except BaseException:
            stopped = True
            raise

    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="shardproof-read") as pool:
        runs = [pool.submit(run) for _ in range(min(threads, len(items)))]
        try:
            for running in runs:
                running.result()
        finally:
            stopped = True


class Scratch:
    """Scratch memory, separate for each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, count: int) -> tuple[torch.Tensor, memoryview]:
        """This thread's memory, at least `count` bytes, as a tensor and as bytes; the same at every call."""
        memory: tuple[torch.Tensor, memoryview] | None = getattr(self._local, "memory", None)
        if memory is None or len(memory[1]) < count:
            self._local.memory = memory = None  # frees the memory before more is taken
            tensor = torch.empty(max(count, _LEAST_SCRATCH), dtype=torch.uint8, device="cpu")
            memory = self._local.memory = tensor, memoryview(tensor.numpy().data)
        return memory


_BATCH_BYTES = 1 << 20
"""Bytes of one read of neighbouring chunks, unless a single chunk is larger or the storage is remote."""
_IN_FLIGHT_BYTES = 32 << 20
"""Bytes of all requests of a rank that miss the page cache."""
REQUEST_BYTES = 8 << 20
"""Bytes of one request of a remote storage, unless a chunk must be read whole."""
_REMOTE_BYTES = 64 << 20
"""Bytes of all requests of a remote storage. With 30 ms a request, eight requests in flight take 0.8 of the
time of four (benchmarks/results/2026-11-25-object-store-load.json)."""
_LEAST_REMOTE, _MOST_REMOTE = 2, 16
_REPORT_BYTES = 4 << 20
"""Bytes between two reports of progress."""


class ChunkReads:
    """Reads of chunks in shard files; see `Reads`."""

    def __init__(self, chunks: Chunks, writer: DestinationWriter) -> None:
        self._chunks = chunks
        self._writer = writer

    @property
    def nbytes(self) -> int:
        """Bytes to read, without the gaps between chunks."""
        return self._chunks.nbytes

    def run(self, *, threads: int | None, on_bytes: Callable[[int], None] | None) -> int:
        """Reads and verifies the chunks, and fills the destinations; see `Reads.run`."""
        with no_garbage_collection():
            job = _Job(self._chunks, self._writer, on_bytes)
            if threads is None:
                threads = job.choose_threads()
        try:
            with job.uploads.entered():
                in_threads(job.run, job.batches, threads, job.uploads.entered)
        finally:
            job.uploads.finish()
        job.report_rest()
        return job.read


class _Job:
    def __init__(
        self, chunks: Chunks, writer: DestinationWriter, on_bytes: Callable[[int], None] | None
    ) -> None:
        self.read = 0
        self._chunks = chunks
        self._writer = writer
        self._straight = writer.straight(chunks.rows)
        others = [
            at for at, address in enumerate(self._straight.address) if not address or at in chunks.extents
        ]
        rows = [chunks.rows[at] for at in others]
        self._parts = dict(zip(others, writer.parts_of(rows), strict=True))
        """By position, the parts of chunks that are not read straight, or not read whole."""
        # A remote storage takes long for each request, so chunks that one request can hold share it.
        least, most = (REQUEST_BYTES, REQUEST_BYTES) if chunks.is_remote else (LARGE_BYTES, _BATCH_BYTES)
        self._direct = [
            address != 0 and nbytes >= least
            for address, nbytes in zip(self._straight.address, self._straight.nbytes, strict=True)
        ]
        self.uploads = Uploads(writer.devices)
        self._device_ranges: dict[int, DeviceRange] = {}
        if self.uploads.devices:
            self._device_ranges = writer.device_ranges(chunks.rows, max(least, SMALL_BYTES))
            most = max(most, UPLOAD_BYTES)
        alone = list(self._direct)
        for at in (*chunks.extents, *self._device_ranges):
            alone[at] = True
        self.batches = chunks.batches(alone, most)
        self._on_bytes = on_bytes
        self._reported = 0
        self._lock = threading.Lock()
        self._local = threading.local()
        self._scratch = Scratch()

    def choose_threads(self) -> int:
        """Number of reads in flight; see "depth"."""
        if self._chunks.is_remote:
            longest = 1
            for batch in self.batches:
                count = self._chunks.place(batch)[-1]
                in_pieces = self._direct[batch.start] or batch.start in self._device_ranges
                longest = max(longest, min(count, REQUEST_BYTES) if in_pieces else count)
            return max(_LEAST_REMOTE, min(_MOST_REMOTE, _REMOTE_BYTES // longest))
        self._chunks.look_for_pages(self.batches)
        request = UPLOAD_BYTES if self.uploads.devices else COLD_BYTES
        return max(reading_threads(), _IN_FLIGHT_BYTES // request if self._chunks.is_cold else 1)

    def run(self, batch: range) -> None:
        """Reads one batch and verifies every digest. Copies from scratch memory follow the verification."""
        if self._chunks.place(batch)[0].is_remote:
            read = self._fetch(batch)
        elif self._direct[batch.start]:
            address, begin, nbytes = (column[batch.start] for column in self._straight)
            run = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            read = self._chunks.read_run(batch.start, begin, run, self._scratch.take(BLOCK_BYTES)[1])
        elif batch.start in self._device_ranges:
            read = self._upload(batch.start, UPLOAD_BYTES, self._read_to_buffer)
        elif batch.start in self._chunks.extents:
            first, end = self._chunks.extents[batch.start]
            scratch, memory = self._scratch.take(end - first + BLOCK_BYTES)
            part, spare = memory[: end - first], memory[end - first :]
            read = self._chunks.read_run(batch.start, first, part, spare)
            self._writer.put(
                self._chunks.rows[batch.start], self._parts[batch.start], scratch[: end - first], first
            )
        else:
            read = self._read_through_scratch(batch)
        with self._lock:
            self.read += read
            due = self.read - self._reported >= _REPORT_BYTES
        if due:
            self.report_rest()

    def report_rest(self) -> None:
        """Reports the bytes read since the last report."""
        with self._lock:
            since, self._reported = self.read - self._reported, self.read
        if since and self._on_bytes is not None:
            self._on_bytes(since)

    def _fetch(self, batch: range) -> int:
        """Reads and verifies one batch of a remote storage, and fills its destinations."""
        chunks, at = self._chunks, batch.start
        if self._direct[at]:
            address, begin, nbytes = (column[at] for column in self._straight)
            read = 0
            for first, piece in chunks.pieces(at, REQUEST_BYTES, _request):
                low, high = max(first, begin), min(first + len(piece), begin + nbytes)
                if low < high:
                    ctypes.memmove(address + low - begin, address_of(piece) + low - first, high - low)
                read += len(piece)
            return read
        if at in self._device_ranges:
            return self._upload(at, REQUEST_BYTES, _request)
        if at in chunks.extents:
            ((first, piece),) = list(chunks.pieces(at, chunks.count[at], _request))
            low, high = chunks.extents[at]
            stored = _tensor_of(piece)[low - first : high - first]
            self._writer.put(chunks.rows[at], self._parts[at], stored, low)
            return len(piece)
        span = _request(*chunks.place(batch))
        chunks.read(batch, span, is_filled=True)
        self._place(batch, _tensor_of(span))
        return len(span)

    def _upload(self, at: int, request: int, fetch: Fetch) -> int:
        """Reads a chunk in pieces of `request` bytes, and copies the pieces to a device.

        With `_read_to_buffer` as `fetch`, the next pieces are read during the copy.
        """
        target, begin = self._device_ranges[at]
        end, read = begin + target.numel(), 0
        buffers = self._buffers() if fetch == self._read_to_buffer else None
        for first, piece in self._chunks.pieces(at, request, fetch):
            read += len(piece)
            low, high = max(first, begin), min(first + len(piece), end)
            if low >= high:
                continue
            source = _tensor_of(piece) if buffers is None else buffers.tensor
            target[low - begin : high - begin].copy_(
                source[low - first : high - first], non_blocking=buffers is not None
            )
            if buffers is not None:
                buffers.enqueued()
        return read

    def _read_to_buffer(self, storage: Storage, name: str, start: int, count: int) -> memoryview:
        memory = self._buffers().next(count)
        storage.read_into(name, start, memory)
        return memory

    def _buffers(self) -> UploadBuffers:
        buffers: UploadBuffers | None = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = self.uploads.new_buffers()
        return buffers

    def _read_through_scratch(self, batch: range) -> int:
        span = self._chunks.span(batch)
        if self.uploads.devices and span <= UPLOAD_BYTES:
            buffers = self._buffers()
            memory = buffers.next(span)
            read = self._chunks.read(batch, memory)
            self._place(batch, buffers.tensor[:span], non_blocking=True)
            buffers.enqueued()
            return read
        scratch, memory = self._scratch.take(span)
        read = self._chunks.read(batch, memory[:span])
        self._place(batch, scratch[:span])
        return read

    def _place(self, batch: range, scratch: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Fills the destinations of neighbouring chunks from memory that begins with the first of them.

        With `non_blocking`, the memory is page-locked, and not reused before its copies are done.
        """
        address, base = scratch.data_ptr(), self._chunks.start[batch.start]
        starts, counts = self._chunks.start, self._chunks.count
        these = slice(batch.start, batch.stop)
        into, begin, nbytes = (column[these] for column in self._straight)
        within = address - base
        out_of = [within + start + first for start, first in zip(starts[these], begin, strict=True)]
        copy_runs(*([*compress(column, into)] for column in (into, out_of, nbytes)))
        if 0 in into:
            rest = [at for at, straight in zip(batch, into, strict=True) if not straight]
            with self.uploads.one_at_a_time if self.uploads.devices else nullcontext():
                for at in self._upload_small(batch, rest, scratch, non_blocking):
                    stored = scratch[starts[at] - base :][: counts[at]]
                    self._writer.put(
                        self._chunks.rows[at], self._parts[at], stored, non_blocking=non_blocking
                    )

    def _upload_small(
        self, batch: range, wanted: list[int], memory: torch.Tensor, non_blocking: bool
    ) -> list[int]:
        """Uploads together the wanted chunks that go unchanged to contiguous memory of a device.

        Returns the other positions. The memory begins with the first chunk of the batch.
        """
        if not self.uploads.devices:
            return wanted
        found = self._writer.device_ranges([self._chunks.rows[at] for at in wanted], 0)
        starts, base = self._chunks.start, self._chunks.start[batch.start]
        parts = [(starts[wanted[at]] - base + one.begin, one.target) for at, one in found.items()]
        if not self.uploads.upload_small(memory, parts, non_blocking=non_blocking):
            return wanted
        return [at for number, at in enumerate(wanted) if number not in found]


def _request(storage: Storage, name: str, start: int, count: int) -> memoryview:
    """Reads a range of a remote storage."""
    return storage.read_buffer(name, start, count)


def _tensor_of(memory: memoryview) -> torch.Tensor:
    """The same memory as a tensor, which nothing writes to. torch warns of memory that is read-only."""
    view = (ctypes.c_char * len(memory)).from_address(address_of(memory))
    return torch.frombuffer(view, dtype=torch.uint8)
