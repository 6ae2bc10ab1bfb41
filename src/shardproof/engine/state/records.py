"""The values that pass between the state of a rank and the other packages.

Values with an instance per tensor are structs of msgspec, which are faster to create than dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
import torch

from shardproof._utils.mappings import LazyMapping
from shardproof.engine.state.tensors import addresses_of
from shardproof.errors import ShardproofError

_IS_CPU = attrgetter("is_cpu")


def is_plain_memory(view: torch.Tensor) -> bool:
    """True if the view is contiguous host memory in row-major order, neither conjugate nor negative.

    >>> is_plain_memory(torch.zeros(2, 3)), is_plain_memory(torch.zeros(2, 3).t())
    (True, False)
    """
    return view.is_cpu and view.is_contiguous() and not view.is_conj() and not view.is_neg()


def memory_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The start addresses of plain tensors' storages, on their devices; 0 for a tensor without elements.

    >>> whole = torch.ones(4)
    >>> memory_of([whole[2:], torch.ones(0)]) == [whole.data_ptr(), 0]
    True
    """
    starts, offsets = map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.storage_offset, tensors)
    return [
        start if not (start and offset) else tensor.untyped_storage().data_ptr()
        for tensor, start, offset in zip(tensors, starts, offsets, strict=True)
    ]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A view of local memory, and its box in the global tensor.

    The address and `is_plain` are read once, while the tensor is in the processor's cache. A later pass over
    many tensors takes twice as long.
    """

    view: torch.Tensor
    """It may be non-contiguous, conjugate or negative. In a save it is detached. In a load it may be a
    parameter or an inference tensor: write to its `detach()`."""
    offsets: tuple[int, ...]
    """Global offsets of the view's first element."""
    sizes: tuple[int, ...]
    """Sizes of the box, equal to the shape of the view."""
    address: int
    """Address of the view's first element, on its device."""
    is_plain: bool
    """See `is_plain_memory`."""

    @staticmethod
    def of(view: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
        """The piece of a view."""
        return Piece(view, offsets, sizes, view.data_ptr(), is_plain_memory(view))

    @staticmethod
    def of_all(
        keys: Sequence[str],
        views: Sequence[torch.Tensor],
        offsets: Sequence[tuple[int, ...]],
        sizes: Sequence[tuple[int, ...]],
    ) -> Iterator[Piece]:
        """The pieces of many views, which is faster than one by one.

        Raises:
            StructureError: some elements of a view are not in memory. The message names its key.
        """
        addresses, ordered = addresses_of(views, keys)
        marked = any(map(torch.Tensor.is_conj, views)) or any(map(torch.Tensor.is_neg, views))
        plain = list(map(is_plain_memory, views)) if marked or not all(map(_IS_CPU, views)) else ordered
        return map(Piece, views, offsets, sizes, addresses, plain)


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """The pieces of one global tensor on one rank."""

    key: str
    dtype: str
    """Name of the dtype in torch, one of `shardproof.dtypes.DTYPES`."""
    shape: tuple[int, ...]
    """Global shape."""
    pieces: tuple[Piece, ...]
    """Pieces with at least one element; none for an empty shard."""
    alias_of: str | None = None
    """For a tied tensor, the key under which its memory is stored."""


class ObjectEntry(msgspec.Struct, frozen=True):
    """A value that is not a tensor, as plain JSON data (see `shardproof.engine.state.plain_encode`)."""

    key: str
    value: Any


@dataclass(frozen=True)
class Stepped:
    """An optimizer, and the tensors that only its step changes."""

    optimizer: torch.optim.Optimizer
    tensors: tuple[torch.Tensor, ...]
    """Plain tensors and DTensors."""
    local_tensors: tuple[torch.Tensor, ...]
    """The local tensor of each."""

    @cached_property
    def starts(self) -> list[int]:
        """Start addresses of the local tensors' storages (`memory_of`) at the first access."""
        return memory_of(self.local_tensors)

    @cached_property
    def memory(self) -> frozenset[int]:
        """The distinct start addresses, without those of tensors without elements."""
        return frozenset(self.starts) - {0}


@dataclass(frozen=True, slots=True)
class Collected:
    """The state of one rank: its tensors and objects, each sorted by key."""

    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    stepped: tuple[Stepped, ...] = ()
    """The optimizers of the tree, and the memory that their steps write."""
    token: object = field(default_factory=object)
    """Identical to that of another walk only if keys, dtypes, shapes, boxes and aliases are equal."""
    meshes: tuple[Any, ...] = ()
    """The device meshes of the DTensors, each once."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The contents of a checkpoint, for `bind`."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Key to dtype and global shape, including aliases."""
    aliases: Mapping[str, str]
    """Alias to the key that is stored."""
    objects: Mapping[str, Any]
    """Key to plain JSON data."""
    world_size: int
    """Number of ranks that saved."""
    paths: Callable[[], Mapping[str, tuple[str | int, ...]]] = dict
    """Returns the recorded paths of keys in the nested state dict that was saved."""

    def with_keys(
        self, stored: Mapping[str, str], objects: Mapping[str, Any], without: Collection[str]
    ) -> Catalogue:
        """The same contents, with new keys for some tensors.

        Args:
            stored: new key of a tensor to its current key.
            objects: objects to add.
            without: keys to leave out.

        >>> Catalogue({"a": ("int64", ())}, {}, {}, 1).with_keys({"b": "a"}, {}, ()).tensors
        {'b': ('int64', ())}
        """
        new = {old: key for key, old in stored.items()}
        tensors = {new.get(key, key): kind for key, kind in self.tensors.items() if key not in without}
        aliases = {new.get(key, key): new.get(other, other) for key, other in self.aliases.items()}
        present = self.objects
        keys = [*(key for key in present if key not in without), *objects]
        read = LazyMapping(keys, lambda key: objects[key] if key in objects else present[key])
        return replace(self, tensors=tensors, aliases=aliases, objects=read)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One key at which the target and the checkpoint disagree."""

    key: str
    expected: str
    """Description of the target's value."""
    found: str
    """Description of the checkpoint's value."""

    def __str__(self) -> str:
        return f"{self.key}: expected {self.expected}, found {self.found}"


@dataclass
class Binding:
    """The destinations of a load in a state tree, and the calls that complete it.

    `bind` does not change the tree. To load: write the pieces of `tensors`, call `increment_versions`, then
    call the functions in `finish`.
    """

    catalogue: Catalogue
    """The contents of the checkpoint, under the keys that the tree requests."""
    tensors: list[TensorEntry] = field(default_factory=list)
    """Destinations. The dtype is the destination's and may differ from the stored one."""
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    """Storages of the destinations. The references keep addresses valid if a tensor changes its memory."""
    converts: bool = False
    """True if the dtype of a destination differs from the stored one."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """Calls to make in order, after all ranks have read and verified all tensors."""
    stored_keys: dict[str, str] = field(default_factory=dict)
    """Key that the tree requests to the key of the tensor in the checkpoint, where they differ."""
    used: set[str] = field(default_factory=set)
    """Keys of the catalogue that the tree requests."""
    adapted: set[str] = field(default_factory=set)
    """The keys in `used` that only load hooks of a module get."""
    leftover: set[str] = field(default_factory=set)
    """The keys in `adapted` that the hooks left unused, after the calls of `finish`. With `strict` only."""
    missing: list[str] = field(default_factory=list)
    """Keys that the tree requests and the catalogue lacks."""
    mismatched: list[Mismatch] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    """Keys of values that the load leaves unchanged: per-rank values without a saved value of this rank, and
    parts that the catalogue lacks or that declined."""
    own: dict[str, bool] = field(default_factory=dict)
    """Keys of the per-rank values that the catalogue and the tree both have. True for those in `gathered`."""
    parts: set[str] = field(default_factory=set)
    """Prefixes of the parts that the catalogue and the tree both have."""
    declined: list[str] = field(default_factory=list)
    """The prefixes in `parts` of parts that declined the stored state."""
    refused: list[ShardproofError] = field(default_factory=list)
    """Errors of parts that fail the whole load."""

    @property
    def gathered(self) -> list[str]:
        """The keys in `own` for which this rank gathers the values of ranks that do not exist in the load."""
        return [key for key, gathers in self.own.items() if gathers]

    def increment_versions(self) -> None:
        """Increments the version counters of the destinations.

        A load writes to memory without torch, so torch does not change the counters. Tensors made in
        inference mode have no counter. One call for all tensors is faster than a call for each.
        """
        views = [piece.view for entry in self.tensors for piece in entry.pieces]
        torch.autograd.graph.increment_version(views)


def describe(dtype: str, shape: tuple[int, ...]) -> str:
    """A tensor's dtype and shape, for messages.

    >>> describe("float32", (4, 5))
    'tensor float32 [4, 5]'
    """
    return f"tensor {dtype} {list(shape)}"
