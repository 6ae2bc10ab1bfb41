"""A state tree bound to a checkpoint: destinations for its tensors, and what is to be done after."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, Protocol

import torch

from shardproof.errors import PlainDataError, StructureError
from shardproof.state.collector import hoisted_key, tie
from shardproof.state.descriptions import blocks
from shardproof.state.local_shards import LocalShards, described
from shardproof.state.plain.decode import decode, references
from shardproof.state.plain.encode import encode
from shardproof.state.records import Binding, Catalogue, Mismatch, Piece, TensorEntry, describe
from shardproof.state.tensors import check_destination, empty_like_layout, torch_dtype
from shardproof.state.visitor import Place, Visitor

__all__ = ["MISSING", "BindHandler", "Binder"]

MISSING: Any = object()
"""What `Binder.object` answers where there is nothing to set."""


class BindHandler(Protocol):
    """Binds one kind of value."""

    def bind(self, place: Place, value: Any, to: Binder) -> None:
        """Asks `to` for the entries of the value. Changes nothing of the value before `Binding.finish`."""


@dataclass(kw_only=True)
class Binder(Visitor[BindHandler]):
    """Answers what the catalogue holds and notes what the tree asked for."""

    catalogue: Catalogue
    selected: Callable[[str], bool]
    strict: bool
    binding: Binding = field(default_factory=Binding)
    _keys: list[str] = field(default_factory=list)
    """Of the tensors to fill, which are described at the end of the walk, all together."""
    _tensors: list[torch.Tensor] = field(default_factory=list)
    _sorted: list[str] = field(default_factory=list)

    def visit(self, place: Place, value: Any) -> None:
        """Bind a value of any kind."""
        self.handler_of(value, place).bind(place, value, self)

    def tensor(self, key: str, tensor: torch.Tensor) -> bool:
        """Let a tensor or DTensor be filled in place. Whether it will be."""
        if not self.selected(key):
            return False
        self.fill(key, tensor)
        found = self.catalogue.tensors.get(key)
        return found is not None and found[1] == tensor.shape

    def tensors(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Let many be filled in place, each from its key."""
        chosen = list(map(self.selected, keys))
        self._keys += compress(keys, chosen)
        self._tensors += compress(tensors, chosen)

    def pieces(self, key: str, dtype: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
        """Let pieces be filled in place. Whether they will be."""
        return self.selected(key) and self._add([TensorEntry(key, dtype, shape, pieces)])

    def laid_out(self, key: str, sharded: LocalShards, anchor: torch.Tensor | None = None) -> bool:
        """Let what a declared layout makes of a tensor be filled in place. Whether it will be.

        Several tensors may be filled from one key. A piece whose elements share one place (a step count kept
        once for several experts) is filled from memory of its own, if all its elements are stored equal.
        """
        if not self.selected(key):
            return False
        dtype, shape, pieces = described(sharded, key)
        if anchor is not None and not pieces:
            self.anchors[key] = anchor
        filled = tuple(_unshared(piece) for piece in pieces)
        taken = self._add([TensorEntry(key, dtype, shape, filled)])
        if taken:
            for piece, own in zip(pieces, filled, strict=True):
                if own is not piece:
                    self.later_on(partial(_share, key, own.view, piece.view))
        return taken

    def _add(self, entries: Sequence[TensorEntry]) -> bool:
        """Add entries as destinations, where they fit. Whether all do."""
        keys = [entry.key for entry in entries]
        self.binding.used.update(keys)
        stored = list(map(self.catalogue.tensors.get, keys))
        if stored != [(entry.dtype, entry.shape) for entry in entries]:
            entries = [
                entry for entry, found in zip(entries, stored, strict=True) if self._takes(entry, found)
            ]
        for entry in entries:
            for piece in entry.pieces:
                if not piece.is_plain:
                    check_destination(piece.view, entry.key)
        self.binding.tensors += entries
        return len(entries) == len(keys)

    def _takes(self, entry: TensorEntry, found: tuple[str, tuple[int, ...]] | None) -> bool:
        """Whether a destination takes what is stored under its key; what does not fit is noted."""
        if found is None:
            self._lacking(entry.key, describe(entry.dtype, entry.shape))
        elif found[1] != entry.shape:
            self.mismatch(entry.key, describe(entry.dtype, entry.shape), describe(*found))
        else:
            self.binding.converts |= found[0] != entry.dtype
            return True
        return False

    def object(self, key: str, expected: str = "a plain value") -> Any:
        """The plain data stored under a key, still encoded; MISSING, and noted so, where there is none.

        Args:
            key: of the object.
            expected: what the target has there, for people.
        """
        if not self.selected(key):
            return MISSING
        self.binding.used.add(key)
        data = self.catalogue.objects.get(key, MISSING)
        if data is MISSING:
            self._lacking(key, expected, ": give the target a tensor like it, or exclude it")
        return data

    def rebuild(self, key: str, data: Any, current: Callable[[], Any] | None = None) -> Callable[[], Any]:
        """How to decode the object at `key` once its tensors are read.

        Args:
            key: of the object.
            data: as stored.
            current: answers the value that the target has now; where it holds a tensor of the same path and
                global shape, the new tensor is laid out the same (a DTensor, on a device).

        Raises:
            PlainDataError: the data cannot be decoded. Known now, while no target has been touched.
        """
        needed = list(references(data))
        layouts = self._layouts(key, current()) if needed and current is not None else {}
        fresh: dict[str, torch.Tensor] = {}
        standing_in: dict[str, torch.Tensor] = {}
        for name, kind in needed:
            found = self.catalogue.tensors.get(name)
            if found is None:
                self.binding.used.add(name)
                self._lacking(name, "a tensor that a plain value refers to")
                standing_in[name] = torch.empty(0, dtype=torch.float32, device="cpu")
                continue
            dtype, shape = torch_dtype(found[0]), tuple(found[1])
            standing_in[name] = torch.empty((0,) * len(shape), dtype=dtype, device="cpu")
            like = layouts.get(name) if kind == "tensor" else None
            if name not in fresh:
                fresh[name] = self.fresh(name, dtype, shape, like)
        decode(data, standing_in.__getitem__, key)
        return lambda: decode(data, fresh.__getitem__, key)

    @torch.inference_mode(False)
    def fresh(
        self, key: str, dtype: torch.dtype, shape: tuple[int, ...], like: torch.Tensor | None
    ) -> torch.Tensor:
        """A new destination for a stored tensor, which training may use after a load in inference mode."""
        if like is not None and tuple(like.shape) == shape:
            tensor = empty_like_layout(like, dtype)
        else:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self.fill(key, tensor)
        return tensor

    def fill(self, key: str, tensor: torch.Tensor) -> None:
        """Let a tensor be filled, whether or not its own key is selected."""
        self._keys.append(key)
        self._tensors.append(tensor)

    def mismatch(self, key: str, expected: str, found: str) -> None:
        """Note that target and checkpoint disagree."""
        self.binding.mismatched.append(Mismatch(key, expected, found))

    def later_on(self, act: Callable[[], None]) -> None:
        """Do something once all tensors are read."""
        self.binding.finish.append(act)

    def keys_below(self, prefix: str) -> list[str]:
        """Keys of the catalogue that start with `prefix`."""
        if not self._sorted:
            self._sorted = sorted([*self.catalogue.tensors, *self.catalogue.objects])
        first = bisect_left(self._sorted, prefix)
        last = first
        while last < len(self._sorted) and self._sorted[last].startswith(prefix):
            last += 1
        return self._sorted[first:last]

    def put_of(self, place: Place) -> Callable[[Any], None]:
        """How to replace the value at a place."""
        if place.put is None:
            raise StructureError(
                f"{place.path} cannot be replaced by what is loaded: it is in no container. "
                "Hand over a dict that holds it",
                key=place.key,
            )
        return place.put

    def result(self) -> Binding:
        """The whole binding."""
        self.finish_walk()
        for block in blocks(len(self._keys)):
            entries = self.entries_of(self._keys[block], self._tensors[block], detach=False)
            pieces = [piece for entry in entries for piece in entry.pieces]
            self.binding.storages += [piece.view.untyped_storage() for piece in pieces]
            self._add(entries)
        self.binding.tensors = tie(sorted(self.binding.tensors, key=lambda entry: entry.key), self.anchors)
        return self.binding

    def _layouts(self, key: str, value: Any) -> dict[str, torch.Tensor]:
        layouts: dict[str, torch.Tensor] = {}
        taken: set[str] = set()

        def note(path: str, kind: str, value: Any) -> str:
            name = hoisted_key(key, path, taken)
            if kind == "tensor":
                layouts[name] = value
            return name

        try:
            encode(value, key, note)
        except PlainDataError:
            pass  # the target's present value will be replaced; only its layouts were of interest
        return layouts

    def _lacking(self, key: str, expected: str, advice: str = "") -> None:
        """Note that the catalogue has something else under a key, or nothing.

        Args:
            key: of the target.
            expected: what the target has there.
            advice: what to do where the catalogue has a tensor.
        """
        if key in self.catalogue.objects:
            self.mismatch(key, expected, "a plain value")
        elif key in self.catalogue.tensors:
            dtype, shape = self.catalogue.tensors[key]
            self.mismatch(key, expected, describe(dtype, tuple(shape)) + advice)
        elif below := self._selected_below(key):
            self.binding.used.update(below)
            self.mismatch(key, expected, _described(key, below))
        else:
            self.binding.missing.append(key)

    def _selected_below(self, key: str) -> list[str]:
        """Keys of the catalogue below one that it lacks, where that is a fault."""
        return [name for name in self.keys_below(f"{key}.") if self.selected(name)] if self.strict else []


def _unshared(piece: Piece) -> Piece:
    """The piece itself, or one with memory for every element where elements share one place."""
    view = piece.view
    if all(stride or size == 1 for stride, size in zip(view.stride(), view.shape, strict=True)):
        return piece
    return Piece.of(torch.empty_like(view, memory_format=torch.contiguous_format), piece.offsets, piece.sizes)


def _share(key: str, read: torch.Tensor, view: torch.Tensor) -> None:
    """Put what was read for several elements into the one place that they share."""
    first = read.flatten()[0]
    if not bool((read == first).all()):
        raise StructureError(
            f"{key}: the checkpoint has the values {read.tolist()} for experts that share one value here. "
            "Load into experts that are parameters of their own, or exclude this key",
            key=key,
        )
    view[(slice(0, 1),) * view.dim()] = first


def _described(key: str, below: list[str]) -> str:
    """Keys that the checkpoint has below one of the target, and what to do."""
    if below[0].startswith(f"{key}.@rank-"):
        return "values of each rank's own: wrap the target's in shardproof.PerRank, or exclude it"
    count = f"{len(below)} keys" if len(below) > 1 else "a key"
    return f"{count} below it ({', '.join(below[:3])}): give the target the same keys, or exclude it"
