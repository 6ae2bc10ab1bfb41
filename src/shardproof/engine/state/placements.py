"""Computes the part of a tensor that placements assign to a rank, from mesh coordinates, without torch.

A dimension of the local tensor is a list of segments ``(start, size)`` of the global dimension, in local
order. Every placement maps a list of segments to a shorter one. So the cost does not depend on the size of
the tensor, and the ranks need not communicate.

Note: the order of sharding
    Placements apply from the left, with one exception. FSDP over tensor parallelism shards a dimension that
    is already sharded, and writes ``_StridedShard(dim, split_factor)`` to the left of ``Shard(dim)``. The
    true order is then from the right, and ``split_factor`` is the number of earlier shards. In the literal
    reading, a strided shard cuts into `split_factor` parts and takes its share of each.

    Both readings are equal for sizes that the mesh divides. For others (9 rows, 2 tensor parallel ranks, 4
    data parallel ranks) they differ: FSDP uses the true order, and `distribute_tensor` the literal reading.
    The local shape decides between them, but not on every rank: some ranks have the same number of rows in
    both readings. Such a rank uses the true order. A rank with a shape that contradicts this order raises,
    and so the save fails on all ranks. If the local shapes are equal in both readings on all ranks, all ranks
    raise.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from shardproof.engine.geometry import Boxes, IndexMap

Segments = tuple[tuple[int, int], ...]
"""Parts ``(start, size)`` of one global dimension, in the order in which they lie in the local tensor."""

Sharding = tuple[tuple[int, int, int], ...]
"""For each mesh dimension that shards: mesh dimension, tensor dimension, split factor (0 if not strided)."""


@lru_cache(maxsize=4096)
def local_segments(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    sharding: Sharding,
    ordered: bool = True,
) -> tuple[Segments, ...] | None:
    """The segments of each dimension on the rank at `coordinate`.

    Args:
        shape: global shape.
        mesh_shape: ranks along each mesh dimension.
        coordinate: this rank's coordinate in the mesh.
        sharding: the placements, without those that replicate.
        ordered: True to read strided shards as an order of sharding; the result is None if there is no such
            order. False to read them literally (see "the order of sharding" above).

    >>> local_segments((5, 3), (2,), (1,), ((0, 0, 0),))
    (((3, 2),), ((0, 3),))
    >>> local_segments((8,), (2,), (1,), ((0, 0, 2),), False)
    (((2, 2), (6, 2)),)
    """
    steps: list[tuple[int, int, int]] | None = list(sharding)
    if ordered:
        steps = order_of_sharding(mesh_shape, sharding)
        if steps is None:
            return None
    assert steps is not None
    dims: list[Segments] = [((0, size),) for size in shape]
    for mesh_dim, dim, split in steps:
        count, index = mesh_shape[mesh_dim], coordinate[mesh_dim]
        parts = [_chunk(dims[dim], split, part) for part in range(split)] if split > 1 else [dims[dim]]
        dims[dim] = _join([segment for part in parts for segment in _chunk(part, count, index)])
    return tuple(dims)


def order_of_sharding(mesh_shape: tuple[int, ...], sharding: Sharding) -> list[tuple[int, int, int]] | None:
    """The same sharding in its true order, without strides; None if there is no such order.

    >>> order_of_sharding((4, 2), ((0, 0, 2), (1, 0, 0)))
    [(1, 0, 0), (0, 0, 0)]
    """
    order: dict[int, list[int]] = {}
    for mesh_dim, dim, split in reversed(sharding):
        done = order.setdefault(dim, [])
        shards, position = 1, 0
        while shards < split and position < len(done):
            shards *= mesh_shape[done[position]]
            position += 1
        if shards != max(split, 1):
            return None
        done.insert(position, mesh_dim)
    return [(mesh_dim, dim, 0) for dim, done in order.items() for mesh_dim in done]


@lru_cache(maxsize=4096)
def confusable(shape: tuple[int, ...], mesh_shape: tuple[int, ...], sharding: Sharding) -> tuple[bool, bool]:
    """True if both readings give equal local shapes but different content: on some rank; on all ranks."""
    sharded = {mesh_dim for mesh_dim, _, _ in sharding}
    somewhere, everywhere = False, True
    for coordinate in product(*(range(n if dim in sharded else 1) for dim, n in enumerate(mesh_shape))):
        ordered = local_segments(shape, mesh_shape, coordinate, sharding)
        literal = local_segments(shape, mesh_shape, coordinate, sharding, False)
        assert ordered is not None and literal is not None
        if sizes_of(ordered) != sizes_of(literal):
            everywhere = False
        elif ordered != literal:
            somewhere = True
    return somewhere, everywhere


def sizes_of(segments: tuple[Segments, ...]) -> tuple[int, ...]:
    """The shape of the local tensor with these segments."""
    return tuple(sum(size for _, size in dim) for dim in segments)


@lru_cache(maxsize=4096)
def index_map_of(
    local_shape: tuple[int, ...], shape: tuple[int, ...], segments: tuple[Segments, ...]
) -> IndexMap:
    """The index map of a local tensor. Each combination of one segment per dimension is a box."""
    if 0 in local_shape:
        return IndexMap(local_shape, shape, Boxes.empty(len(shape)), np.zeros((0, len(shape)), np.int64))
    columns = []
    for dim in segments:
        starts, sizes = np.array(dim, np.int64).T
        columns.append(np.stack([np.cumsum(sizes) - sizes, starts, sizes]))
    counts = [len(dim) for dim in segments]
    picked = np.indices(counts).reshape(len(segments), prod(counts))
    local, placed, sizes = (
        np.stack([column[row][at] for column, at in zip(columns, picked, strict=True)], axis=1)
        if columns
        else np.zeros((1, 0), np.int64)
        for row in range(3)
    )
    return IndexMap(local_shape, shape, Boxes(local, sizes), placed)


def _chunk(segments: Segments, count: int, index: int) -> Segments:
    """Part `index` of `count`, cut as by `torch.chunk`: equal parts, the last ones smaller or empty."""
    total = sum(size for _, size in segments)
    step = -(-total // count)
    low, high = min(index * step, total), min((index + 1) * step, total)
    part = []
    position = 0
    for start, size in segments:
        first, last = max(low, position), min(high, position + size)
        if first < last:
            part.append((start + first - position, last - first))
        position += size
    return tuple(part)


def _join(segments: list[tuple[int, int]]) -> Segments:
    """Merges adjacent segments, so that contiguous rows give one piece."""
    joined: list[tuple[int, int]] = []
    for start, size in segments:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return tuple(joined)
