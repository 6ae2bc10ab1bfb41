"""The values that pass between the state of a rank and the rest of the engine.

Those that exist once a tensor or more are structs of msgspec: made in 0.06 µs, where a frozen dataclass takes
0.3 to 0.6 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
import torch

from shardproof.errors import ShardproofError
from shardproof.state.tensors import addresses_of

__all__ = [
    "Binding",
    "Catalogue",
    "Collected",
    "Mismatch",
    "ObjectEntry",
    "Piece",
    "Stepped",
    "TensorEntry",
    "describe",
    "is_plain_memory",
    "memory_of",
]

_IS_CPU = attrgetter("is_cpu")


def is_plain_memory(view: torch.Tensor) -> bool:
    """Whether the view is host memory whose order is the row-major order of its elements.

    >>> is_plain_memory(torch.zeros(2, 3)), is_plain_memory(torch.zeros(2, 3).t())
    (True, False)
    """
    return view.is_cpu and view.is_contiguous() and not view.is_conj() and not view.is_neg()


def memory_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the storages of plain tensors begin, on their devices; 0 for a tensor without elements.

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
    """A view of local memory and where in the global tensor it lies.

    What torch is asked of every view is asked once, while the processor has the tensor in its cache: a pass
    over 20,000 of them later on takes twice as long.
    """

    view: torch.Tensor
    """It may be non-contiguous, conjugate or negative. What is to be saved is detached. What is to be filled
    may be a parameter, or a tensor made in inference mode: its `detach()` is what can be written to."""
    offsets: tuple[int, ...]
    """Global offsets of the view's first element."""
    sizes: tuple[int, ...]
    """Of the box, which is the shape of the view."""
    address: int
    """Of the view's first element, on its device."""
    is_plain: bool
    """See `is_plain_memory`."""

    @staticmethod
    def of(view: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
        """The piece that a view is."""
        return Piece(view, offsets, sizes, view.data_ptr(), is_plain_memory(view))

    @staticmethod
    def of_all(
        keys: Sequence[str],
        views: Sequence[torch.Tensor],
        offsets: Sequence[tuple[int, ...]],
        sizes: Sequence[tuple[int, ...]],
    ) -> Iterator[Piece]:
        """The pieces that views are, asked of all of them together.

        Raises:
            StructureError: not all elements of a view are in memory; the text names its key.
        """
        addresses, ordered = addresses_of(views, keys)
        marked = any(map(torch.Tensor.is_conj, views)) or any(map(torch.Tensor.is_neg, views))
        plain = list(map(is_plain_memory, views)) if marked or not all(map(_IS_CPU, views)) else ordered
        return map(Piece, views, offsets, sizes, addresses, plain)


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """What one rank holds of one global tensor."""

    key: str
    dtype: str
    """torch's name, one of `shardproof.dtypes.DTYPES`."""
    shape: tuple[int, ...]
    """Global shape."""
    pieces: tuple[Piece, ...]
    """Pieces with at least one element; none for an empty shard."""
    alias_of: str | None = None
    """The key under which the same memory is stored, for tied tensors."""


class ObjectEntry(msgspec.Struct, frozen=True):
    """A value that is not a tensor, as plain JSON data (see `shardproof.state.plain.encode`)."""

    key: str
    value: Any


@dataclass(frozen=True)
class Stepped:
    """An optimizer, and the tensors that change in its step and at no other time."""

    optimizer: torch.optim.Optimizer
    tensors: tuple[torch.Tensor, ...]
    """Plain tensors and DTensors."""
    held: tuple[torch.Tensor, ...]
    """What this rank holds of each: a plain tensor itself."""

    @cached_property
    def starts(self) -> list[int]:
        """Where the storages of what is held begin, as `memory_of` says, when this is first asked for."""
        return memory_of(self.held)

    @cached_property
    def memory(self) -> frozenset[int]:
        """The same without those that have no elements."""
        return frozenset(self.starts) - {0}


@dataclass(frozen=True, slots=True)
class Collected:
    """The state of one rank: its tensors and objects, each sorted by key."""

    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    stepped: tuple[Stepped, ...] = ()
    """Of each optimizer in the tree, the memory that its step writes."""
    token: object = field(default_factory=object)
    """That of another walk only where keys, dtypes, shapes, boxes and aliases of all tensors are the same."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a checkpoint holds, as `bind` needs to know it."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Key to dtype and global shape; aliases are in it under their own keys too."""
    aliases: Mapping[str, str]
    """Alias to the key that is stored."""
    objects: Mapping[str, Any]
    """Key to plain JSON data."""
    world_size: int
    """Ranks that saved."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One key at which the target and the checkpoint disagree."""

    key: str
    expected: str
    """What the target holds."""
    found: str
    """What the checkpoint holds."""

    def __str__(self) -> str:
        return f"{self.key}: expected {self.expected}, found {self.found}"


@dataclass
class Binding:
    """How a state tree takes what a checkpoint holds.

    Making one touches nothing. Writing the pieces of `tensors`, which `say_changed` is told of, and calling
    `finish` does.
    """

    tensors: list[TensorEntry] = field(default_factory=list)
    """Destinations. Their dtype is the destination's and may differ from the stored one."""
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    """Of the destinations, so that their addresses stay good if a tensor is given other memory meanwhile."""
    converts: bool = False
    """Whether a destination has another dtype than is stored."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """To be called in order once all tensors are read and verified on all ranks."""
    used: set[str] = field(default_factory=set)
    """Keys of the catalogue that the tree asks for."""
    missing: list[str] = field(default_factory=list)
    """Keys that the tree asks for and the catalogue lacks."""
    mismatched: list[Mismatch] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Keys of what is left as it is: per-rank values, because fewer ranks saved than load, and parts, because
    the catalogue lacks them or they declined it."""
    own: list[str] = field(default_factory=list)
    """Keys of the per-rank values that the catalogue and the tree both have."""
    gathered: list[str] = field(default_factory=list)
    """Those of them of which this rank takes the values of ranks that do not load."""
    parts: set[str] = field(default_factory=set)
    """Prefixes of the parts that the catalogue and the tree both have."""
    declined: list[str] = field(default_factory=list)
    """Those of them that do not take what is stored."""
    refused: list[ShardproofError] = field(default_factory=list)
    """Why parts refuse the whole load."""

    def say_changed(self) -> None:
        """Gives the destinations new versions.

        Bytes are read into memory behind torch's back; whoever watches a tensor's version must see it.
        Tensors made in inference mode keep no version, and are passed over. One call for all takes a quarter
        of the time of one for each.
        """
        views = [piece.view for entry in self.tensors for piece in entry.pieces]
        torch.autograd.graph.increment_version(views)


def describe(dtype: str, shape: tuple[int, ...]) -> str:
    """A tensor's kind, for people.

    >>> describe("float32", (4, 5))
    'tensor float32 [4, 5]'
    """
    return f"tensor {dtype} {list(shape)}"
