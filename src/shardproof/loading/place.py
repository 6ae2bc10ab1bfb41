"""Executing a read plan: ranges of files into memory, digests checked, parts put where they belong.

A large chunk that lands in one run of a contiguous host tensor is read straight into it. All others pass
through a
scratch buffer, where neighbouring chunks share one read. Either way a chunk is hashed where it was read.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from shardproof.errors import CorruptChunkError
from shardproof.format import Manifest
from shardproof.planning import ChunkTable, ReadPlan
from shardproof.state import is_plain_memory
from shardproof.storage import Storage

__all__ = ["Destination", "read_planned"]

_DIRECT_BYTES = 256 << 10
"""Chunks from here on are read straight into place; below, one read for many chunks is cheaper."""
_BATCH_BYTES = 8 << 20
"""Bytes of one read of neighbouring chunks, unless a single chunk is larger."""
_SPAN = 256 << 10
"""Bytes read, then hashed while they are still in the processor's cache."""


class Destination(NamedTuple):
    """A wanted box in memory. Values are converted where its dtype differs from the stored one."""

    key: str
    view: torch.Tensor


def read_planned(
    storage: Storage,
    manifest: Manifest,
    table: ChunkTable,
    plan: ReadPlan,
    destinations: Sequence[Destination],
    *,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Reads, verifies and places all parts of a plan.

    Args:
        storage: of the checkpoint.
        manifest: of the checkpoint.
        table: its chunks.
        plan: from `plan_reads`; its `want` is an index into `destinations`.
        destinations: where the wanted boxes go.
        threads: reads in flight.
        progress: called with bytes done and bytes in all.

    Returns:
        Bytes read, all of them verified.

    Raises:
        CorruptChunkError: bytes do not match their digest; destinations may be partly written.
        StorageError: a file is missing, short or unreadable.
    """
    job = _Job(storage, manifest, table, plan, destinations, progress)
    batches = job.batches()
    if threads <= 1 or len(batches) <= 1:
        for batch in batches:
            job.run(batch)
        return job.done
    with ThreadPoolExecutor(threads, thread_name_prefix="shardproof-read") as pool:
        runs = [pool.submit(job.run, batch) for batch in batches]
        try:
            for run in runs:
                run.result()
        finally:
            for run in runs:
                run.cancel()
    return job.done


class _Job:
    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        table: ChunkTable,
        plan: ReadPlan,
        destinations: Sequence[Destination],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.done = 0
        self._storage = storage
        self._manifest = manifest
        self._plan = plan
        self._destinations = destinations
        self._progress = progress
        self._lock = threading.Lock()
        self._local = threading.local()
        rows, first = np.unique(plan.chunk, return_index=True)
        order = np.lexsort((table.byte_start[rows], table.file[rows]))
        self._rows = rows[order]
        self._first = first[order].tolist()
        self._last = np.append(first[1:], len(plan.chunk))[order].tolist()
        self._file = table.file[self._rows].tolist()
        self._start = table.byte_start[self._rows].tolist()
        self._count = table.byte_count[self._rows].tolist()
        self._tensor = table.tensor[self._rows].tolist()
        self._digest = _digest_bytes(table.digest[self._rows])
        self._table = table
        self._whole = plan.whole.tolist()
        self._run_start = plan.run_start.tolist()
        self._want = plan.want.tolist()
        self._dtypes = [getattr(torch, record.dtype) for record in manifest.tensors]
        self._address = [
            view.data_ptr() if is_plain_memory(view) and view.dtype == stored else 0
            for view, stored in zip(
                (destination.view for destination in destinations), self._stored_dtypes(), strict=True
            )
        ]
        self.total = sum(self._count)

    def _stored_dtypes(self) -> list[torch.dtype]:
        """The stored dtype of each destination's tensor; unread destinations have no bytes."""
        stored: list[torch.dtype] = [torch.uint8] * len(self._destinations)
        for row, chunk in zip(self._want, self._table.tensor[self._plan.chunk].tolist(), strict=True):
            stored[row] = self._dtypes[chunk]
        return stored

    def batches(self) -> list[range]:
        """Chunks (positions in file order) that are read together: direct ones alone, neighbours as one."""
        batches: list[range] = []
        begin = 0
        for at in range(len(self._file)):
            joins = (
                at > begin
                and self._file[at] == self._file[at - 1]
                and self._start[at] == self._start[at - 1] + self._count[at - 1]
                and self._start[at] + self._count[at] - self._start[begin] <= _BATCH_BYTES
                and not self._is_direct(at)
                and not self._is_direct(at - 1)
            )
            if at > begin and not joins:
                batches.append(range(begin, at))
                begin = at
        if self._file:
            batches.append(range(begin, len(self._file)))
        return batches

    def run(self, batch: range) -> None:
        """Reads one batch, checks every digest, and only then places it."""
        if len(batch) == 1 and self._is_direct(batch[0]):
            self._read_direct(batch[0])
        else:
            self._read_through_scratch(batch)
        with self._lock:
            self.done += sum(self._count[batch.start : batch.stop])
            done = self.done
        if self._progress is not None:
            self._progress(done, self.total)

    def _is_direct(self, at: int) -> bool:
        part = self._first[at]
        return bool(
            self._count[at] >= _DIRECT_BYTES
            and self._last[at] == part + 1
            and self._whole[part]
            and self._run_start[part] >= 0
            and self._address[self._want[part]] != 0
        )

    def _read_direct(self, at: int) -> None:
        part = self._first[at]
        itemsize = self._dtypes[self._tensor[at]].itemsize
        address = self._address[self._want[part]] + self._run_start[part] * itemsize
        count, start, name = self._count[at], self._start[at], self._manifest.files[self._file[at]].name
        memory = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
        hasher = xxhash.xxh3_128()
        for done in range(0, count, _SPAN):
            span = memory[done : done + _SPAN]
            self._storage.read_into(name, start + done, span)
            hasher.update(span)
        self._check(at, hasher.digest())

    def _read_through_scratch(self, batch: range) -> None:
        start = self._start[batch.start]
        end = self._start[batch.stop - 1] + self._count[batch.stop - 1]
        scratch = self._scratch(end - start)
        memory = memoryview(scratch.numpy().data)[: end - start]
        name = self._manifest.files[self._file[batch.start]].name
        self._storage.read_into(name, start, memory)
        base = scratch.data_ptr()
        digest_of = xxhash.xxh3_128_digest
        memmove = ctypes.memmove
        strided = []
        for at in batch:
            offset, count = self._start[at] - start, self._count[at]
            self._check(at, digest_of(memory[offset : offset + count]))
            for part in range(self._first[at], self._last[at]):
                target = self._address[self._want[part]]
                if target and self._whole[part] and self._run_start[part] >= 0:
                    itemsize = self._dtypes[self._tensor[at]].itemsize
                    memmove(target + self._run_start[part] * itemsize, base + offset, count)
                else:
                    strided.append((at, part, scratch[offset : offset + count]))
        for at, part, stored in strided:
            self._place(at, part, stored)

    def _scratch(self, count: int) -> torch.Tensor:
        """This thread's scratch memory, grown when a chunk needs more."""
        held: torch.Tensor | None = getattr(self._local, "scratch", None)
        if held is None or held.numel() < count:
            held = torch.empty(max(count, min(_BATCH_BYTES, self.total)), dtype=torch.uint8)
            self._local.scratch = held
        return held

    def _place(self, at: int, part: int, stored: torch.Tensor) -> None:
        """Copies the part of a chunk that a wanted box shares, converting layout, dtype and device."""
        row = self._rows[at]
        sizes = self._table.box_sizes[self._table.box_start[row] : self._table.box_start[row + 1]].tolist()
        dtype = self._dtypes[self._tensor[at]]
        if stored.storage_offset() % dtype.itemsize:
            stored = stored.clone()
        source = stored.view(dtype).view(sizes)
        target = self._destinations[self._want[part]].view
        extents = self._plan.sizes[part].tolist()
        for dim, (inside, to, extent) in enumerate(
            zip(
                self._plan.in_chunk[part].tolist()[: len(sizes)],
                self._plan.in_want[part].tolist()[: len(sizes)],
                extents[: len(sizes)],
                strict=True,
            )
        ):
            source = source.narrow(dim, inside, extent)
            target = target.narrow(dim, to, extent)
        with torch.no_grad():
            target.copy_(source)

    def _check(self, at: int, found: bytes) -> None:
        expected = self._digest[at]
        if found != expected:
            raise corrupt_chunk(
                self._manifest,
                self._file[at],
                self._tensor[at],
                self._start[at],
                self._count[at],
                expected.hex(),
                found.hex(),
            )


def corrupt_chunk(
    manifest: Manifest, file: int, tensor: int, byte_start: int, byte_count: int, expected: str, found: str
) -> CorruptChunkError:
    """The error for bytes that do not match their digest."""
    key, name = manifest.tensors[tensor].key, manifest.files[file].name
    return CorruptChunkError(
        f"{name}: bytes {byte_start} to {byte_start + byte_count} of tensor {key!r} have digest {found}, "
        f"expected "
        f"{expected}: they changed after they were written. Restore an older step; `shardproof verify` "
        f"lists all damage",
        file=name,
        key=key,
        byte_start=byte_start,
        byte_count=byte_count,
    )


def _digest_bytes(digest: NDArray[np.uint64]) -> list[bytes]:
    raw = digest.astype(">u8").tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]
