"""Describes the tensors and DTensors of one rank: dtype, global shape, and pieces of local memory.

Note: in columns
    For most properties of a tensor, Python's overhead per call exceeds torch's own time. So the code reads
    one property of a block of tensors in a C loop, then the next. A block fits into the processor's caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

from shardproof.engine.state.dtensor import LocalBoxes, LocalBoxesCache
from shardproof.engine.state.records import Piece, TensorEntry
from shardproof.engine.state.tensors import check_memory, dtype_name, locals_of

_BLOCK = 256
"""Number of tensors in a block."""

_KIND = attrgetter("dtype", "shape")


def blocks(count: int) -> Iterator[slice]:
    """Yields the blocks of a list of tensors.

    >>> list(blocks(300))
    [slice(0, 256, None), slice(256, 512, None)]
    """
    return (slice(begin, begin + _BLOCK) for begin in range(0, count, _BLOCK))


def describe_tensors(
    keys: Sequence[str], tensors: Sequence[torch.Tensor], layouts: LocalBoxesCache, *, detach: bool = True
) -> tuple[list[TensorEntry], dict[str, torch.Tensor]]:
    """The entries of plain tensors and DTensors.

    Args:
        keys: keys of the tensors.
        tensors: the tensors to save or to fill.
        layouts: cache of the local boxes of DTensors in the same walk.
        detach: True to detach the views of the pieces, so that they keep the memory that the tensors have
            now. With False, most views are the tensors themselves, which makes a load of small tensors
            faster. The caller must then hold the storages.

    Returns:
        The entries in the same order; and the empty local tensors of entries without pieces, by key.

    Raises:
        StructureError: a tensor cannot be stored. The message names its key and what to do.

    >>> (entry,), empty = describe_tensors(["w"], [torch.ones(2, 3)], LocalBoxesCache())
    >>> entry.dtype, entry.shape, entry.pieces[0].offsets, empty
    ('float32', (2, 3), (0, 0), {})
    """
    entries: list[TensorEntry] = []
    empty: dict[str, torch.Tensor] = {}
    for block in blocks(len(keys)):
        memory = locals_of(tensors[block], keys[block])
        views = list(map(torch.Tensor.detach, memory)) if detach else memory
        described = _described(keys[block], tensors[block], views, layouts)
        empty |= {
            entry.key: local for entry, local in zip(described, memory, strict=True) if not entry.pieces
        }
        entries += described
    return entries, empty


def _described(
    keys: Sequence[str],
    tensors: Sequence[torch.Tensor],
    views: Sequence[torch.Tensor],
    layouts: LocalBoxesCache,
) -> list[TensorEntry]:
    kinds = list(map(_KIND, views))
    names = [dtype_name(dtype, key) for key, (dtype, _) in zip(keys, kinds, strict=True)]
    where = layouts.of(keys, tensors, [shape for _, shape in kinds])
    shapes, offsets, sizes, _ = zip(*where, strict=True)
    pieces = (
        map(_pieces, keys, views, where)
        if None in offsets
        else zip(Piece.of_all(keys, views, offsets, sizes), strict=True)
    )
    return list(map(TensorEntry, keys, names, shapes, pieces))


def _pieces(key: str, local: torch.Tensor, where: LocalBoxes) -> tuple[Piece, ...]:
    check_memory(local, key)
    if where.offsets is not None:
        return (Piece.of(local, where.offsets, where.sizes),)
    if where.index_map is None:
        return ()
    boxes, local = where.index_map.local, local.detach()
    return tuple(
        Piece.of(
            local[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))],
            tuple(placed),
            tuple(sizes),
        )
        for starts, sizes, placed in zip(
            boxes.offsets.tolist(), boxes.sizes.tolist(), where.index_map.offsets.tolist(), strict=True
        )
        if 0 not in sizes
    )
