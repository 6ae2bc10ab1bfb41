"""The common part of the two walks over a state tree.

A save walks the tree to collect its values. A load walks it to bind its values to those of a checkpoint.
Each kind of value has one handler for both walks, so that they stay consistent (`walk.Handler`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from shardproof.engine.state.descriptions import describe_tensors
from shardproof.engine.state.dtensor import LocalBoxesCache
from shardproof.engine.state.records import TensorEntry
from shardproof.errors import StructureError

if TYPE_CHECKING:
    from shardproof.engine.state.flat_parameters import FlatPart
    from shardproof.engine.state.module_names import NamedModule

H = TypeVar("H")
"""The handlers of a walk."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a value in the tree."""

    key: str
    """Dotted path, the key of a checkpoint."""
    path: str
    """The Python expression for it, for messages."""
    put: Callable[[Any], None] | None = None
    """Replaces the value in its container; None if it cannot be replaced."""

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
    """True if a key names a value of a single rank.

    >>> is_per_rank("rng.@rank-0"), is_per_rank("user@rank-0")
    (True, False)
    """
    return key.startswith("@rank-") or ".@rank-" in key


def check_name(name: str, key: str, path: str) -> None:
    """Refuses a name that looks like a reserved key of shardproof.

    Args:
        name: name of an item. It may contain dots.
        key: key of the container.
        path: path of the container, for messages.

    Raises:
        StructureError: a segment of the name begins with ``@``.

    >>> check_name("user@host", "model", "state['model']")
    """
    if name.startswith("@") or ".@" in name:
        raise StructureError(
            f"{path}[{name!r}] has the key {join(key, name)!r}. Segments that begin with '@' are "
            "reserved: rename it",
            key=join(key, name),
        )


@dataclass(frozen=True, slots=True)
class VisitedModule:
    """A module of the tree, for optimizers of its parameters."""

    key: str
    module: NamedModule
    state: Mapping[str, Any]
    """Name to value, as collected; empty for a module that is not in the tree."""
    flat: Sequence[FlatPart] = ()
    """The parameters of FSDP1 in the module. Their parameters without memory stand for the flat ones."""

    def stored(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters whose values are collected, under each of their names."""
        for name, item in self.state.items():
            if isinstance(item, torch.nn.Parameter):
                yield name, item
        if self.state:
            yield from self._of_flat()

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters of the module, under each of their names."""
        yield from self.module.parameters()
        yield from self._of_flat()

    def _of_flat(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((part.name, part.meta) for part in self.flat)


@dataclass
class Visitor(Generic[H]):
    """The state of a walk that collecting and binding share."""

    handler_of: Callable[[Any, Place], H]
    """The handler of a value."""
    rank: int
    world_size: int
    parallel: Any = None
    """Megatron-Core's ``parallel_state`` if it divides a model; see `framework_modules.parallel_state_of`."""
    loose: dict[str, torch.Tensor] = field(default_factory=dict)
    """With `parallel`, the tensors outside of modules and optimizers, by key; see `note_loose`."""
    modules: list[VisitedModule] = field(default_factory=list)
    """Modules visited so far."""
    flat: dict[int, list[FlatPart]] = field(default_factory=dict)
    """The parameters of FSDP1 in each module, by identity; see `flat_parts_of` in `handlers/modules.py`."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """Calls for the end of the walk, when all modules are known."""
    named: dict[int, NamedModule] = field(default_factory=dict)
    """Modules with their names, by identity; see `named` in `engine/state/handlers/modules.py`."""
    layouts: LocalBoxesCache = field(default_factory=LocalBoxesCache)
    """Cache of the local boxes of tensors in this walk."""
    anchors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The empty local tensor of each key of which the rank has no piece."""

    def entries_of(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor], *, detach: bool = True
    ) -> list[TensorEntry]:
        """The entries of plain tensors and DTensors on this rank; see `describe_tensors`.

        Raises:
            StructureError: a tensor cannot be stored; see `shardproof.engine.state.descriptions`.
        """
        entries, empty = describe_tensors(keys, tensors, self.layouts, detach=detach)
        self.anchors |= empty
        return entries

    def note_loose(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Records tensors outside of modules and optimizers, which may be parts of a divided model.

        Args:
            tensors: the tensors by key.
        """
        if self.parallel is not None:
            self.loose |= {key: item for key, item in tensors.items() if not is_per_rank(key)}

    def finish_walk(self) -> None:
        """Makes the calls that wait for the end of the walk."""
        for act in self.later:
            act()
