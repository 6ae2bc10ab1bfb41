"""Detects writes by other code to memory that only an optimizer's step may write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof._utils.libc import read_words
from shardproof.engine.saving.staging import DeviceCopies
from shardproof.engine.state import Piece, Stepped, memory_of, storage_owner

_VERSION = attrgetter("_version")


class WriteWatch:
    """Finds the pieces that only an optimizer's step writes, and detects writes to them by other code.

    A piece is *fenced* if an optimizer steps its storage and all writers of that storage are known:

    - A stepped tensor, or its declared owner, covers the whole storage. A parameter that is a part of another
      buffer is not fenced: torch counts a write to the buffer on the buffer.
    - torch allocated the memory, and no numpy array, other library or other process shares it.
    - All tensors that are stepped there have version counters. Tensors made in inference mode have none.
    - The optimizer calls its hooks. A ``capturable`` step may be replayed without them.

    Version counters show the writes of torch's operations. A `MemorySample` shows most others.

    Args:
        pieces: pieces of this rank.
        stepped: the optimizers of the state, with the tensors that they write.

    >>> weight = torch.ones(2)
    >>> piece = Piece.of(weight.detach(), (0,), (2,))
    >>> optimizer = torch.optim.SGD([weight])
    >>> watch = WriteWatch([piece], [Stepped(optimizer, (weight,), (weight,))])
    >>> watch.is_fenced(0), watch.changed_piece({})
    (True, None)
    >>> _ = weight.zero_()
    >>> watch.changed_piece({})
    0
    """

    def __init__(self, pieces: Sequence[Piece], stepped: Iterable[Stepped]) -> None:
        hooked = [
            item
            for item in stepped
            if not any(group.get("capturable") for group in item.optimizer.param_groups)
        ]
        views = [piece.view for piece in pieces]
        starts = memory_of(views) if hooked else []
        # Subclasses such as DTensor do not override these calls. Without their dispatch the calls take half
        # the time.
        with torch._C.DisableTorchFunctionSubclass():
            counted, counted_starts, watched = _counted(hooked)
            self._rows = [
                row for row, start in enumerate(starts) if start in watched and not views[row].is_inference()
            ]
            """Rows of the fenced pieces."""
            self._starts = [starts[row] for row in self._rows] + counted_starts
            """Address of the storage of each tensor in `_counted`."""
            self._counted = [views[row] for row in self._rows] + counted
            self._versions = list(map(_VERSION, self._counted))
        self._fenced = frozenset(self._rows)
        fenced = [pieces[row] for row in self._rows]
        self._sample = MemorySample(fenced, [piece.view.data_ptr() for piece in fenced])

    def __bool__(self) -> bool:
        """True if a piece is fenced."""
        return bool(self._rows)

    def is_fenced(self, row: int) -> bool:
        """True if only an optimizer's step writes to a piece."""
        return row in self._fenced

    def changed_piece(self, copies: Mapping[torch.device, DeviceCopies]) -> int | None:
        """The row of a fenced piece that other code wrote to; None if there is none."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = list(map(_VERSION, self._counted))
        if versions != self._versions:
            pairs = enumerate(zip(versions, self._versions, strict=True))
            first = next(at for at, (now, before) in pairs if now != before)
            return self._rows[self._starts.index(self._starts[first]) if first >= len(self._rows) else first]
        changed = self._sample.changed(copies)
        return self._rows[changed[0]] if changed else None


def _counted(stepped: Sequence[Stepped]) -> tuple[list[torch.Tensor], list[int], frozenset[int]]:
    """The tensors whose version counters show writes, and the storages whose writers are all known.

    Returns:
        The tensors; the address of the storage of each; the addresses of the storages with known writers.
    """
    tensors, starts, watched, uncounted = list[torch.Tensor](), list[int](), set[int](), set[int]()
    for item in stepped:
        for tensor, start in _writers(item):
            if tensor.is_inference():
                uncounted.add(start)
            else:
                tensors.append(tensor)
                starts.append(start)
        watched |= _covered(item)
    watched -= uncounted
    known = [at for at, start in enumerate(starts) if start in watched]
    return [tensors[at] for at in known], [starts[at] for at in known], frozenset(watched)


def _writers(stepped: Stepped) -> Iterator[tuple[torch.Tensor, int]]:
    """Each tensor through which an operation can write stepped memory, and the address of its storage."""
    for tensor, local, start in zip(stepped.tensors, stepped.local_tensors, stepped.starts, strict=True):
        if start:
            yield local, start
            if tensor is not local:  # an operation on a DTensor raises only the version of the DTensor
                yield tensor, start
            if (owner := storage_owner(tensor)) is not None:
                yield owner, start


def _covered(stepped: Stepped) -> set[int]:
    """Addresses of the storages that one tensor covers and only torch owns."""
    rows = [row for row, start in enumerate(stepped.starts) if start]
    local = [stepped.local_tensors[row] for row in rows]
    storages = list(map(torch.Tensor.untyped_storage, local))
    sizes = list(map(torch.UntypedStorage.nbytes, storages))
    resizable = map(torch.UntypedStorage.resizable, storages)
    shared = map(torch.UntypedStorage.is_shared, storages)
    covered = set[int]()
    for row, tensor, size, own, is_shared in zip(rows, local, sizes, resizable, shared, strict=True):
        if not own or (is_shared and tensor.is_cpu):
            continue
        start, nbytes = stepped.starts[row], tensor.nbytes
        if nbytes != size and (owner := storage_owner(stepped.tensors[row])) is not None:
            nbytes = owner.nbytes if memory_of([owner]) == [start] else 0
        if nbytes == size:
            covered.add(start)
    return covered


_WORDS = 4
"""Samples of a tensor: words of 8 bytes in contiguous host memory, elements in other memory."""

_NBYTES = attrgetter("nbytes")
_Ints = NDArray[np.int64]


class MemorySample:
    """Samples of the memory of n pieces, from the time of construction: four words of each.

    torch does not count writes through ``.data``, through another tensor of the same storage, from numpy,
    from another process, or by a replayed CUDA graph. Most of these writes change a word of the sample. The
    samples have equal distances, from the first byte of a piece to its last. A write that misses all
    samples is not detected, for example a write to a few rows of an embedding.

    >>> one, two = torch.zeros(100), torch.zeros(100)
    >>> pieces = [Piece.of(tensor, (0,), (100,)) for tensor in (one, two)]
    >>> sample = MemorySample(pieces, [piece.address for piece in pieces])
    >>> sample.changed({})
    []
    >>> _ = two.data.add_(1)
    >>> sample.changed({})
    [1]
    """

    def __init__(self, pieces: Sequence[Piece], pointers: Sequence[int]) -> None:
        rows = range(len(pieces))
        scattered = [row for row in rows if not pieces[row].is_plain]
        on_device = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
        for row in scattered:
            if not (view := pieces[row].view).is_cpu:
                on_device[view.device, view.dtype].append(row)
        self._device = [_DeviceSample.of(of_kind, pieces) for of_kind in on_device.values()]
        host = [row for row in rows if pieces[row].view.is_cpu] if on_device else rows
        self._host = _HostSample([pieces[row] for row in host], [pointers[row] for row in host])
        self._host_rows = np.array(host, np.int64)

    def changed(self, copies: Mapping[torch.device, DeviceCopies]) -> list[int]:
        """Reads the samples again. Returns the rows of the pieces that differ, ascending."""
        rows = self._host_rows[self._host.changed()].tolist()
        for sample in self._device:
            rows += sample.changed(copies[sample.parts[0].device])
        return sorted(rows)


class _HostSample:
    """Samples of tensors in host memory."""

    def __init__(self, pieces: Sequence[Piece], pointers: Sequence[int]) -> None:
        self._views = views = [piece.view for piece in pieces]
        self._pointers = pointers
        starts = np.array(pointers, np.int64)
        stops = starts + np.fromiter(map(_NBYTES, views), np.int64, len(views))
        row = np.arange(len(views))
        scattered = np.flatnonzero([not piece.is_plain for piece in pieces])
        if len(scattered):
            starts, stops, row = _with_elements(views, starts, stops, scattered)
        self._row = row
        """(m,) row of the piece of each byte range."""
        first, last = starts & ~7, (stops - 1) & ~7
        self._addresses = np.linspace(first, last, _WORDS, axis=1, dtype=np.int64) & ~7
        """(m, _WORDS) addresses of the sampled words."""
        self._partial = np.flatnonzero((starts | stops) & 7)
        """The ranges whose first or last word is only partly in the tensor."""
        self._mask = _mask(self._addresses[self._partial], starts[self._partial], stops[self._partial])
        """Masks for the words of these ranges: the bits that belong to the tensor."""
        self._words = self._read()

    def changed(self) -> NDArray[np.bool_]:
        """(n,) True for each piece whose address or sampled words differ.

        If an address differs, no words are read.
        """
        pointers = list(map(torch.Tensor.data_ptr, self._views))
        moved: NDArray[np.bool_] = np.array(pointers, np.int64) != np.array(self._pointers, np.int64)
        if not moved.any():  # memory of a moved tensor may be freed
            differ = np.any(self._read() != self._words, axis=1)
            moved[self._row[differ]] = True
        return moved

    def _read(self) -> NDArray[np.uint64]:
        words = read_words(self._addresses)
        words[self._partial] &= self._mask
        return words


def _mask(addresses: _Ints, starts: _Ints, stops: _Ints) -> NDArray[np.uint64]:
    """Masks of the bytes in [start, stop) of little-endian words."""
    ones = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
    before = np.clip(starts[:, None] - addresses, 0, 8).astype(np.uint64) * np.uint64(8)
    behind = np.clip(addresses + 8 - stops[:, None], 0, 8).astype(np.uint64) * np.uint64(8)
    mask: NDArray[np.uint64] = (ones << before) & (ones >> behind)
    return mask


def _with_elements(
    views: Sequence[torch.Tensor], starts: _Ints, stops: _Ints, scattered: _Ints
) -> tuple[_Ints, _Ints, _Ints]:
    """Byte ranges; a scattered tensor has one range for each of its sampled elements."""
    single = np.ones(len(views), bool)
    single[scattered] = False
    begins, sizes, rows = [starts[single]], [(stops - starts)[single]], [np.flatnonzero(single)]
    for row in scattered.tolist():
        view = views[row]
        count, step = _diagonal(view)
        at = starts[row] + np.arange(count) * step * view.element_size()
        begins.append(at)
        sizes.append(np.full(count, view.element_size()))
        rows.append(np.full(count, row))
    starts = np.concatenate(begins)
    return starts, starts + np.concatenate(sizes), np.concatenate(rows)


def _diagonal(view: torch.Tensor) -> tuple[int, int]:
    """The number of elements to sample and their distance in memory, in elements.

    The samples lie on a diagonal of the box, so they are within the tensor for any strides.
    """
    count = min(_WORDS, max(view.shape, default=1))
    between = max(count - 1, 1)
    steps = zip(view.shape, view.stride(), strict=True)
    return count, sum((size - 1) // between * stride for size, stride in steps)


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceSample:
    """Samples of tensors of one dtype on one device; they stay on the device until `changed`."""

    rows: Sequence[int]
    parts: Sequence[torch.Tensor]
    """1-D, views of the tensors' memory."""
    words: torch.Tensor

    @staticmethod
    def of(rows: Sequence[int], pieces: Sequence[Piece]) -> _DeviceSample:
        parts = []
        for row in rows:
            view = pieces[row].view.detach()
            count, step = _diagonal(view)
            if view.is_contiguous():
                count = min(_WORDS, view.numel())
                step = (view.numel() - 1) // max(count - 1, 1)
            parts.append(view.as_strided((count,), (step,), view.storage_offset()))
        return _DeviceSample(rows, parts, torch.cat(parts))

    def changed(self, copies: DeviceCopies) -> list[int]:
        now, before = (copies.gathered(parts).view(torch.uint8) for parts in (self.parts, [self.words]))
        differ = (now != before).view(-1, self.words.element_size()).any(dim=1).numpy()
        row = np.repeat(np.array(self.rows), [len(part) for part in self.parts])
        return sorted(set(row[differ].tolist()))
