"""The state of one rank as tensors and plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardproof.errors import StructureError
from shardproof.state.aliases import tie
from shardproof.state.entries import Collected, ObjectEntry, Piece, TensorEntry
from shardproof.state.plain import encode
from shardproof.state.tensors import pieces_of, tensor_of_array
from shardproof.state.visiting import Place, Visitor, join

__all__ = ["Collector", "Hoister", "hoisted_key", "hoisted_tensor"]


@dataclass
class Collector(Visitor):
    """Takes the entries of one rank; every key once."""

    tensors: list[TensorEntry] = field(default_factory=list)
    objects: list[ObjectEntry] = field(default_factory=list)
    anchors: dict[str, torch.Tensor] = field(default_factory=dict)
    origins: dict[str, Any] = field(default_factory=dict)
    """Key to its path in the tree; for items of containers, the container's path and the item's segment."""

    def visit(self, place: Place, value: Any) -> None:
        """Collect a value of any kind."""
        self.handler_of(value, place).collect(place, value, self)

    def tensor(self, key: str, tensor: torch.Tensor, origin: Any) -> None:
        """Add a tensor or DTensor."""
        dtype, shape, pieces, local = pieces_of(tensor, key)
        if not pieces:
            self.anchors[key] = local
        self.add(TensorEntry(key, dtype, shape, pieces), origin)

    def pieces(
        self, key: str, dtype: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], origin: Any
    ) -> None:
        """Add a tensor whose pieces are known."""
        self.add(TensorEntry(key, dtype, shape, pieces), origin)

    def add(self, entry: TensorEntry, origin: Any) -> None:
        """Add an entry under a key that is not taken."""
        _check_key(entry.key, origin)
        if self.origins.setdefault(entry.key, origin) is not origin:
            raise self._twice(entry.key, origin)
        self.tensors.append(entry)

    def object(self, key: str, value: Any, origin: Any) -> None:
        """Add plain data; the tensors and large arrays in it become tensors under keys below `key`."""
        self.encoded(key, encode(value, key, Hoister(key, self, origin)), origin)

    def encoded(self, key: str, data: Any, origin: Any) -> None:
        """Add plain data that is encoded already."""
        _check_key(key, origin)
        if key in self.origins:
            raise self._twice(key, origin)
        self.origins[key] = origin
        self.objects.append(ObjectEntry(key, data))

    def result(self) -> Collected:
        """Everything added, sorted and tied."""
        self.finish_walk()
        self.tensors.sort(key=_key)
        self.objects.sort(key=_key)
        return Collected(tuple(tie(self.tensors, self.anchors)), tuple(self.objects))

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
        """See `shardproof.state.plain.Hoist`."""
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
