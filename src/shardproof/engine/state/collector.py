"""Collects the state of one rank as tensors and plain data.

Tied tensors have several keys for the same memory. A save stores one of them, and the others as its aliases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import replace

from shardproof.engine.state.dtensor import local_tensor
from shardproof.engine.state.last_walk import LastWalk
from shardproof.engine.state.local_shards import LocalShards, described
from shardproof.engine.state.plain_encode import encode
from shardproof.engine.state.records import Collected, ObjectEntry, Piece, Stepped, TensorEntry, describe
from shardproof.engine.state.subclasses import SUBCLASS, is_wrapper, unwrapped
from shardproof.engine.state.tensors import memory_identity, tensor_of_array
from shardproof.engine.state.visitor import Place, Visitor, check_name, join
from shardproof.errors import StructureError

_KEY = attrgetter("key")


@dataclass(slots=True)
class _MergedEntry:
    """The pieces that several tensors of one rank have of one tensor of the model."""

    row: int
    """Row of the model's tensor in `Collector.tensors`."""
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], Piece] = field(default_factory=dict)
    """Pieces by box (offsets and sizes)."""

    def add(self, pieces: tuple[Piece, ...]) -> None:
        """Adds the pieces whose boxes are new. Others are replicas."""
        for piece in pieces:
            self.pieces.setdefault((piece.offsets, piece.sizes), piece)


class CollectHandler(Protocol):
    """Collects one kind of value."""

    def collect(self, place: Place, value: Any, collector: Collector) -> None:
        """Adds the entries of the value to `collector`. The value does not change."""


