"""Detects writes by other code to memory that only an optimizer's step may write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import torch

from shardproof.saving.device_copy import DeviceCopies
from shardproof.saving.memory_sample import MemorySample
from shardproof.state import Piece, Stepped, memory_of, storage_owner

__all__ = ["WriteWatch"]

_VERSION = attrgetter("_version")
_NBYTES = attrgetter("nbytes")


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
        """The row of a fenced piece that other code wrote to; None if there is none.

        Args:
            copies: copies for the devices of the pieces.
        """
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
