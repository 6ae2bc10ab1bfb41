"""Binds a state tree to a checkpoint: destinations for its tensors, and calls for the end of the load."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, Protocol

import torch

from shardproof.engine.state.collector import hoisted_key, tie
from shardproof.engine.state.local_shards import LocalShards, described
from shardproof.engine.state.plain_decode import decode, references
from shardproof.engine.state.plain_encode import encode
from shardproof.engine.state.records import Binding, Catalogue, Mismatch, Piece, TensorEntry, describe
from shardproof.engine.state.subclass_binding import bind_wrapper
from shardproof.engine.state.subclasses import is_wrapper
from shardproof.engine.state.tensors import check_destination, empty_like_layout, torch_dtype
from shardproof.engine.state.visitor import Place, Visitor, blocks
from shardproof.errors import PlainDataError, StructureError

_log = logging.getLogger("shardproof")

MISSING: Any = object()
"""Returned by `Binder.object` if there is nothing to set."""


class BindHandler(Protocol):
    """Binds one kind of value."""

    def bind(self, place: Place, value: Any, binder: Binder) -> None:
        """Requests the entries of the value. The value does not change before `Binding.finish`."""


@dataclass(kw_only=True)
class Binder(Visitor[BindHandler]):
    """Matches the values of a tree with the entries of a catalogue, and builds the `Binding`."""

    binding: Binding
    selected: Callable[[str], bool]
    strict: bool
    _keys: list[str] = field(default_factory=list)
    """Keys of the tensors to fill. `result` describes all these tensors together."""
    _tensors: list[torch.Tensor] = field(default_factory=list)
    _sorted: list[str] = field(default_factory=list)
    """All keys of the catalogue, once `keys_below` needs them."""
    _absent: list[TensorEntry] = field(default_factory=list)
    """Destinations whose key the catalogue lacks."""

    @property
    def catalogue(self) -> Catalogue:
        """The contents of the checkpoint."""
        return self.binding.catalogue

    def translate(self, catalogue: Catalogue, stored_keys: Mapping[str, str]) -> None:
        """Replaces the catalogue by one with other keys for the same contents.

        `stored_keys` maps the new key of a tensor to its key in the checkpoint.
        """
        old = self.catalogue
        replaced = (old.tensors.keys() | old.objects.keys()).difference(catalogue.tensors, catalogue.objects)
        self.binding.used.update(replaced)  # under their new keys
        self.binding.catalogue = catalogue
        self.binding.stored_keys.update(stored_keys)
        self._sorted = []

    def visit(self, place: Place, value: Any) -> None:
        """Bind a value of any kind."""
        self.handler_of(value, place).bind(place, value, self)

    def tensor(self, key: str, tensor: torch.Tensor) -> bool:
        """Adds a tensor or DTensor as a destination. True if the catalogue has a tensor of its shape."""
        if is_wrapper(tensor):
            return bind_wrapper(key, tensor, self)
        if not self.selected(key):
            return False
        self.fill(key, tensor)
        found = self.catalogue.tensors.get(key)
        return found is not None and found[1] == tensor.shape

    def tensors(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Adds tensors as destinations, each under its key."""
        if any(map(is_wrapper, tensors)):
            for key, tensor in zip(keys, tensors, strict=True):
                self.tensor(key, tensor)
            return
        chosen = list(map(self.selected, keys))
        self._keys += compress(keys, chosen)
        self._tensors += compress(tensors, chosen)

    def pieces(self, key: str, dtype: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
        """Adds pieces as destinations. True if the catalogue has a tensor of their shape."""
        return self.selected(key) and self._add([TensorEntry(key, dtype, shape, pieces)])

    def local_shards(self, key: str, sharded: LocalShards, anchor: torch.Tensor | None = None) -> bool:
        """Adds the pieces of a tensor with a declared layout as destinations. True if they fit the catalogue.

        A load may fill several tensors from one key. The elements of a piece may share one address (one step
        count for several experts). Then the load reads into separate memory, and requires equal elements.
        """
        if not self.selected(key):
            return False
        dtype, shape, pieces = described(sharded, key)
        if anchor is not None and not pieces:
            self.anchors[key] = anchor
        destinations = tuple(_with_own_memory(piece) for piece in pieces)
        fits = self._add([TensorEntry(key, dtype, shape, destinations)])
        if fits:
            for piece, own in zip(pieces, destinations, strict=True):
                if own is not piece:
                    self.on_finish(partial(_write_shared, key, own.view, piece.view))
        return fits

    def _add(self, entries: Sequence[TensorEntry]) -> bool:
        """Adds the entries that fit the catalogue as destinations. True if all fit."""
        keys = [entry.key for entry in entries]
        self.binding.used.update(keys)
        stored = list(map(self.catalogue.tensors.get, keys))
        if stored != [(entry.dtype, entry.shape) for entry in entries]:
            entries = [
                entry for entry, found in zip(entries, stored, strict=True) if self._fits(entry, found)
            ]
        for entry in entries:
            for piece in entry.pieces:
                if not piece.is_plain:
                    check_destination(piece.view, entry.key)
        self.binding.tensors += entries
        return len(entries) == len(keys)

    def _fits(self, entry: TensorEntry, found: tuple[str, tuple[int, ...]] | None) -> bool:
        """True if the stored tensor has the destination's shape. Otherwise records why not."""
        if found is None:
            if not self._note_other_kind(entry.key, describe(entry.dtype, entry.shape)):
                self._absent.append(entry)
        elif found[1] != entry.shape:
            self.mismatch(entry.key, describe(entry.dtype, entry.shape), describe(*found))
        else:
            self.binding.converts |= found[0] != entry.dtype
            return True
        return False

    def object(self, key: str, expected: str = "a plain value") -> Any:
        """The encoded plain data under a key, or MISSING. A selected key without plain data is recorded.

        `expected` describes the target's value, for messages.
        """
        if not self.selected(key):
            return MISSING
        self.binding.used.add(key)
        data = self.catalogue.objects.get(key, MISSING)
        advice = ": give the target a tensor like it, or exclude it"
        if data is MISSING and not self._note_other_kind(key, expected, advice):
            self.binding.missing.append(key)
        return data

    def rebuild(self, key: str, data: Any, current: Callable[[], Any] | None = None) -> Callable[[], Any]:
        """Returns a function that decodes the object at `key`. Call it after all tensors are read.

        Args:
            key: key of the object.
            data: the encoded object.
            current: returns the target's present value. If it has a tensor at the same path with the same
                global shape, the new tensor gets the same layout (as a DTensor, or on a device).

        Raises:
            PlainDataError: the data cannot be decoded. This is raised before any target changes.
        """
        needed = list(references(data))
        layouts = self._layouts(key, current()) if needed and current is not None else {}
        fresh: dict[str, torch.Tensor] = {}
        placeholders: dict[str, torch.Tensor] = {}
        for name, kind in needed:
            found = self.catalogue.tensors.get(name)
            if found is None:
                self.binding.used.add(name)
                if not self._note_other_kind(name, "a tensor that a plain value refers to"):
                    self.binding.missing.append(name)
                placeholders[name] = torch.empty(0, dtype=torch.float32, device="cpu")
                continue
            dtype, shape = torch_dtype(found[0]), tuple(found[1])
            placeholders[name] = torch.empty((0,) * len(shape), dtype=dtype, device="cpu")
            like = layouts.get(name) if kind == "tensor" else None
            if name not in fresh:
                fresh[name] = self.fresh(name, dtype, shape, like)
        decode(data, placeholders.__getitem__, key)
        return lambda: decode(data, fresh.__getitem__, key)

    @torch.inference_mode(False)
    def fresh(
        self, key: str, dtype: torch.dtype, shape: tuple[int, ...], like: torch.Tensor | None
    ) -> torch.Tensor:
        """A new destination for a stored tensor. It is no inference tensor, so training can use it."""
        if like is not None and tuple(like.shape) == shape:
            tensor = empty_like_layout(like, dtype)
        else:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self.fill(key, tensor)
        return tensor

    def fill(self, key: str, tensor: torch.Tensor) -> None:
        """Adds a tensor as a destination, even if its key is not selected."""
        self._keys.append(key)
        self._tensors.append(tensor)

    def mismatch(self, key: str, expected: str, found: str) -> None:
        """Records that target and checkpoint disagree."""
        self.binding.mismatched.append(Mismatch(key, expected, found))

    def on_finish(self, act: Callable[[], None]) -> None:
        """Adds a call for the time after all tensors are read."""
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

    def selected_below(self, key: str) -> list[str]:
        """Selected keys of the catalogue below a key."""
        return list(filter(self.selected, self.keys_below(f"{key}.")))

    def put_of(self, place: Place) -> Callable[[Any], None]:
        """The function that replaces the value at a place."""
        if place.put is None:
            raise StructureError(
                f"{place.path} cannot be replaced by the loaded value: it is in no mutable container. "
                "Put it into a dict",
                key=place.key,
            )
        return place.put

    def result(self) -> Binding:
        """The binding of the finished walk."""
        for block in blocks(len(self._keys)):
            entries = self.entries_of(self._keys[block], self._tensors[block], detach=False)
            pieces = [piece for entry in entries for piece in entry.pieces]
            self.binding.storages += [piece.view.untyped_storage() for piece in pieces]
            self._add(entries)
        if self._absent:  # a tied tensor needs one of its keys only
            present = self.binding.tensors
            filled = {entry.key for entry in present}
            tied = tie([*present, *self._absent], self.anchors)[len(present) :]
            self.binding.missing += [entry.key for entry in tied if entry.alias_of not in filled]
        self.binding.tensors = tie(sorted(self.binding.tensors, key=lambda entry: entry.key), self.anchors)
        return self.binding

    def _layouts(self, key: str, value: Any) -> dict[str, torch.Tensor]:
        layouts: dict[str, torch.Tensor] = {}
        used: set[str] = set()

        def note(path: str, kind: str, value: Any) -> str:
            name = hoisted_key(key, path, used)
            if kind == "tensor":
                layouts[name] = value
            return name

        try:
            encode(value, key, note)
        except PlainDataError:
            pass  # the load replaces the target's present value, and needs only its layouts
        self.note_loose(layouts.items())
        return layouts

    def _note_other_kind(self, key: str, expected: str, advice: str = "") -> bool:
        """Records that the catalogue has a value of another kind under a key. False if it has no value."""
        if key in self.catalogue.objects:
            found = "a plain value"
            try:
                self.catalogue.objects[key]
            except PlainDataError as error:
                found = f"a value that cannot be read: {error.message}"
            self.mismatch(key, expected, found)
        elif key in self.catalogue.tensors:
            dtype, shape = self.catalogue.tensors[key]
            self.mismatch(key, expected, describe(dtype, tuple(shape)) + advice)
        elif below := self.selected_below(key):
            return self.note_below(key, expected, below, "give the target the same keys, or exclude it")
        else:
            return False
        return True

    def note_below(self, key: str, expected: str, below: Sequence[str], advice: str) -> bool:
        """Records that the catalogue has only keys below a key. Without `strict`: warns, returns False."""
        count = f"{len(below)} keys" if len(below) > 1 else "a key"
        found = f"{count} below it ({', '.join(below[:3])}): {advice}"
        if below[0].startswith(f"{key}.@rank-"):
            found = "per-rank values: wrap the target's value in shardproof.PerRank, or exclude it"
        if self.strict:
            self.binding.used.update(below)
            self.mismatch(key, expected, found)
        else:  # on each rank: others may have no such object, or know how its keys are nested
            _log.warning("%s is left as it is: expected %s, found %s", key, expected, found)
        return self.strict


def _with_own_memory(piece: Piece) -> Piece:
    """The piece itself, or, if its elements share an address, a piece with memory for every element."""
    view = piece.view
    if all(stride or size == 1 for stride, size in zip(view.stride(), view.shape, strict=True)):
        return piece
    return Piece.of(torch.empty_like(view, memory_format=torch.contiguous_format), piece.offsets, piece.sizes)


def _write_shared(key: str, read: torch.Tensor, view: torch.Tensor) -> None:
    """Writes the value that was read for several elements to the address that they share."""
    first = read.flatten()[0]
    if not bool((read == first).all()):
        raise StructureError(
            f"{key}: the checkpoint has the values {read.tolist()} for experts that share one value in the "
            "target. Load into experts with separate parameters, or exclude this key",
            key=key,
        )
    view[(slice(0, 1),) * view.dim()] = first