@dataclass
class Collector(Visitor[CollectHandler]):
    """Collects the entries of one rank. Every key is unique."""

    last: LastWalk | None = None
    """Cache of an earlier walk, if there are several walks."""
    tensors: list[TensorEntry] = field(default_factory=list)
    """Entries with their pieces."""
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors and DTensors that `result` describes, all together."""
    objects: list[ObjectEntry] = field(default_factory=list)
    origins: dict[str, Any] = field(default_factory=dict)
    """Key to the value's path in the tree. For an item of a container: the container's path and the item's
    segment. For a slot: the path and name of its parameter."""
    stepped: list[Stepped] = field(default_factory=list)
    """The optimizers of the tree, and the tensors that they write."""
    _merged: dict[str, _MergedEntry] = field(default_factory=dict)
    """Entries by key, for keys with a declared layout. Several tensors may have such a key."""
    _common_objects: dict[str, Any] = field(default_factory=dict)
    """Plain data by key, for keys that several parameters share."""

    def visit(self, place: Place, value: Any) -> None:
        """Collects a value of any kind."""
        self.handler_of(value, place).collect(place, value, self)

    def tensor(self, key: str, tensor: torch.Tensor, origin: Any) -> None:
        """Adds a tensor or DTensor. `result` describes the memory that it has at the end of the walk.

        A tensor subclass that wraps other tensors adds its parts.
        """
        if is_wrapper(tensor):
            self._wrapper(key, tensor, origin)
        elif self._claim(key, origin):
            self.whole[key] = tensor
        else:
            (entry,) = self.entries_of([key], [tensor])
            self._merge(entry, origin)

    def _wrapper(self, key: str, tensor: torch.Tensor, origin: Any) -> None:
        wrapped = unwrapped(tensor, key)
        for name, part in wrapped.keys(key):
            if isinstance(part, LocalShards):
                self.pieces(name, *described(part, name), origin=origin)
            else:
                self.tensor(name, part, origin)
        if wrapped.description is not None:
            self.encoded(f"{key}.{SUBCLASS}", wrapped.description, origin)

    def pieces(
        self, key: str, dtype: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], origin: Any
    ) -> None:
        """Adds the pieces of a tensor, under a new key or one with a declared layout."""
        entry = TensorEntry(key, dtype, shape, pieces)
        if self._claim(key, origin):
            self.tensors.append(entry)
        else:
            self._merge(entry, origin)

    def local_shards(
        self, key: str, sharded: LocalShards, origin: Any, anchor: torch.Tensor | None = None
    ) -> None:
        """Adds the pieces of a tensor with a declared layout to the entry of its key.

        Several tensors of one rank may be parts of one tensor of the model (experts), or copies of it. A box
        that the entry already has is a replica, and is ignored.

        Args:
            key: key of the model's tensor.
            sharded: the pieces.
            origin: the value's path, as in `origins`.
            anchor: the local tensor of the pieces. It identifies tied tensors without pieces.

        Raises:
            StructureError: the entry has another dtype or global shape.
        """
        entry = TensorEntry(key, *described(sharded, key))
        if anchor is not None and not entry.pieces:
            self.anchors[key] = anchor
        if self._claim(key, origin):
            self._merged[key] = _MergedEntry(len(self.tensors))
            self.tensors.append(replace(entry, pieces=()))
        elif key not in self._merged:
            if key in self.whole:
                self.tensors += self.entries_of([key], [self.whole.pop(key)])
            row = next((row for row, other in enumerate(self.tensors) if other.key == key), None)
            if row is None:
                raise self._duplicate(key, origin)
            merged = self._merged[key] = _MergedEntry(row)
            merged.add(self.tensors[row].pieces)
        self._merge(entry, origin)

    def _claim(self, key: str, origin: Any) -> bool:
        """Records the origin of a new key. False if the key already has an origin."""
        if key in self.origins:
            return False
        _check_key(key, origin)
        self.origins[key] = origin
        return True

    def _merge(self, entry: TensorEntry, origin: Any) -> None:
        """Adds pieces to the entry of a key with a declared layout. Other keys may not occur twice."""
        key = entry.key
        merged = self._merged.get(key)
        if merged is None:
            raise self._duplicate(key, origin)
        first = self.tensors[merged.row]
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            raise StructureError(
                f"{_path(self.origins[key])} and {_path(origin)} have the same key {key!r}, but are "
                f"{describe(first.dtype, first.shape)} and {describe(entry.dtype, entry.shape)} in the "
                "model. Declare layouts that agree, or rename one of them",
                key=key,
            )
        merged.add(entry.pieces)

    def object(self, key: str, value: Any, origin: Any) -> None:
        """Adds plain data. Its tensors and large arrays become tensors under keys below `key`."""
        self.encoded(key, encode(value, key, Hoister(key, self, origin)), origin)

    def encoded(self, key: str, data: Any, origin: Any) -> None:
        """Adds encoded plain data."""
        if not self._claim(key, origin):
            raise self._duplicate(key, origin)
        self.objects.append(ObjectEntry(key, data))

    def common_object(self, key: str, data: Any, origin: Any) -> None:
        """Adds encoded plain data that must be equal for all parameters with this key.

        Raises:
            StructureError: the key already has different data.
        """
        if key not in self._common_objects:
            self.encoded(key, data, origin)
            self._common_objects[key] = data
        elif self._common_objects[key] != data:
            raise StructureError(
                f"{_path(self.origins[key])} and {_path(origin)} have the same key {key!r}, but differ: "
                f"{self._common_objects[key]} and {data}. Parameters with one key need the same options and "
                "the same state",
                key=key,
            )

    def result(self) -> Collected:
        """All entries of the finished walk, sorted, with aliases."""
        for merged in self._merged.values():
            pieces = tuple(merged.pieces.values())
            self.tensors[merged.row] = replace(self.tensors[merged.row], pieces=pieces)
        last = self.last
        if last is None:
            entries = self.tensors + self.entries_of(list(self.whole), list(self.whole.values()))
        else:
            entries = self.tensors + last.entries(self.whole, self.entries_of)
        entries.sort(key=_KEY)
        self.objects.sort(key=_KEY)
        tied = tie(entries, self.anchors)
        token = object()
        if last is not None and not self.tensors:
            token = last.token([entry.alias_of for entry in tied])
        meshes = self.layouts.meshes() if last is None else self.layouts.meshes() + last.meshes()
        each_once = {id(mesh): mesh for mesh in meshes}.values()
        return Collected(tuple(tied), tuple(self.objects), tuple(self.stepped), token, tuple(each_once))

    def _duplicate(self, key: str, origin: Any) -> StructureError:
        return StructureError(
            f"two values have the key {key!r}: {_path(self.origins[key])} and {_path(origin)}. "
            "Rename one of them",
            key=key,
        )


class Hoister:
    """Stores the tensors and large arrays inside plain data as separate tensors."""

    def __init__(self, key: str, collector: Collector, origin: Any) -> None:
        self.key = key
        self.collector = collector
        self.origin = origin
        self.used: set[str] = set()

    def __call__(self, path: str, kind: str, value: Any) -> str:
        """See `shardproof.engine.state.plain_encode.Hoist`."""
        if "@" in path:
            check_name(path, self.key, _path(self.origin))
        key = hoisted_key(self.key, path, self.used)
        if kind == "tensor" and is_wrapper(value):
            self._check_wrapper(key, value)
        tensor = hoisted_tensor(kind, value)
        self.collector.note_loose([(key, tensor)])
        self.collector.tensor(key, tensor, (self.origin, path))
        return key

    @staticmethod
    def _check_wrapper(key: str, tensor: torch.Tensor) -> None:
        """Refuses a wrapper that a load could not make again, since it knows neither layout nor class."""
        if not all(
            isinstance(part, torch.Tensor) and not name for name, part in unwrapped(tensor, key).keys("")
        ):
            raise StructureError(
                f"{key}: a {type(local_tensor(tensor)).__qualname__} in the state of an object cannot be "
                "restored. Put the model or the optimizer that has it into the state tree itself",
                key=key,
            )


def hoisted_key(key: str, path: str, used: set[str]) -> str:
    """A new key below `key` for the tensor at `path` in an object. Adds it to the object's `used` keys."""
    hoisted = join(key, path or "@data")
    while hoisted in used:  # {1: tensor, "1": tensor}
        hoisted += "@"
    used.add(hoisted)
    return hoisted


