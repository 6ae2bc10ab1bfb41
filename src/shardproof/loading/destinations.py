"""Where the bytes of chunks go: straight into host memory, or through a copy that converts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shardproof._utils.streams import CurrentStreams
from shardproof.dtypes import DTYPES
from shardproof.format import Manifest
from shardproof.geometry import row_major_strides
from shardproof.loading.block_reader import Extents
from shardproof.planning import ChunkTable, ReadPlan
from shardproof.state import is_plain_memory

__all__ = ["Destination", "Placing", "Runs", "part_of", "shaped"]


class Destination(msgspec.Struct, frozen=True, gc=False):
    """A wanted box in memory. Values are converted where its dtype differs from the stored one."""

    key: str
    dtype: str
    """torch's name of the view's."""
    view: torch.Tensor
    address: int
    """Of the view's first element, on its device."""
    is_plain: bool
    """See `shardproof.state.is_plain_memory`."""

    @staticmethod
    def of(key: str, dtype: str, view: torch.Tensor) -> Destination:
        """The destination that a view is."""
        return Destination(key, dtype, view, view.data_ptr(), is_plain_memory(view))


class Runs(NamedTuple):
    """Of each of some chunks the bytes that go into place as they are stored."""

    address: list[int]
    """Where they go; 0 where there are none."""
    begin: list[int]
    """First of them in the chunk."""
    nbytes: list[int]


