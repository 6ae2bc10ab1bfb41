"""The state of one rank as tensors and plain data.

Tied tensors: several keys for the same memory are stored once and tied again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import replace

from shardproof.errors import StructureError
from shardproof.state.last_walk import LastWalk
from shardproof.state.local_shards import LocalShards, described
from shardproof.state.plain.encode import encode
from shardproof.state.records import Collected, ObjectEntry, Piece, Stepped, TensorEntry, describe
from shardproof.state.tensors import same_memory, tensor_of_array
from shardproof.state.visitor import Place, Visitor, check_name, join

__all__ = ["CollectHandler", "Collector", "Hoister", "hoisted_key", "hoisted_tensor", "tie"]


@dataclass(slots=True)
class _Merged:
    """What several tensors of one rank hold of one tensor of the model."""

    row: int
    """Of its entry."""
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], Piece] = field(default_factory=dict)
    """By box: offsets and sizes."""

    def add(self, pieces: tuple[Piece, ...]) -> None:
        """Takes the pieces whose boxes are not there yet."""
        for piece in pieces:
            self.pieces.setdefault((piece.offsets, piece.sizes), piece)


class CollectHandler(Protocol):
    """Collects one kind of value."""

    def collect(self, place: Place, value: Any, out: Collector) -> None:
        """Adds the entries of the value to `out`. Changes nothing of the value."""


@dataclass
class Collector(Visitor[CollectHandler]):
    """Takes the entries of one rank; every key once."""

    last: LastWalk = field(default_factory=LastWalk)
    """What is known of an earlier walk."""
    tensors: list[TensorEntry] = field(default_factory=list)
    """Those whose pieces are known."""
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors and DTensors that are described at the end of the walk, all together."""
    objects: list[ObjectEntry] = field(default_factory=list)
    origins: dict[str, Any] = field(default_factory=dict)
    """Key to its path in the tree; for items of containers, the container's path and the item's segment; for
    slots, that of the parameter."""
    stepped: list[Stepped] = field(default_factory=list)
    """The optimizers of the tree, and what they write."""
    _merged: dict[str, _Merged] = field(default_factory=dict)
    """By key that a layout was declared for: several tensors may be kept under it."""
    _said: dict[str, Any] = field(default_factory=dict)
    """By key, the plain data that several parameters say alike."""

    def visit(self, place: Place, value: Any) -> None:
        """Collect a value of any kind."""
        self.handler_of(value, place).collect(place, value, self)

    def tensor(self, key: str, tensor: torch.Tensor, origin: Any) -> None:
        """Add a tensor or DTensor, which is described at the end of the walk, with the memory it has then."""
        if self._take(key, origin):
            self.whole[key] = tensor
        else:
            (entry,) = self.entries_of([key], [tensor])
            self._merge(entry, origin)

    def pieces(
        self, key: str, dtype: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], origin: Any
    ) -> None:
        """Add a tensor whose pieces are known, under a key that is free or that a layout was declared for."""
        entry = TensorEntry(key, dtype, shape, pieces)
        if self._take(key, origin):
            self.tensors.append(entry)
        else:
            self._merge(entry, origin)

    def laid_out(
        self, key: str, sharded: LocalShards, origin: Any, anchor: torch.Tensor | None = None
    ) -> None:
        """Add what a declared layout makes of a tensor, together with all else under the same key.

        Several tensors of one rank may be parts of one tensor of the model (experts), or copies of it. A box
        that is there already is a replica, and dropped.

        Args:
            key: of the model's tensor.
            sharded: the pieces.
            origin: as for all.
            anchor: the memory that the pieces are of, by which tied tensors without pieces are known.

        Raises:
            StructureError: what is there has another dtype or global shape.
        """
        entry = TensorEntry(key, *described(sharded, key))
        if anchor is not None and not entry.pieces:
            self.anchors[key] = anchor
        if self._take(key, origin):
            self._merged[key] = _Merged(len(self.tensors))
            self.tensors.append(replace(entry, pieces=()))
        elif key not in self._merged:
            if key in self.whole:
                self.tensors += self.entries_of([key], [self.whole.pop(key)])
            row = next((row for row, other in enumerate(self.tensors) if other.key == key), None)
            if row is None:
                raise self._twice(key, origin)
            there = self._merged[key] = _Merged(row)
            there.add(self.tensors[row].pieces)
        self._merge(entry, origin)

    def _take(self, key: str, origin: Any) -> bool:
        """Give a key to what is at `origin`. False, and nothing is changed, if it was given before."""
        if key in self.origins:
            return False
        _check_key(key, origin)
        self.origins[key] = origin
        return True

    def _merge(self, entry: TensorEntry, origin: Any) -> None:
        """Add what is kept under a key that is given already: right where a layout was declared for it."""
        key = entry.key
        merged = self._merged.get(key)
        if merged is None:
            raise self._twice(key, origin)
        there = self.tensors[merged.row]
        if (there.dtype, there.shape) != (entry.dtype, entry.shape):
            raise StructureError(
                f"{_path(self.origins[key])} and {_path(origin)} are kept under one key, {key!r}, but are "
                f"{describe(there.dtype, there.shape)} and {describe(entry.dtype, entry.shape)} in the "
                "model's space. Declare layouts that agree, or another name for one of them",
                key=key,
            )
        merged.add(entry.pieces)

    def object(self, key: str, value: Any, origin: Any) -> None:
        """Add plain data; the tensors and large arrays in it become tensors under keys below `key`."""
        self.encoded(key, encode(value, key, Hoister(key, self, origin)), origin)

    def encoded(self, key: str, data: Any, origin: Any) -> None:
        """Add plain data that is encoded already."""
        if not self._take(key, origin):
            raise self._twice(key, origin)
        self.objects.append(ObjectEntry(key, data))

    def agreed(self, key: str, data: Any, origin: Any) -> None:
        """Add encoded plain data that several parameters under one key all say alike.

        Raises:
            StructureError: it was added before and differs.
        """
        if key not in self._said:
            self.encoded(key, data, origin)
            self._said[key] = data
        elif self._said[key] != data:
            raise StructureError(
                f"{_path(self.origins[key])} and {_path(origin)} are kept under one key, {key!r}, but differ:"
                f" {self._said[key]} and {data}. Parameters that the model keeps as one need the same "
                "options and the same state",
                key=key,
            )

    def result(self) -> Collected:
        """Everything added, sorted and tied."""
        self.finish_walk()
        for merged in self._merged.values():
            pieces = tuple(merged.pieces.values())
            self.tensors[merged.row] = replace(self.tensors[merged.row], pieces=pieces)
        entries = self.tensors + self.last.entries(self.whole, self.entries_of)
        entries.sort(key=_key)
        self.objects.sort(key=_key)
        tied = tie(entries, self.anchors)
        token = object() if self.tensors else self.last.token([entry.alias_of for entry in tied])
        return Collected(tuple(tied), tuple(self.objects), tuple(self.stepped), token)

    def _twice(self, key: str, origin: Any) -> StructureError:
        return StructureError(
            f"two values have the key {key!r}: {_path(self.origins[key])} and {_path(origin)}. "
            "Rename one of them",
            key=key,
        )