def hoisted_tensor(kind: str, value: Any) -> torch.Tensor:
    """The tensor to store for a value that plain data refers to."""
    if kind == "tensor":
        assert isinstance(value, torch.Tensor)
        return value
    if isinstance(value, np.ndarray):
        return tensor_of_array(value)[0]
    if not value:  # torch.frombuffer rejects an empty buffer
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _check_key(key: str, origin: Any) -> None:
    if not key:
        raise StructureError(f"{_path(origin)} has an empty key. Use a non-empty name")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise StructureError(
                f"{_path(origin)} has a key that is not valid Unicode ({error.reason}). Rename it",
                key=ascii(key),
            ) from error


def _path(origin: Any) -> str:
    if isinstance(origin, tuple):
        container, segment = origin
        return f"{_path(container)}[{segment!r}]"
    return str(origin)


def tie(entries: Sequence[TensorEntry], anchors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    """The same entries. Each entry with the memory of an earlier one becomes an alias of it.

    Args:
        entries: sorted by key, so that every rank chooses the same key to store.
        anchors: for entries without pieces, an empty tensor whose storage identifies them.
    """
    tied = list(entries)
    addresses = [entry.pieces[0].address if entry.pieces else 0 for entry in tied]
    if len(set(addresses)) == len(addresses):
        return tied
    shared = {address for address, count in Counter(addresses).items() if count > 1}
    by_address: dict[int, list[int]] = {}
    for row, address in enumerate(addresses):
        if address in shared:
            by_address.setdefault(address, []).append(row)
    for rows in by_address.values():
        first: dict[Any, str] = {}
        for row in rows:
            entry = tied[row]
            identity: Any
            if entry.pieces:
                memory = tuple((memory_identity(piece.view), piece.offsets) for piece in entry.pieces)
                identity = entry.shape, memory
            elif (anchor := anchors.get(entry.key)) is not None:
                identity = entry.dtype, entry.shape, memory_identity(anchor)
            else:
                continue
            key = first.setdefault(identity, entry.key)
            if key != entry.key:
                tied[row] = replace(entry, alias_of=key)
    return tied
