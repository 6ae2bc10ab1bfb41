"""The common part of the two walks over a state tree, and the descriptions of the tensors on them.

A save walks the tree to collect its values. A load walks it to bind its values to those of a checkpoint.
Each kind of value has one handler for both walks, so that they stay consistent (`tree.Handler`).

Note: in columns
    For most properties of a tensor, Python's overhead per call exceeds torch's own time. So the code reads
    one property of a block of tensors in a C loop, then the next. A block fits into the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from shardproof.engine.state.dtensor import LocalBoxes, LocalBoxesCache
from shardproof.engine.state.records import Piece, TensorEntry
from shardproof.engine.state.tensors import check_memory, dtype_name, locals_of
from shardproof.errors import StructureError

if TYPE_CHECKING:
    from shardproof.engine.state.flat_parameters import FlatPart
    from shardproof.engine.state.module_names import NamedModule


_H = TypeVar("_H")
"""The handlers of a walk."""

_BLOCK = 256
"""Number of tensors in a block."""

_KIND = attrgetter("dtype", "shape")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a value in the tree."""

    key: str
    """Dotted path, the key of a checkpoint."""
    path: str
    """The Python expression for it, for messages."""
    put: Callable[[Any], None] | None = None
    """Replaces the value in its container; None if it cannot be replaced."""

    def at(self, segment: Any, put: Callable[[Any], None] | None = None) -> Place:
        """The place of an item of the container at this place."""
        return Place(join(self.key, segment), f"{self.path}[{segment!r}]", put)


def join(key: str, segment: Any) -> str:
    """The key of an item.

    >>> join("model", "weight"), join("", 0)
    ('model.weight', '0')
    """
    return f"{key}.{segment}" if key else str(segment)


def is_per_rank(key: str) -> bool:
    """True if a key names a value of a single rank.

    >>> is_per_rank("rng.@rank-0"), is_per_rank("user@rank-0")
    (True, False)
    """
    return key.startswith("@rank-") or ".@rank-" in key


def check_name(name: str, key: str, path: str) -> None:
    """Refuses a name that looks like a reserved key of shardproof.

    Args:
        name: name of an item. It may contain dots.
        key: key of the container.
        path: path of the container, for messages.

    Raises:
        StructureError: a segment of the name begins with ``@``.

    >>> check_name("user@host", "model", "state['model']")
    """
    if name.startswith("@") or ".@" in name:
        raise StructureError(
            f"{path}[{name!r}] has the key {join(key, name)!r}. Segments that begin with '@' are "
            "reserved: rename it",
            key=join(key, name),
        )


@dataclass(frozen=True, slots=True)
class VisitedModule:
    """A module of the tree, for optimizers of its parameters."""

    key: str
    module: NamedModule
    state: Mapping[str, Any]
    """Name to value, as collected; empty for a module that is not in the tree."""
    flat: Sequence[FlatPart] = ()
    """The parameters of FSDP1 in the module. Their parameters without memory stand for the flat ones."""

    def stored(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters whose values are collected, under each of their names."""
        for name, item in self.state.items():
            if isinstance(item, torch.nn.Parameter):
                yield name, item
        if self.state:
            yield from self._of_flat()

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters of the module, under each of their names."""
        yield from self.module.parameters()
        yield from self._of_flat()

    def _of_flat(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((part.name, part.meta) for part in self.flat)


@dataclass
class Visitor(Generic[_H]):
    """The state of a walk that collecting and binding share."""

    handler_of: Callable[[Any, Place], _H]
    """The handler of a value."""
    rank: int
    world_size: int
    parallel: Any = None
    """The `model_parts.ModelParallel` of these ranks; None if each of them has whole models."""
    loose: dict[str, torch.Tensor] = field(default_factory=dict)
    """With `parallel`, the tensors outside of modules and optimizers, by key; see `note_loose`."""
    placed: set[str] = field(default_factory=set)
    """Keys of `loose` that name a parameter whose declared layout the walk has."""
    modules: list[VisitedModule] = field(default_factory=list)
    """Modules visited so far."""
    flat: dict[int, list[FlatPart]] = field(default_factory=dict)
    """The parameters of FSDP1 in each module, by identity; see `flat_parts_of` in `handlers/modules.py`."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """Calls for the end of the walk, when all modules are known."""
    named: dict[int, NamedModule] = field(default_factory=dict)
    """Modules with their names, by identity; see `named` in `engine/state/handlers/modules.py`."""
    layouts: LocalBoxesCache = field(default_factory=LocalBoxesCache)
    """Cache of the local boxes of tensors in this walk."""
    anchors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The empty local tensor of each key of which the rank has no piece."""

    def entries_of(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor], *, detach: bool = True
    ) -> list[TensorEntry]:
        """The entries of plain tensors and DTensors on this rank; see `describe_tensors`.

        Raises:
            StructureError: a tensor cannot be stored; see `shardproof.engine.state.visitor`.
        """
        entries, empty = describe_tensors(keys, tensors, self.layouts, detach=detach)
        self.anchors |= empty
        return entries

    def note_loose(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Records tensors outside of modules and optimizers, which may be parts of a divided model.

        Args:
            tensors: each key with its tensor. They are read only if a model is divided.
        """
        if self.parallel is not None:
            self.loose |= {key: item for key, item in tensors if not is_per_rank(key)}

    def finish_walk(self) -> None:
        """Makes the calls that wait for the end of the walk."""
        for act in self.later:
            act()


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