class Hoister:
    """Stores the tensors and large arrays inside plain data as tensors of their own."""

    def __init__(self, key: str, out: Collector, origin: Any) -> None:
        self.key = key
        self.out = out
        self.origin = origin
        self.taken: set[str] = set()

    def __call__(self, path: str, kind: str, value: Any) -> str:
        """See `shardproof.state.plain.encode.Hoist`."""
        if "@" in path:
            check_name(path, self.key, _path(self.origin))
        key = hoisted_key(self.key, path, self.taken)
        self.out.tensor(key, hoisted_tensor(kind, value), (self.origin, path))
        return key


def hoisted_key(key: str, path: str, taken: set[str]) -> str:
    """A key below `key` for what lies at `path` in an object; `taken` are the keys that the object uses."""
    hoisted = join(key, path or "@data")
    while hoisted in taken:  # {1: tensor, "1": tensor}
        hoisted += "@"
    taken.add(hoisted)
    return hoisted


def hoisted_tensor(kind: str, value: Any) -> torch.Tensor:
    """What is stored of a value that plain data refers to."""
    if kind == "tensor":
        assert isinstance(value, torch.Tensor)
        return value
    if isinstance(value, np.ndarray):
        return tensor_of_array(value)[0]
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _check_key(key: str, origin: Any) -> None:
    if not key:
        raise StructureError(f"{_path(origin)} has an empty key. Give it a name")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise StructureError(
                f"{_path(origin)} makes a key that is not valid Unicode ({error.reason}). Rename it",
                key=ascii(key),
            ) from error


def _key(entry: TensorEntry | ObjectEntry) -> str:
    return entry.key


def _path(origin: Any) -> str:
    if isinstance(origin, tuple):
        container, segment = origin
        return f"{_path(container)}[{segment!r}]"
    return str(origin)


def tie(entries: Sequence[TensorEntry], anchors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    """The same entries, where each that repeats the memory of an earlier one is an alias of it.

    Args:
        entries: sorted by key, so that every rank picks the same key to store.
        anchors: for entries without pieces, an empty tensor whose storage tells them apart.
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
            identity = _identity(entry, anchors.get(entry.key))
            if identity is not None:
                key = first.setdefault(identity, entry.key)
                if key != entry.key:
                    tied[row] = replace(entry, alias_of=key)
    return tied


def _identity(entry: TensorEntry, anchor: torch.Tensor | None) -> Any:
    if entry.pieces:
        return entry.shape, tuple((same_memory(piece.view), piece.offsets) for piece in entry.pieces)
    return None if anchor is None else (entry.dtype, entry.shape, same_memory(anchor))
