"""A simple checkpoint in memory: whole tensors, filled and read by indexing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardproof.state import Binding, Catalogue, Collected, bind, collect


class FakeCheckpoint:
    """Merges what all ranks collected into whole tensors."""

    def __init__(self, ranks: Sequence[Collected]) -> None:
        self.full: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        for collected in ranks:
            for entry in collected.tensors:
                assert kinds.setdefault(entry.key, (entry.dtype, entry.shape)) == (entry.dtype, entry.shape)
                if entry.alias_of is not None:
                    self.aliases[entry.key] = entry.alias_of
                    continue
                dtype = getattr(torch, entry.dtype)
                if entry.key not in self.full:
                    self.full[entry.key] = torch.zeros(entry.shape, dtype=dtype)
                    self.full[entry.key + "/count"] = torch.zeros(entry.shape, dtype=torch.int32)
                for piece in entry.pieces:
                    box = _box(piece)
                    self.full[entry.key][box] = piece.view.to("cpu")
                    self.full[entry.key + "/count"][box] += 1
            for item in collected.objects:
                self.objects.setdefault(item.key, json.loads(json.dumps(item.value)))
        self.catalogue = Catalogue(kinds, self.aliases, self.objects, len(ranks))

    def holders(self, key: str) -> torch.Tensor:
        """How many ranks hold each element."""
        return self.full[self.aliases.get(key, key) + "/count"]

    def bind(self, tree: Any, **options: Any) -> Binding:
        return bind(tree, self.catalogue, **options)

    def load(self, tree: Any, *, exact: bool = True, **options: Any) -> Binding:
        """Fill a tree; with `exact`, nothing may be missing or left over."""
        binding = self.bind(tree, **options)
        if exact:
            assert (binding.missing, binding.mismatched) == ([], [])
            assert binding.used == {*self.catalogue.tensors, *self.catalogue.objects}
        for entry in binding.tensors:
            for piece in entry.pieces:
                piece.view.detach().copy_(self.full[self.aliases.get(entry.key, entry.key)][_box(piece)])
        binding.increment_versions()
        for act in binding.finish:
            act()
        return binding


def saved(tree: Any) -> FakeCheckpoint:
    """A checkpoint of one rank."""
    return FakeCheckpoint([collect(tree)])


def saved_by_ranks(tree_of: Callable[[int], Any], world_size: int) -> FakeCheckpoint:
    return FakeCheckpoint(
        [collect(tree_of(rank), rank=rank, world_size=world_size) for rank in range(world_size)]
    )


def _box(piece: Any) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(piece.offsets, piece.view.shape, strict=True)
    )
