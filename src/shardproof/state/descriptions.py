"""What one rank holds of tensors and DTensors: dtype, global shape, and pieces of its memory.

Note: in columns
    Most of what is asked of a tensor takes torch less time than Python takes to ask. So one thing is asked of
    some tensors together, then the next, and of as many as stay in the processor's caches meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

from shardproof.state.dtensor import Layouts, Where
from shardproof.state.records import Piece, TensorEntry
from shardproof.state.tensors import check_memory, dtype_name, locals_of

__all__ = ["blocks", "describe_tensors"]

_BLOCK = 256
"""Tensors that are asked together."""

_KIND = attrgetter("dtype", "shape")


def blocks(count: int) -> Iterator[slice]:
    """Parts of a list of tensors that are asked together.

    >>> list(blocks(300))
    [slice(0, 256, None), slice(256, 512, None)]
    """
    return (slice(begin, begin + _BLOCK) for begin in range(0, count, _BLOCK))


def describe_tensors(
    keys: Sequence[str], tensors: Sequence[torch.Tensor], layouts: Layouts, *, detach: bool = True
) -> tuple[list[TensorEntry], dict[str, torch.Tensor]]:
    """The entries of plain tensors and DTensors.

    Args:
        keys: of the tensors, for messages too.
        tensors: to keep or to fill.
        layouts: of the DTensors of the same walk.
        detach: whether the views of the pieces are detached, and so keep the memory that the tensors have
            now. Otherwise most are the tensors themselves, since a view more for each costs a sixth of a
            load of small ones, and who goes by their addresses keeps their storages.

    Returns:
        Their entries in the same order; and by key, of those without pieces, what the rank holds: empty
        tensors.

    Raises:
        StructureError: a tensor cannot be kept; the text names its key and what to do.

    >>> (entry,), empty = describe_tensors(["w"], [torch.ones(2, 3)], Layouts())
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
    keys: Sequence[str], tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], layouts: Layouts
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


def _pieces(key: str, local: torch.Tensor, where: Where) -> tuple[Piece, ...]:
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
