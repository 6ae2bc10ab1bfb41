"""Checkpoints of other projects as a `Checkpoint`: planned as any other, read through their descriptions."""

from __future__ import annotations

import ctypes
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.errors import PlainDataError, StorageError
from shardproof.format import TensorRecord
from shardproof.geometry import row_major_strides, row_pointers
from shardproof.interop import Extent, FormatReader, StoredBox, StoredView, opaque_names
from shardproof.loading.checkpoint import Checkpoint, Reads
from shardproof.loading.cold_reads import Cold
from shardproof.loading.destinations import DestinationWriter
from shardproof.loading.threads import in_threads
from shardproof.planning import ChunkTable
from shardproof.state import encode_plain

__all__ = ["ForeignCheckpoint"]

_WHOLE_BYTES = 64 << 20
"""A seekable extent that is larger is not read whole for a part of it. It bounds the memory of a read."""
_UNTRUSTED = (
    "exclude= (--exclude) leaves the key out. With trust_pickle=True (--trust-pickle), torch unpickles the "
    "value, which may run code of the checkpoint. The result has to be plain data: register enums and "
    "dataclasses first (sp.register_enum, sp.register_dataclass; --register MODULE.CLASS)"
)
_TRUSTED = (
    "torch unpickled the value, and only plain data can be read. Register enums and dataclasses "
    "(sp.register_enum, sp.register_dataclass; --register MODULE.CLASS). Of other classes, leave the key out "
    "with exclude= (--exclude), and read it with torch.load"
)


