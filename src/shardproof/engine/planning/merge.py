"""Merges the structures of all ranks into one table of tensors, and proves that the boxes tile every tensor.

`merge` decodes equal tables once. It merges ranks with pieces of the same tensors in the same order together,
column by column, so that one more rank costs a few array operations.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.geometry import Boxes, TilingFault, deduplicate, row_pointers, tiling_faults
from shardproof.engine.planning.structure import Structure, TensorTable
from shardproof.errors import StructureError, TilingError


@dataclass(frozen=True, slots=True, eq=False)
class _RankBoxes:
    """The non-empty boxes of one number of dimensions that the ranks declare: a row for each rank and box."""

    boxes: Boxes
    tensor: NDArray[np.int64]
    """(n,) row of the merged tensor table."""
    rank: NDArray[np.int64]
    """(n,) rank that declares the box."""
    piece: NDArray[np.int64]
    """(n,) row of the box in that rank's structure."""


@dataclass(frozen=True, slots=True, eq=False)
class MergedStructures:
    """The tensors and objects of all ranks. Tensors are sorted by key."""

    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    aliases: dict[str, str]
    """Alias to the key that is stored. All ranks that declare the alias declare it for the same key."""
    objects: dict[str, int]
    """Object key to the rank that stores it."""
    ndims: NDArray[np.int64]
    """(t,) number of dimensions of each tensor."""
    itemsizes: NDArray[np.int64]
    """(t,) element size of each tensor in bytes."""


