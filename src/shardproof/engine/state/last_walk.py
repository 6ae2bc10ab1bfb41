"""A cache of the tensor descriptions of one walk over a state, for the next walk.

Note: what a description depends on
    The description of a tensor (dtype, global shape, boxes) depends on its type, and on dtype, shape and
    layout of the local tensor. For a DTensor it also depends on its global shape, its placements and their
    order, its mesh, the rank's coordinate, and an index map of its own. `LastWalk` compares all of these,
    tensor by tensor, in the order of the walk. It never relies on the identity of a tensor. If all are equal,
    it reuses the descriptions, and reads only the address, the bounds and the order of the memory again. If
    any differs, the walk describes every tensor again.

    Meshes, placements and index maps are compared by identity, because placements of different meaning may
    be equal. The cache has references to them, so that no id is reused. It has no memory of tensors.

The comparison runs in C loops over columns, which is faster than describing ("blocked" in
`benchmarks/small_tensors.py`). If the descriptions are unchanged (`LastWalk.token`), the caller can also
reuse the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from shardproof.engine.state.dtensor import LOCAL, is_dtensor, local_tensor, shard_order
from shardproof.engine.state.records import Piece, TensorEntry
from shardproof.engine.state.tensors import are_plain
from shardproof.engine.state.visitor import blocks

_KIND = attrgetter("dtype", "shape")
_SHAPE = attrgetter("shape")
_SPEC = attrgetter("_spec.mesh", "_spec.placements")
_LOCAL_TENSOR = attrgetter("_local_tensor")

_Boxes = tuple[str, tuple[int, ...], tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]
"""dtype, global shape, and offsets and sizes of each piece."""


Describe = Callable[[Sequence[str], Sequence[torch.Tensor]], list[TensorEntry]]
"""Returns the entries of tensors with these keys."""


class LastWalk:
    """The cached descriptions of the last walk. Starts empty.

    >>> walk, state = LastWalk(), {"w": torch.ones(2, 3)}
    >>> whole = TensorEntry("w", "float32", (2, 3), (Piece.of(state["w"], (0, 0), (2, 3)),))
    >>> (before,), token = walk.entries(state, lambda keys, tensors: [whole]), walk.token([None])
    >>> (after,) = walk.entries(state, lambda keys, tensors: [])
    >>> after.shape, walk.token([None]) is token
    ((2, 3), True)
    """

    def __init__(self) -> None:
        self._token = object()
        self._aliases: list[str | None] = []
        self._keys: list[str] = []
        self._caches: list[_BlockCache] = []
        """The cache of each block."""

    def entries(self, tensors: Mapping[str, torch.Tensor], describe: Describe) -> list[TensorEntry]:
        """The entries of these tensors, in any order.

        Args:
            tensors: tensors by key, in the order of the walk.
            describe: returns the entries of tensors.
        """
        keys, values = list(tensors), list(tensors.values())
        parts = list(blocks(len(keys)))
        if keys == self._keys:
            entries: list[TensorEntry] = []
            for cache, part in zip(self._caches, parts, strict=True):
                found = cache.entries(values[part], describe)
                if found is None:
                    break
                entries += found
            else:
                return entries
        self._token = object()
        entries = describe(keys, values)
        self._keys, self._caches = keys, [_BlockCache.of(values[part], entries[part]) for part in parts]
        return entries

    def token(self, aliases: list[str | None]) -> object:
        """The last walk's token if keys, dtypes, global shapes, boxes and aliases are equal; else a new one.

        Args:
            aliases: aliases of the entries, sorted by key.
        """
        if aliases != self._aliases:
            self._aliases, self._token = aliases, object()
        return self._token

    def meshes(self) -> list[Any]:
        """The device meshes of the DTensors of the last walk. Those of different blocks may be the same."""
        return [mesh for cache in self._caches for mesh in cache.meshes]


class _Ones(NamedTuple):
    """Columns of descriptions with one piece."""

    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    offsets: list[tuple[int, ...]]
    sizes: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _BlockCache:
    """Columns of a block of one walk.

    The cache covers tensors whose local tensor is one piece: plain tensors and DTensors. Each walk describes
    the others (several pieces, or none) again.
    """

    plain: list[int]
    """Rows of plain tensors of one piece in the block."""
    dtensors: list[int]
    """Rows of DTensors of one piece."""
    others: list[int]
    """All other rows."""
    types: list[type]
    """Types of the plain tensors, then of the DTensors."""
    parts: list[Any]
    """Mesh and placements of each DTensor, then the index map of each."""
    meshes: list[Any]
    """The distinct meshes."""
    coordinates: list[tuple[Any, Any]]
    """Shape of each mesh, and the rank's coordinate."""
    orders: list[Any]
    """`shard_order` of each DTensor."""
    wholes: list[torch.Size]
    """Global shape of each DTensor."""
    kinds: list[tuple[torch.dtype, torch.Size]]
    """dtype and shape of the local tensors."""
    ones: _Ones
    """Descriptions of the tensors of one piece, in the rows of `types`."""
    keys: list[str]
    """Keys of the other rows."""
    boxes: list[_Boxes]
    """Descriptions of the other rows."""

    @staticmethod
    def of(values: Sequence[torch.Tensor], entries: Sequence[TensorEntry]) -> _BlockCache:
        """The cache of tensors with these entries."""
        plain, dtensors, others = list[int](), list[int](), list[int]()
        for row, (tensor, entry) in enumerate(zip(values, entries, strict=True)):
            is_one = len(entry.pieces) == 1 and entry.pieces[0].sizes == tuple(local_tensor(tensor).shape)
            (others if not is_one else dtensors if is_dtensor(tensor) else plain).append(row)
        ones = [entries[row] for row in plain + dtensors]
        tensors = [values[row] for row in plain + dtensors]
        parts, orders, wholes, memory = _columns(tensors, len(plain))
        meshes = list({id(mesh): mesh for mesh in parts[: 2 * len(dtensors) : 2]}.values())
        return _BlockCache(
            plain,
            dtensors,
            others,
            list(map(type, tensors)),
            parts,
            meshes,
            list(map(_coordinate, meshes)),
            orders,
            wholes,
            list(map(_KIND, memory)),
            _Ones(
                [entry.key for entry in ones],
                [entry.dtype for entry in ones],
                [entry.shape for entry in ones],
                [entry.pieces[0].offsets for entry in ones],
                [entry.pieces[0].sizes for entry in ones],
            ),
            [entries[row].key for row in others],
            [_boxes(entries[row]) for row in others],
        )

    def entries(self, values: Sequence[torch.Tensor], describe: Describe) -> list[TensorEntry] | None:
        """The entries of tensors with the same keys; None if a description may differ."""
        tensors = [values[row] for row in self.plain + self.dtensors]
        if list(map(type, tensors)) != self.types:
            return None
        parts, orders, wholes, memory = _columns(tensors, len(self.plain))
        if not all(map(is_, parts, self.parts)) or not are_plain(memory):
            return None
        if wholes != self.wholes or orders != self.orders:
            return None
        if list(map(_coordinate, self.meshes)) != self.coordinates:
            return None
        if list(map(_KIND, memory)) != self.kinds:
            return None
        others = describe(self.keys, [values[row] for row in self.others]) if self.others else []
        if list(map(_boxes, others)) != self.boxes:
            return None
        views = list(map(torch.Tensor.detach, memory))
        keys, dtypes, shapes, offsets, sizes = self.ones
        pieces = Piece.of_all(keys, views, offsets, sizes)
        return [*map(TensorEntry, keys, dtypes, shapes, zip(pieces, strict=True)), *others]


def _columns(
    tensors: list[torch.Tensor], plain: int
) -> tuple[list[Any], list[Any], list[torch.Size], list[torch.Tensor]]:
    """The columns `parts`, `orders` and `wholes`, and all local tensors. DTensors come after `plain` rows."""
    dtensors = tensors[plain:]
    index_maps = [getattr(tensor, LOCAL, None) for tensor in dtensors]
    parts = [*chain.from_iterable(map(_SPEC, dtensors)), *index_maps]
    memory = tensors[:plain] + list(map(_LOCAL_TENSOR, dtensors))
    return parts, list(map(shard_order, dtensors)), list(map(_SHAPE, dtensors)), memory


def _coordinate(mesh: Any) -> tuple[Any, Any]:
    coordinate = mesh.get_coordinate()
    return tuple(mesh.shape), None if coordinate is None else tuple(coordinate)


def _boxes(entry: TensorEntry) -> _Boxes:
    return entry.dtype, entry.shape, tuple((piece.offsets, piece.sizes) for piece in entry.pieces)