class ForeignCheckpoint(Checkpoint):
    """A checkpoint of another project.

    Args:
        reader: describes it.
        trust_pickle: True to unpickle plain values with torch. That may run code of the checkpoint.
    """

    tiling_advice = (
        "A file of the checkpoint or of its metadata is damaged or missing, or its writer lost data: restore "
        "another step"
    )

    def __init__(self, reader: FormatReader, *, trust_pickle: bool = False) -> None:
        self.reader = reader
        self.location = reader.location
        self.attempt, self.step, self.world_size = reader.identity, reader.step, reader.world_size
        self.aliases = reader.aliases
        self.tensors = [TensorRecord(key, item.dtype, item.shape) for key, item in reader.tensors.items()]
        self.boxes: list[StoredBox] = [box for item in reader.tensors.values() for box in item.boxes]
        """The stored box of each row of the chunk table."""
        self.files = list(dict.fromkeys(box.file for box in self.boxes))
        """Names of the files that hold tensors; the chunk table refers to them by row."""
        self.table = _table(reader, self.files)
        self.objects = _Objects(reader, trust_pickle)
        self.proved: set[Extent] = set()
        """Extents whose checksum was compared with all their bytes."""
        self._files = reader.files()
        self._sized: set[str] = set()
        self._index()

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer stored beside the tensors, where the format has a place for it."""
        return self.reader.user_metadata

    def close(self) -> None:
        """Closes the files that reading opened."""
        self.reader.close()

    def check_files(self, rows: NDArray[np.int64] | None = None) -> None:
        """Checks that files exist, with the size that the format records; see `Checkpoint.check_files`."""
        sizes = self._files
        needed = sizes.keys() if rows is None else {self.boxes[row].file for row in rows.tolist()}
        for name in sorted(needed - self._sized):
            found, expected = self.reader.storage.size(name), sizes.get(name)
            if found is None:
                raise self.reader.missing(name)
            path = f"{self.reader.storage.location}/{name}"
            if expected is not None and found != expected:
                raise StorageError(
                    f"{path} has {found} bytes, expected {expected}: it was cut or replaced. Restore it from "
                    "a copy",
                    file=path,
                    missing=False,
                )
            self._sized.add(name)

    def reads(self, writer: DestinationWriter, rows: NDArray[np.int64]) -> Reads:
        """Plans to read some boxes; see `Checkpoint.reads`."""
        return _BoxReads(self, writer, rows)


def _table(reader: FormatReader, names: Sequence[str]) -> ChunkTable:
    """The stored boxes as a chunk table. Its bytes are those of the elements, not those in the file."""
    descriptions = list(reader.tensors.values())
    boxes = [box for item in descriptions for box in item.boxes]
    counts = [len(item.boxes) for item in descriptions]
    files = {name: at for at, name in enumerate(names)}
    itemsizes = [DTYPES[item.dtype].itemsize for item in descriptions for _ in item.boxes]
    return ChunkTable(
        np.repeat(np.arange(len(descriptions)), counts),
        np.array([files[box.file] for box in boxes], np.int64),
        np.array([box.start for box in boxes], np.int64),
        np.array([prod(box.sizes) * size for box, size in zip(boxes, itemsizes, strict=True)], np.int64),
        np.zeros((len(boxes), 2), np.uint64),
        row_pointers([len(box.sizes) for box in boxes]),
        np.array([at for box in boxes for at in box.offsets], np.int64),
        np.array([size for box in boxes for size in box.sizes], np.int64),
    )


class _Objects(Mapping[str, Any]):
    """The plain values of a foreign checkpoint, encoded; each is read when it is asked for."""

    def __init__(self, reader: FormatReader, trust_pickle: bool) -> None:
        self._reader = reader
        self._trust_pickle = trust_pickle
        self._keys = dict.fromkeys(reader.object_keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        value = self._reader.object(key, trust_pickle=self._trust_pickle)
        try:
            if names := opaque_names(value):
                raise PlainDataError(f"{key}: {', '.join(names[:5])} cannot be read as plain data", path=key)
            return encode_plain(value, key)
        except PlainDataError as error:
            advice = _TRUSTED if self._trust_pickle else _UNTRUSTED
            raise PlainDataError(
                f"{self._reader.location}: {error.message}. {advice}", **error.details
            ) from error


class _BoxReads:
    """Reads of stored boxes, one extent at a time; see `Reads`."""

    def __init__(
        self, checkpoint: ForeignCheckpoint, writer: DestinationWriter, rows: NDArray[np.int64]
    ) -> None:
        self._boxes = checkpoint.boxes
        self._proved = checkpoint.proved
        self._tensors = checkpoint.tensors
        self._tensor_of = checkpoint.table.tensor
        self._writer = writer
        where = operator.attrgetter("file", "start", "nbytes")
        ordered = sorted(rows.tolist(), key=lambda row: where(self._boxes[row]))
        self._groups = [list(group) for _, group in groupby(ordered, key=lambda row: where(self._boxes[row]))]
        """Rows of boxes that one range of a file holds."""
        self._lock = threading.Lock()
        self._local = threading.local()
        self._moved: Callable[[int], None] | None = None
        self._read = 0

    @property
    def nbytes(self) -> int:
        """Bytes to read, at most."""
        return sum(self._boxes[group[0]].nbytes for group in self._groups)

    def run(self, *, threads: int, moved: Callable[[int], None] | None, cold: Cold) -> int:
        """Reads all; see `Reads.run`. Bytes go through the page cache."""
        self._moved = moved
        in_threads(self._read_group, self._groups, threads, self._writer.streams.entered)
        return self._read

    def _read_group(self, rows: Sequence[int]) -> None:
        views = [(row, self._boxes[row].located()) for row in rows]
        for extent in dict.fromkeys(view.extent for _, view in views):
            inside = [(row, view) for row, view in views if view.extent == extent]
            read = self._read_extent(extent, inside)
            with self._lock:
                self._read += read
            if self._moved is not None:
                self._moved(read)

    def _read_extent(self, extent: Extent, views: Sequence[tuple[int, StoredView]]) -> int:
        if len(views) == 1 and self._read_straight(extent, *views[0]):
            return extent.stored_bytes
        spans = [self._span(row, view, extent) for row, view in views]
        wanted = sum(end - begin for begin, end in spans)
        if extent.is_seekable and (extent.nbytes > _WHOLE_BYTES or 2 * wanted <= extent.nbytes):
            return self._read_ranges(extent, views, spans)
        memory = self._scratch(extent.nbytes)
        extent.read_into(memoryview(memory.numpy().data)[: extent.nbytes])
        self._note_proved(extent)
        for row, view in views:
            self._put(row, view, memory, 0)
        return extent.stored_bytes

    def _read_straight(self, extent: Extent, row: int, view: StoredView) -> bool:
        """Reads an extent into its destination, if the only box is all of it and the destination is dense."""
        address, begin, count = (column[0] for column in self._writer.straight([row]))
        if not address or begin or view.offset or count != extent.nbytes or not self._is_dense(row, view):
            return False
        extent.read_into(memoryview((ctypes.c_char * count).from_address(address)).cast("B"))
        return True

    def _read_ranges(
        self, extent: Extent, views: Sequence[tuple[int, StoredView]], spans: Sequence[tuple[int, int]]
    ) -> int:
        """Reads the parts of an extent that are wanted. The whole extent is verified once before."""
        read = 0
        if extent.has_checksum and extent not in self._proved:
            extent.verify()
            read += extent.stored_bytes
            self._note_proved(extent)
        for (row, view), (begin, end) in zip(views, spans, strict=True):
            memory = self._scratch(end - begin)
            extent.read_range(begin, memoryview(memory.numpy().data)[: end - begin])
            self._put(row, view, memory, begin)
            read += end - begin
        return read

    def _dtype(self, row: int) -> str:
        dtype: str = self._tensors[self._tensor_of[row]].dtype
        return dtype

    def _note_proved(self, extent: Extent) -> None:
        if extent.has_checksum:
            self._proved.add(extent)

    def _is_dense(self, row: int, view: StoredView) -> bool:
        return view.stride == tuple(row_major_strides(self._boxes[row].sizes))

    def _span(self, row: int, view: StoredView, extent: Extent) -> tuple[int, int]:
        """First byte of the extent that the parts of a box need, and the end of the last."""
        itemsize, sizes = DTYPES[self._dtype(row)].itemsize, self._boxes[row].sizes
        if self._is_dense(row, view):
            begin, end = (int(column[0]) for column in self._writer.wanted(np.array([row])))
            return view.offset * itemsize + begin, view.offset * itemsize + end
        last = view.offset + sum((size - 1) * step for size, step in zip(sizes, view.stride, strict=True))
        return view.offset * itemsize, (last + 1) * itemsize

    def _put(self, row: int, view: StoredView, memory: torch.Tensor, begin: int) -> None:
        """Fills the destinations of a box from memory that begins with byte `begin` of the extent."""
        (parts,) = self._writer.parts_of([row])
        name = self._dtype(row)
        itemsize, sizes = DTYPES[name].itemsize, self._boxes[row].sizes
        first = view.offset * itemsize
        if self._is_dense(row, view):
            skipped = max(begin - first, 0)
            stored = memory[max(first - begin, 0) :][: prod(sizes) * itemsize - skipped]
            self._writer.put(row, parts, stored, skipped)
            return
        whole = memory[: len(memory) // itemsize * itemsize].view(getattr(torch, name))
        strided = whole.as_strided(sizes, view.stride, view.offset - begin // itemsize)
        dense = strided.clone(
            memory_format=torch.contiguous_format
        )  # `contiguous` keeps odd strides of size 1
        self._writer.put(row, parts, dense.reshape(-1).view(torch.uint8), 0)

    def _scratch(self, count: int) -> torch.Tensor:
        """This thread's scratch memory, at least `count` bytes."""
        scratch: torch.Tensor | None = getattr(self._local, "scratch", None)
        if scratch is None or len(scratch) < count:
            self._local.scratch = None  # frees the memory before more is taken
            scratch = self._local.scratch = torch.empty(max(count, 1 << 20), dtype=torch.uint8, device="cpu")
        return scratch
