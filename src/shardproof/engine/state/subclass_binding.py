"""Binds wrappers of other tensors to a checkpoint; see "kinds of parts" in `engine.state.subclasses`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from shardproof.engine.state.dtensor import local_tensor
from shardproof.engine.state.local_shards import LocalShards, described
from shardproof.engine.state.records import Binding, Catalogue, Piece, describe
from shardproof.engine.state.subclasses import SUBCLASS, Wrapped, new_wrapper, shape_on_rank, unwrapped
from shardproof.engine.state.tensors import empty_like_layout, torch_dtype
from shardproof.errors import StructureError


class Destinations(Protocol):
    """The part of `shardproof.engine.state.binder.Binder` that wrappers need."""

    binding: Binding

    @property
    def catalogue(self) -> Catalogue:
        """The contents of the checkpoint."""

    @property
    def selected(self) -> Callable[[str], bool]:
        """Returns True for each key to load."""

    def tensor(self, key: str, tensor: torch.Tensor) -> bool:
        """Adds a tensor or DTensor as a destination. True if the catalogue has a tensor of its shape."""

    def pieces(self, key: str, dtype: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
        """Adds pieces as destinations. True if the catalogue has a tensor of their shape."""

    def mismatch(self, key: str, expected: str, found: str) -> None:
        """Records that target and checkpoint disagree."""

    def on_finish(self, act: Callable[[], None]) -> None:
        """Adds a call for the time after all tensors are read."""


def bind_wrapper(key: str, tensor: torch.Tensor, to: Destinations) -> bool:
    """Adds the parts of a wrapper as destinations. True if the catalogue has an equal wrapper.

    Raises:
        StructureError: the load selects some parts, and not others.
    """
    wrapped = unwrapped(tensor, key)
    if not wrapped.parts:
        stored = stored_wrapper(key, to.catalogue)
        to.binding.used.update(stored.keys if stored is not None and to.selected(key) else ())
        return True
    if wrapped.description is not None and not _fits(key, wrapped, to):
        return False
    filled = [
        to.pieces(name, *described(part, name)) if isinstance(part, LocalShards) else to.tensor(name, part)
        for name, part in wrapped.keys(key)
    ]
    local = local_tensor(tensor)
    for name in wrapped.derived:
        to.on_finish(partial(setattr, local, name, None))
    return all(filled)


def _fits(key: str, wrapped: Wrapped, to: Destinations) -> bool:
    """True if the load selects the wrapper, and the stored one is equal but for its values."""
    name = f"{key}.{SUBCLASS}"
    keys = [name, *(part for part, _ in wrapped.keys(key))]
    selected = list(filter(to.selected, keys))
    if not selected:
        return False
    if len(selected) < len(keys):
        raise StructureError(
            f"{key}: include and exclude select {len(selected)} of the {len(keys)} keys of a tensor subclass "
            f"({', '.join(selected[:3])}). Include or exclude {key!r}",
            key=key,
        )
    own, found = wrapped.description, to.catalogue.objects.get(name)
    to.binding.used.add(name)
    if found == own:
        return True
    assert own is not None
    if found is not None:
        to.binding.used.update(keys)
        expected, stored = str(own), str(found)
        if isinstance(found, dict):
            differing = [part for part in own if own[part] != found.get(part)]
            expected, stored = (
                ", ".join(f"{part} {of.get(part)}" for part in differing) for of in (own, found)
            )
        to.mismatch(name, expected, stored)
    elif key in to.catalogue.tensors:
        to.binding.used.add(key)
        to.mismatch(
            key,
            f"a {own['class']} {own['shape']}",
            f"{describe(*to.catalogue.tensors[key])}: load first, and quantise the tensor then",
        )
    else:
        to.binding.missing.append(name)
    return False


@dataclass(frozen=True, slots=True)
class StoredWrapper:
    """A wrapper in a checkpoint, for a target that has none yet."""

    key: str
    description: dict[str, Any]
    parts: dict[str, tuple[str, tuple[int, ...]]]
    """Name to dtype and global shape."""

    @property
    def keys(self) -> list[str]:
        """The keys of its parts, and of its object."""
        return [f"{self.key}.{SUBCLASS}", *(f"{self.key}.{name}" for name in self.parts)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the wrapper shows."""
        return torch_dtype(self.description["dtype"])

    def new(self, parameter: torch.Tensor) -> torch.Tensor:
        """A new wrapper of the parameter's shard, on its device. A rank with an empty shard gets a plain one.

        Raises:
            StructureError: the shard cuts a block, the parameter has another shape, or the program has not
                imported the class.
        """
        if list(parameter.shape) != self.description["shape"]:
            raise StructureError(
                f"{self.key}: the stored {self.description['class']} has shape {self.description['shape']}, "
                f"but its parameter has {list(parameter.shape)}",
                key=self.key,
            )
        local = local_tensor(parameter)
        if not local.numel():
            return empty_like_layout(parameter, self.dtype)
        parts = {}
        for name, (dtype, shape) in self.parts.items():
            kind = self.description["parts"][name]
            on_rank = shape if kind == "whole" else shape_on_rank(self.description, name, parameter, self.key)
            parts[name] = torch.zeros(on_rank, dtype=torch_dtype(dtype), device=local.device)
        return new_wrapper(self.description, parts, parameter, self.key)


def is_empty_shard(key: str, tensor: torch.Tensor, catalogue: Catalogue) -> bool:
    """True for a plain tensor without elements on this rank, of which other ranks have a stored wrapper."""
    return not local_tensor(tensor).numel() and stored_wrapper(key, catalogue) is not None


def stored_wrapper(key: str, catalogue: Catalogue) -> StoredWrapper | None:
    """The wrapper that a checkpoint has under a key, if any.

    Raises:
        StructureError: the checkpoint lacks a part of it.
    """
    description = catalogue.objects.get(f"{key}.{SUBCLASS}")
    if description is None:
        return None
    try:
        parts = {name: catalogue.tensors[f"{key}.{name}"] for name in description["parts"]}
        kinds = [kind for kind in description["parts"].values() if kind != "whole"]
        sizes = [size for kind in kinds for size in kind.get("grid", [kind.get("blocks")])]
        are_sizes = all(type(size) is int and size > 0 for size in sizes)
        valid = are_sizes and {"class", "shape", "dtype", "context"} <= description.keys()
    except (KeyError, TypeError, AttributeError) as error:
        raise StructureError(f"{key}: the checkpoint lacks a part of it: {error}", key=key) from error
    if not valid:
        raise StructureError(f"{key}.{SUBCLASS} in the checkpoint describes no tensor subclass", key=key)
    return StoredWrapper(key, description, parts)