class Placing:
    """The parts of a read plan, and the destinations that they are put into.

    Any thread may put parts into place, once it has entered `streams`.

    Args:
        manifest: of the checkpoint.
        table: its chunks.
        plan: its `want` is an index into `destinations`.
        destinations: where the wanted boxes go.
    """

    def __init__(
        self, manifest: Manifest, table: ChunkTable, plan: ReadPlan, destinations: Sequence[Destination]
    ) -> None:
        self._table = table
        self._plan = plan
        self._destinations = destinations
        devices = {there.view.device for there in destinations if not (there.is_plain or there.view.is_cpu)}
        self.streams = CurrentStreams(devices)
        """Of the thread that made this, for those that help it."""
        tensor, volumes = table.tensor[plan.chunk], plan.sizes.prod(axis=1)
        tensor_of = np.zeros(len(destinations), np.int64)
        tensor_of[plan.want] = tensor
        names = [manifest.tensors[row].dtype for row in tensor_of.tolist()]
        known: dict[str, torch.dtype] = {name: getattr(torch, name) for name in set(names)}
        self._dtypes = [known[name] for name in names]
        """Of what is stored, by destination."""
        sizes = {name: dtype.itemsize for name, dtype in known.items()}
        itemsizes = np.array([sizes[name] for name in names], np.int64)[plan.want]
        base = [
            there.address if there.is_plain and there.dtype == name else 0
            for there, name in zip(destinations, names, strict=True)
        ]
        elements = np.zeros(len(destinations), np.int64)
        np.add.at(elements, plan.want, volumes)
        self.overlapping = _overlapping(elements, destinations)
        """Rows of the destinations that share memory. No bytes are read straight into these: others may be
        placed there before they are hashed."""
        for row in self.overlapping:
            base[row] = 0
        into = np.array(base, np.uint64)[plan.want]
        is_run = plan.chunk_stop - plan.chunk_start == volumes
        straight = is_run & (plan.run_start >= 0) & (into != 0)
        inside = (plan.run_start * itemsizes).astype(np.uint64)
        self._address = np.where(straight, into + inside, np.uint64(0))
        """By part: where a run of the chunk goes as it is stored; 0 where it is no run, or is converted."""
        self._begin = plan.chunk_start * itemsizes
        """By part: its first byte in the chunk."""
        self._end = plan.chunk_stop * itemsizes
        """By part: the byte after its last there."""
        self._want: list[int] = plan.want.tolist()
        self.part_bytes: NDArray[np.int64] = volumes * itemsizes
        """By part: bytes, as stored."""

    def wanted(self, rows: NDArray[np.int64]) -> Extents:
        """Of chunks that have parts, the bytes from the first that one has to the last.

        Args:
            rows: (n,) of the chunk table.
        """
        if not len(rows):
            return rows, rows
        first = np.flatnonzero(np.diff(self._plan.chunk, prepend=-1))
        at = np.searchsorted(self._plan.chunk[first], rows)
        return np.minimum.reduceat(self._begin, first)[at], np.maximum.reduceat(self._end, first)[at]

    def straight(self, rows: Sequence[int]) -> Runs:
        """What goes into place as it is stored, for each row of the chunk table.

        Nothing where a chunk has several parts, or one that is no run, or is converted.
        """
        first = np.searchsorted(self._plan.chunk, rows, "left")
        alone = np.searchsorted(self._plan.chunk, rows, "right") - first == 1
        part = first[alone]
        address, begin, nbytes = np.zeros(len(first), np.uint64), *np.zeros((2, len(first)), np.int64)
        address[alone] = self._address[part]
        begin[alone], nbytes[alone] = self._begin[part], self.part_bytes[part]
        return Runs(address.tolist(), begin.tolist(), nbytes.tolist())

    def parts_of(self, rows: Sequence[int]) -> list[range]:
        """For each row of the chunk table, its parts."""
        first = np.searchsorted(self._plan.chunk, rows, "left").tolist()
        last = np.searchsorted(self._plan.chunk, rows, "right").tolist()
        return [range(one, other) for one, other in zip(first, last, strict=True)]

    def put(self, row: int, parts: range, stored: torch.Tensor, first: int = 0) -> None:
        """Puts the parts of a chunk where they belong.

        Args:
            row: of the chunk table.
            parts: of the chunk.
            stored: (count,) uint8 host memory: all bytes of the chunk, or those that have the parts.
            first: byte of the chunk that it begins with, a multiple of the item size.
        """
        if len(parts) == 1 and (address := int(self._address[parts.start])):
            begin, count = int(self._begin[parts.start]), int(self.part_bytes[parts.start])
            ctypes.memmove(address, stored.data_ptr() + begin - first, count)
            return
        if not self.is_aligned(parts, stored):
            stored = stored.clone()
        with torch.no_grad():
            for target, source in self.views(row, parts, stored, first):
                target.copy_(source)

    def is_aligned(self, parts: range, stored: torch.Tensor) -> bool:
        """Whether memory for a chunk begins at a multiple of its item size, as `views` asks for."""
        return stored.data_ptr() % self._dtypes[self._want[parts.start]].itemsize == 0

    def views(
        self, row: int, parts: range, stored: torch.Tensor, first: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each part of a chunk the view that it goes into, and the view of its memory.

        Args:
            row: of the chunk table.
            parts: of the chunk.
            stored: see `put`; its bytes need not be there yet.
            first: see `put`.
        """
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
                plan.in_want[these, :ndim].tolist(),
                plan.chunk_start[these].tolist(),
                plan.sizes[these, :ndim].tolist(),
                strict=True,
            )
        ]

    def put_part(self, part: int, stored: torch.Tensor) -> None:
        """Puts one part where it belongs.

        Args:
            part: of the plan.
            stored: (count,) uint8 host memory, the part's elements in row-major order.
        """
        view, plan = self._destinations[self._want[part]].view.detach(), self._plan
        sizes, offsets = plan.sizes[part, : view.ndim].tolist(), plan.in_want[part, : view.ndim].tolist()
        with torch.no_grad():
            source = shaped(stored, self._dtypes[self._want[part]], sizes)
            part_of(view, offsets, sizes).copy_(source)


def shaped(stored: torch.Tensor, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """Bytes as a tensor, copied only where they do not lie at a multiple of the item size."""
    if stored.data_ptr() % dtype.itemsize:
        stored = stored.clone()
    return stored.view(dtype).view(sizes)


def part_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _overlapping(elements: NDArray[np.int64], destinations: Sequence[Destination]) -> list[int]:
    """Rows of the destinations whose extents in memory touch another's.

    Addresses of two devices may coincide by chance; that costs a second read and nothing else.

    Args:
        elements: of each destination. From the plan: to ask the tensors takes longer.
        destinations: as many.
    """
    if not destinations:
        return []
    start = np.array([destination.address for destination in destinations], np.int64)
    order = np.argsort(start, kind="stable")
    start, stop = start[order], (start + _extents(elements, destinations))[order]
    furthest = np.maximum.accumulate(stop)
    touches = np.flatnonzero(start[1:] < furthest[:-1]) + 1
    holders = np.searchsorted(furthest, furthest[touches - 1])  # whose end reaches that far
    return sorted({*order[touches].tolist(), *order[holders].tolist()})


def _extents(elements: NDArray[np.int64], destinations: Sequence[Destination]) -> NDArray[np.int64]:
    """(destinations,) bytes from the first element to the end of the last."""
    itemsizes = [DTYPES[destination.dtype].itemsize for destination in destinations]
    extents = elements * np.array(itemsizes, np.int64)
    for row, destination in enumerate(destinations):
        if not destination.is_plain:
            extents[row] = _extent(destination.view)
    return extents


def _extent(view: torch.Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
    return reach * view.element_size()