def merge(structures: Sequence[Structure]) -> tuple[MergedStructures, dict[int, _RankBoxes]]:
    """Merges the structures of all ranks, in rank order.

    Returns:
        The merged tables, and the boxes by number of dimensions.

    Raises:
        StructureError: ranks declare different dtypes, shapes or kinds (tensor or object) for a key.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, structure in enumerate(structures):
        ranks_of.setdefault(structure.table, []).append(rank)
    tables = {raw: structures[ranks[0]].tensors() for raw, ranks in ranks_of.items()}
    declared = _agree(tables, ranks_of)
    for key in _wrapped(structures, declared, tables):
        del declared[key]
    keys = sorted(declared)
    row_of = dict(zip(keys, range(len(keys)), strict=True))
    rows_of = {
        raw: np.array([row_of.get(key, -1) for key in table.keys], np.int64) for raw, table in tables.items()
    }
    dtypes, shapes, _ = (
        map(list, zip(*map(declared.__getitem__, keys), strict=True)) if keys else ([], [], [])
    )
    ndims = np.array(list(map(len, shapes)), np.int64)
    size_of = {dtype: DTYPES[dtype].itemsize for dtype in set(dtypes)}
    merged = MergedStructures(
        keys,
        dtypes,
        shapes,
        _aliases(tables.values(), declared),
        _owners(structures, declared),
        ndims,
        np.array([size_of[dtype] for dtype in dtypes], np.int64),
    )
    return merged, _rank_boxes(structures, rows_of, ndims)


def remedy_of_difference(key: str) -> str:
    """What to do about a value that differs between ranks, a sentence without its full stop.

    Args:
        key: key of the value. `PerRank` holds values of the user's tree, and nothing inside of an optimizer.

    >>> remedy_of_difference("loader.epoch")
    'Wrap it in sp.PerRank if each rank has its own; otherwise make it equal before the save'
    >>> remedy_of_difference("optimizer.state.0.exp_avg")  # doctest: +ELLIPSIS
    'This is the state_dict() of an optimizer, ... Put the optimizer itself into the state'
    """
    last = key.rpartition(".")[2]
    if _STATE_DICT.search(f".{key}"):
        return (
            "This is the state_dict() of an optimizer, whose keys are the positions of the parameters of one "
            "rank. Put the optimizer itself into the state"
        )
    if f".{last}" == _SUBCLASS:
        return "All ranks must use one class of tensors for it, with the same settings"
    if last.startswith("@"):
        return (
            "An optimizer has one value of each option, and of each slot that is no tensor, for all ranks. "
            "Make them equal before the save"
        )
    return "Wrap it in sp.PerRank if each rank has its own; otherwise make it equal before the save"


_STATE_DICT = re.compile(r"\.state\.[0-9]+\.[^.]+$|\.param_groups(\.[0-9]+\.[^.]+)?$")
"""Keys in a ``state_dict()`` of an optimizer of torch."""
_SUBCLASS = ".@subclass"
"""End of the key of an object that describes a tensor subclass, whose parts are below the same key."""

_Declared = dict[str, tuple[str, tuple[int, ...], int]]


def _agree(tables: dict[bytes, TensorTable], ranks_of: dict[bytes, list[int]]) -> _Declared:
    """Key to dtype, shape and the first rank that declares them. Raises if two ranks disagree."""
    declared: _Declared = {}
    for raw, table in sorted(tables.items(), key=lambda item: ranks_of[item[0]][0]):
        rank = ranks_of[raw][0]
        for key, dtype, shape in zip(table.keys, table.dtypes, table.shapes, strict=True):
            own = dtype, shape, rank
            other = declared.setdefault(key, own)
            if other is not own and other[:2] != (dtype, shape):
                raise StructureError(
                    f"tensor {key!r}: rank {other[2]} declares {other[0]} {list(other[1])}, rank {rank} "
                    f"declares {dtype} {list(shape)}. All ranks must declare the same dtype and global shape "
                    f"for a key. {remedy_of_difference(key)}",
                    key=key,
                    ranks=[other[2], rank],
                )
    return declared


def _wrapped(
    structures: Sequence[Structure], declared: _Declared, tables: dict[bytes, TensorTable]
) -> set[str]:
    """Keys that are plain tensors on some ranks, and tensor subclasses on others.

    A low-bit optimizer has plain state of an empty shard. No rank stores that.

    Raises:
        StructureError: a rank has elements of the plain tensor.
    """
    owners = {
        key.removesuffix(_SUBCLASS): rank
        for rank, structure in reversed(list(enumerate(structures)))
        for key in structure.objects
        if key.endswith(_SUBCLASS)
    }
    wrapped = owners.keys() & declared.keys()
    for rank, structure in enumerate(structures) if wrapped else ():
        with_boxes = set(structure.box_tensor.tolist())
        for row, key in enumerate(tables[structure.table].keys):
            if key in wrapped and row in with_boxes:
                raise StructureError(
                    f"{key!r} is a plain tensor on rank {rank}, and a tensor subclass on rank {owners[key]}. "
                    "A low-bit optimizer quantises only shards that are large and consist of whole blocks. "
                    "Choose the number of ranks or the block size so that all shards are alike",
                    key=key,
                    ranks=[owners[key], rank],
                )
    return set(wrapped)


def _aliases(tables: Collection[TensorTable], declared: _Declared) -> dict[str, str]:
    """Keys that are an alias of the same key on every rank that declares them."""
    targets_of: dict[str, set[str]] = {
        key: set() for table in tables for key in compress(table.keys, table.aliases)
    }  # most keys are aliases on no rank
    if not targets_of:
        return {}
    for table in tables:
        for key, target in zip(table.keys, table.aliases, strict=True):
            if key in targets_of:
                targets_of[key].add(target)
    aliases = {key: next(iter(targets)) for key, targets in targets_of.items() if len(targets) == 1}
    stored = {key for key in declared if not aliases.get(key)}
    return {
        key: target
        for key, target in sorted(aliases.items())
        if target in stored and declared[key][:2] == declared[target][:2]
    }


def _rank_boxes(
    structures: Sequence[Structure], rows_of: dict[bytes, NDArray[np.int64]], ndims: NDArray[np.int64]
) -> dict[int, _RankBoxes]:
    """All non-empty boxes of all ranks, by number of dimensions."""
    ranks_of: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, structure in enumerate(structures):
        ranks_of.setdefault((structure.table, structure.box_tensor.tobytes()), []).append(rank)
    parts: dict[int, list[_RankBoxes]] = {int(ndim): [] for ndim in np.unique(ndims)}
    for (table, _), ranks in ranks_of.items():
        alike = [structures[rank] for rank in ranks]
        tensor = rows_of[table][alike[0].box_tensor]
        ndim = ndims[tensor]
        start = row_pointers(ndim)
        for dimensions in np.unique(ndim).tolist():
            pieces = np.flatnonzero(ndim == dimensions)
            columns = start[pieces, None] + np.arange(dimensions)
            parts[dimensions].append(_boxes_of(alike, np.array(ranks), tensor[pieces], pieces, columns))
    return {dimensions: _concatenated(part, dimensions) for dimensions, part in parts.items()}


def _boxes_of(
    alike: Sequence[Structure],
    ranks: NDArray[np.int64],
    tensor: NDArray[np.int64],
    pieces: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> _RankBoxes:
    """The boxes of one number of dimensions, of ranks with pieces of the same tensors in the same order.

    The rows are sorted by piece, then by rank, so that later sorts are cheap.
    """
    offsets = np.empty((len(pieces), len(ranks), columns.shape[1]), np.int64)
    sizes = np.empty_like(offsets)
    for at, structure in enumerate(alike):
        offsets[:, at] = structure.box_offsets[columns]
        sizes[:, at] = structure.box_sizes[columns]
    shape = (-1, columns.shape[1]) if columns.shape[1] else (len(pieces) * len(ranks), 0)
    boxes = Boxes(offsets.reshape(shape), sizes.reshape(shape))
    every = _RankBoxes(
        boxes, np.repeat(tensor, len(ranks)), np.tile(ranks, len(pieces)), np.repeat(pieces, len(ranks))
    )
    nonempty = boxes.nonempty()
    if nonempty.all():
        return every
    return _RankBoxes(
        boxes.take(nonempty), every.tensor[nonempty], every.rank[nonempty], every.piece[nonempty]
    )


def _concatenated(parts: Sequence[_RankBoxes], dimensions: int) -> _RankBoxes:
    if len(parts) == 1:
        return parts[0]
    none = np.zeros(0, np.int64)
    return _RankBoxes(
        Boxes.concatenate([Boxes.empty(dimensions), *(part.boxes for part in parts)]),
        np.concatenate([none, *(part.tensor for part in parts)]),
        np.concatenate([none, *(part.rank for part in parts)]),
        np.concatenate([none, *(part.piece for part in parts)]),
    )


def _owners(structures: Sequence[Structure], declared: _Declared) -> dict[str, int]:
    """Object key to the rank that stores it: the lowest rank that declares it."""
    owners: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    for rank, structure in enumerate(structures):
        if structure.objects in seen:
            continue
        seen.add(structure.objects)
        for key in structure.objects:
            if key in declared:
                raise StructureError(
                    f"{key!r} is a tensor on rank {declared[key][2]} and a plain value on rank {rank}. "
                    f"{remedy_of_difference(key)}",
                    key=key,
                    ranks=[declared[key][2], rank],
                )
            owners.setdefault(key, rank)
    return owners


@dataclass(frozen=True, slots=True, eq=False)
class DistinctBoxes:
    """The distinct boxes of one number of dimensions, and the replicas of each: its copies on ranks."""

    boxes: Boxes
    """m boxes, sorted by tensor, then offsets, then sizes."""
    tensor: NDArray[np.int64]
    """(m,) row of the merged tensor table."""
    group: NDArray[np.int64]
    """(n,) row of the distinct box of each replica."""
    rank: NDArray[np.int64]
    """(n,) rank of each replica."""
    piece: NDArray[np.int64]
    """(n,) row of the box in that rank's structure."""


