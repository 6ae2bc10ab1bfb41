"""The structures of all ranks as one: a table of tensors, and every declared box with its holder.

Tables that are equal to the byte are decoded once. Ranks that have pieces of the same tensors in the same
order are taken together, and their boxes stay columns, so that the work for a rank is a few array operations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.errors import StructureError
from shardproof.geometry import Boxes
from shardproof.planning.structure import Structure, TensorTable

__all__ = ["Declared", "Merged", "merge"]


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """The non-empty boxes of all tensors of one number of dimensions, a row for each rank that holds one."""

    boxes: Boxes
    tensor: NDArray[np.int64]
    """(n,) row of the merged tensor table."""
    rank: NDArray[np.int64]
    """(n,) the holder."""
    piece: NDArray[np.int64]
    """(n,) row of the box in the holder's own structure."""


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """What all ranks together declare. Tensors are sorted by key."""

    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    aliases: dict[str, str]
    """Key to the key that is stored in its place, where every rank that declares the key says so."""
    objects: dict[str, int]
    """Object key to the rank that stores it."""
    ndims: NDArray[np.int64]
    itemsizes: NDArray[np.int64]


def merge(structures: Sequence[Structure]) -> tuple[Merged, dict[int, Declared]]:
    """Merges the structures of all ranks, in rank order; the boxes are apart, by their number of dimensions.

    Raises:
        StructureError: dtype, shape or kind (tensor or object) of a key differs between ranks.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, structure in enumerate(structures):
        ranks_of.setdefault(structure.table, []).append(rank)
    tables = {raw: structures[ranks[0]].tensors() for raw, ranks in ranks_of.items()}
    known = _agree(tables, ranks_of)
    keys = sorted(known)
    row_of = dict(zip(keys, range(len(keys)), strict=True))
    rows_of = {raw: np.array([row_of[key] for key in table.keys], np.int64) for raw, table in tables.items()}
    dtypes, shapes, _ = map(list, zip(*map(known.__getitem__, keys), strict=True)) if keys else ([], [], [])
    ndims = np.array(list(map(len, shapes)), np.int64)
    size_of = {dtype: DTYPES[dtype].itemsize for dtype in set(dtypes)}
    merged = Merged(
        keys,
        dtypes,
        shapes,
        _aliases(tables.values(), known),
        _owners(structures, known),
        ndims,
        np.array([size_of[dtype] for dtype in dtypes], np.int64),
    )
    return merged, _declared(structures, rows_of, ndims)


_Known = dict[str, tuple[str, tuple[int, ...], int]]


def _agree(tables: dict[bytes, TensorTable], ranks_of: dict[bytes, list[int]]) -> _Known:
    """Key to dtype, shape and the first rank that declares it; all ranks must say the same."""
    known: _Known = {}
    for raw, table in sorted(tables.items(), key=lambda item: ranks_of[item[0]][0]):
        rank = ranks_of[raw][0]
        for key, dtype, shape in zip(table.keys, table.dtypes, table.shapes, strict=True):
            said = dtype, shape, rank
            other = known.setdefault(key, said)
            if other is not said and other[:2] != (dtype, shape):
                raise StructureError(
                    f"tensor {key!r}: rank {other[2]} declares {other[0]} {list(other[1])}, rank {rank} "
                    f"declares "
                    f"{dtype} {list(shape)}. All ranks must declare one dtype and one global shape for a "
                    "key; a value that belongs to one rank alone goes into sp.PerRank",
                    key=key,
                    ranks=[other[2], rank],
                )
    return known


def _aliases(tables: Collection[TensorTable], known: _Known) -> dict[str, str]:
    """Keys that every rank declaring them calls an alias of the same key."""
    said: dict[str, set[str]] = {
        key: set() for table in tables for key in compress(table.keys, table.aliases)
    }  # most keys are no rank's alias
    if not said:
        return {}
    for table in tables:
        for key, target in zip(table.keys, table.aliases, strict=True):
            if key in said:
                said[key].add(target)
    aliases = {key: next(iter(targets)) for key, targets in said.items() if len(targets) == 1}
    stored = {key for key in known if not aliases.get(key)}
    return {
        key: target
        for key, target in sorted(aliases.items())
        if target in stored and known[key][:2] == known[target][:2]
    }


def _declared(
    structures: Sequence[Structure], rows_of: dict[bytes, NDArray[np.int64]], ndims: NDArray[np.int64]
) -> dict[int, Declared]:
    """All boxes of all ranks, grouped by number of dimensions, empty ones left out."""
    ranks_of: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, structure in enumerate(structures):
        ranks_of.setdefault((structure.table, structure.box_tensor.tobytes()), []).append(rank)
    parts: dict[int, list[Declared]] = {int(ndim): [] for ndim in np.unique(ndims)}
    for (table, _), ranks in ranks_of.items():
        alike = [structures[rank] for rank in ranks]
        tensor = rows_of[table][alike[0].box_tensor]
        ndim = ndims[tensor]
        start = np.cumsum(ndim) - ndim
        for dimensions in np.unique(ndim).tolist():
            pieces = np.flatnonzero(ndim == dimensions)
            columns = start[pieces, None] + np.arange(dimensions)
            parts[dimensions].append(_held(alike, np.array(ranks), tensor[pieces], pieces, columns))
    return {dimensions: _joined(part, dimensions) for dimensions, part in parts.items()}


def _held(
    alike: Sequence[Structure],
    ranks: NDArray[np.int64],
    tensor: NDArray[np.int64],
    pieces: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> Declared:
    """The boxes of one number of dimensions of ranks that have pieces of the same tensors in the same order.

    They come out by piece, then by rank: as good as sorted for the steps that follow.
    """
    offsets = np.empty((len(pieces), len(ranks), columns.shape[1]), np.int64)
    sizes = np.empty_like(offsets)
    for at, structure in enumerate(alike):
        offsets[:, at] = structure.box_offsets[columns]
        sizes[:, at] = structure.box_sizes[columns]
    shape = (-1, columns.shape[1]) if columns.shape[1] else (len(pieces) * len(ranks), 0)
    boxes = Boxes(offsets.reshape(shape), sizes.reshape(shape))
    held = Declared(
        boxes, np.repeat(tensor, len(ranks)), np.tile(ranks, len(pieces)), np.repeat(pieces, len(ranks))
    )
    filled = boxes.nonempty()
    if filled.all():
        return held
    return Declared(boxes.take(filled), held.tensor[filled], held.rank[filled], held.piece[filled])


def _joined(parts: Sequence[Declared], dimensions: int) -> Declared:
    if len(parts) == 1:
        return parts[0]
    none = np.zeros(0, np.int64)
    return Declared(
        Boxes.concatenate([Boxes.empty(dimensions), *(part.boxes for part in parts)]),
        np.concatenate([none, *(part.tensor for part in parts)]),
        np.concatenate([none, *(part.rank for part in parts)]),
        np.concatenate([none, *(part.piece for part in parts)]),
    )


def _owners(structures: Sequence[Structure], known: _Known) -> dict[str, int]:
    """The lowest rank that has an object stores it."""
    owners: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    for rank, structure in enumerate(structures):
        if structure.objects in seen:
            continue
        seen.add(structure.objects)
        for key in structure.objects:
            if key in known:
                raise StructureError(
                    f"{key!r} is a tensor on rank {known[key][2]} and a plain value on rank {rank}; give "
                    "them different keys, or sp.PerRank for values that differ by rank",
                    key=key,
                    ranks=[known[key][2], rank],
                )
            owners.setdefault(key, rank)
    return owners
