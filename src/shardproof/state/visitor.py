"""What every handler of a kind of leaf sees: where it is in the tree, and who visits.

A state tree is walked twice in a checkpoint's life: to collect what it holds and to bind it to what a
checkpoint holds. Each kind of leaf has one `Handler` that knows both ways, so that they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardproof.errors import StructureError
from shardproof.state.descriptions import describe_tensors
from shardproof.state.dtensor import Layouts
from shardproof.state.records import TensorEntry

if TYPE_CHECKING:
    from shardproof.state.binder import Binder
    from shardproof.state.collector import Collector
    from shardproof.state.module_names import NamedModule

__all__ = ["Handler", "OwnedParameters", "Place", "Visitor", "check_name", "is_per_rank", "join"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is in the tree."""

    key: str
    """Dotted path, the key of a checkpoint."""
    path: str
    """How Python would reach it, for people."""
    put: Callable[[Any], None] | None = None
    """Replaces the value in its container; None where nothing can."""

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
    """Whether a key is of a value that belongs to one rank.

    >>> is_per_rank("rng.@rank-0"), is_per_rank("user@rank-0")
    (True, False)
    """
    return key.startswith("@rank-") or ".@rank-" in key


def check_name(name: str, key: str, path: str) -> None:
    """Refuse a name of the program's that would pass for a key of shardproof's own.

    Args:
        name: of an item; it may have dots.
        key: of what the item is in.
        path: of the same, for people.

    Raises:
        StructureError: a segment of the name begins with ``@``.

    >>> check_name("user@host", "model", "state['model']")
    """
    if name.startswith("@") or ".@" in name:
        raise StructureError(
            f"{path}[{name!r}] has the key {join(key, name)!r}. Segments that begin with '@' are "
            "shardproof's own: rename it",
            key=join(key, name),
        )


class Handler(Protocol):
    """Knows how one kind of value is collected, and how it takes what a checkpoint holds."""

    def collect(self, place: Place, value: Any, out: Collector) -> None:
        """Add the value's entries to `out`. Changes nothing."""

    def bind(self, place: Place, value: Any, to: Binder) -> None:
        """Ask `to` for the value's entries. Changes nothing before `Binding.finish`."""


@dataclass(frozen=True, slots=True)
class OwnedParameters:
    """A module of the tree, for the optimizers that speak of its parameters."""

    key: str
    module: NamedModule
    state: Mapping[str, Any]
    """Name to value, as collected."""


@dataclass
class Visitor:
    """What collecting and binding share."""

    handler_of: Callable[[Any, Place], Handler]
    rank: int
    world_size: int
    modules: list[OwnedParameters] = field(default_factory=list)
    """Modules visited so far."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """What needs all modules to be known."""
    named: dict[int, NamedModule] = field(default_factory=dict)
    """The modules whose names are known, by identity; see `named` in `state/handlers/modules.py`."""
    layouts: Layouts = field(default_factory=Layouts)
    """Of the DTensors visited so far."""
    anchors: dict[str, torch.Tensor] = field(default_factory=dict)
    """For keys of which the rank has no piece, the empty local tensor."""

    def entries_of(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor], *, detach: bool = True
    ) -> list[TensorEntry]:
        """What this rank holds of plain tensors and DTensors; see `describe_tensors`.

        Raises:
            StructureError: one cannot be kept; see `shardproof.state.descriptions`.
        """
        entries, empty = describe_tensors(keys, tensors, self.layouts, detach=detach)
        self.anchors |= empty
        return entries

    def finish_walk(self) -> None:
        """Do what waited for the end of the walk."""
        for act in self.later:
            act()