def prove(merged: MergedStructures, declared: Mapping[int, _RankBoxes]) -> list[DistinctBoxes]:
    """Proves that the boxes of each tensor tile it, and returns the distinct boxes by number of dimensions.

    Raises:
        TilingError: the boxes of a tensor do not cover it exactly once.
    """
    return [_proved(merged, dimensions, boxes) for dimensions, boxes in sorted(declared.items())]


def _proved(merged: MergedStructures, dimensions: int, declared: _RankBoxes) -> DistinctBoxes:
    first, group = deduplicate(declared.tensor, declared.boxes)
    boxes, tensor = declared.boxes, declared.tensor
    if len(first) < len(group) or (first[1:] < first[:-1]).any():
        boxes, tensor = boxes.take(first), tensor[first]
    rows = np.flatnonzero(merged.ndims == dimensions)
    shapes = np.array([merged.shapes[row] for row in rows.tolist()], np.int64)
    position = np.zeros(len(merged.ndims), np.int64)  # of each tensor in `rows`
    position[rows] = np.arange(len(rows))
    faults = tiling_faults(shapes.reshape(len(rows), dimensions), position[tensor], boxes)
    if faults:
        key = merged.keys[int(rows[faults[0].tensor])]
        raise _tiling_error(key, merged, declared, group, faults[0], len(faults))
    return DistinctBoxes(boxes, tensor, group, declared.rank, declared.piece)


def _tiling_error(
    key: str,
    merged: MergedStructures,
    declared: _RankBoxes,
    group: NDArray[np.int64],
    fault: TilingFault,
    faults: int,
) -> TilingError:
    """The error for the first fault. It names the boxes at fault and the ranks that declare them."""
    row = merged.keys.index(key)
    holders: dict[str, list[int]] = {}
    for distinct in fault.boxes:
        rows = np.flatnonzero(group == distinct)
        box = _interval(declared.boxes.offsets[rows[0]].tolist(), declared.boxes.sizes[rows[0]].tolist())
        holders[box] = sorted(set(declared.rank[rows].tolist()))
    at = _interval(fault.offsets, fault.sizes)
    shape = list(merged.shapes[row])
    boxes = ", ".join(f"{box} on {_ranks(ranks)}" for box, ranks in holders.items())
    if fault.kind == "gap":
        others = sorted(set(declared.rank[declared.tensor == row].tolist()))
        what = (
            f"no rank holds {at}; {_ranks(others)} hold other parts" if others else "no rank holds any of it"
        )
        advice = "Check the offsets, and that every rank declares its part"
    elif fault.kind == "overlap":
        what = f"different boxes hold {at}: {boxes}"
        advice = "Replicas must be equal boxes; different boxes must not share an element"
    else:
        what = f"the box {boxes} exceeds the shape"
        advice = "Offsets and sizes must lie within the global shape"
    more = f" ({faults - 1} more tensors have faults)" if faults > 1 else ""
    return TilingError(
        f"tensor {key!r} of shape {shape}: {fault.kind}: {what}. Expected: boxes that cover it exactly once. "
        f"{advice}{more}",
        key=key,
        kind=fault.kind,
        box=[list(fault.offsets), list(fault.sizes)],
        holders=holders,
    )


def _interval(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    inner = ",".join(f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True))
    return f"[{inner}]"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
