"""Objects whose state is a tree of its own, and which a checkpoint may have or not.

Objects that give their state as a value and take it back: schedulers, data loaders, generators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardproof.errors import StructureError
from shardproof.state.binder import MISSING, Binder
from shardproof.state.collector import Collector
from shardproof.state.plain.decode import decode, references
from shardproof.state.visitor import Place, is_per_rank, join

__all__ = ["PART", "SEGMENT", "STATEFUL", "Stateful", "has_state_tree", "is_stateful", "parts_of"]

SEGMENT = "@part"


"""The segment of a key below which a part's own keys lie."""


class _Part:
    """Handles values with a method ``state_tree``: its keys lie below ``<key>.@part``.

    ``state_tree()`` gives a dict, a state tree like any other: what is saved, and what is filled. A part is
    optional both ways: a checkpoint without it leaves it as it is, and a checkpoint with it loads into a
    state without it. It is loaded whole or not at all. On a load these are called, where the type has them:

    - ``check_stored(stored)`` before anything is overwritten, with what all ranks stored together: key below
      the part to plain data, or None for tensors and for plain data that refers to tensors. Values of each
      rank's own are not among it, so that all ranks answer alike. It raises StructureError to refuse the
      load, or answers False to leave all of the part as it is. It changes nothing: the load may fail yet, and
      another checkpoint may be tried.
    - ``state_loaded()`` once all of the part is set.
    """

    def collect(self, place: Place, value: Any, out: Collector) -> None:
        """The tree, as it is now."""
        out.visit(_inner(place), _tree_of(place, value))

    def bind(self, place: Place, value: Any, to: Binder) -> None:
        """The tree, if the checkpoint has one and the value takes it."""
        inner = _inner(place)
        stored = to.keys_below(f"{inner.key}.")
        taken = [key for key in stored if to.selected(key)]
        if not to.selected(inner.key) and not taken:
            return
        if stored and len(taken) < len(stored):
            raise StructureError(
                f"{place.path} is loaded whole or not at all, but include and exclude take "
                f"{len(taken)} of its {len(stored)} keys. Name all of it, by {place.key!r}",
                key=place.key,
            )
        if not stored:
            to.binding.kept.append(inner.key)
            return
        to.binding.parts.add(inner.key)
        if not _accepts(value, f"{inner.key}.", stored, to):
            to.binding.used.update(stored)
            to.binding.kept.append(inner.key)
            to.binding.declined.append(inner.key)
            return
        to.visit(inner, _tree_of(place, value))
        loaded = getattr(value, "state_loaded", None)
        if loaded is not None:
            # Optimizers of the part are set by what waits for the end of the walk, and so before this.
            to.later.append(lambda: to.on_finish(loaded))


def _inner(place: Place) -> Place:
    return Place(join(place.key, SEGMENT), f"{place.path}.state_tree()")


def _tree_of(place: Place, value: Any) -> dict[Any, Any]:
    tree = value.state_tree()
    if not isinstance(tree, dict) or not tree:
        raise StructureError(
            f"{place.path}.state_tree() gives a dict with at least one item, not {tree!r:.80}", key=place.key
        )
    return tree


def _accepts(value: Any, prefix: str, stored: list[str], to: Binder) -> bool:
    """Whether the value takes what is stored of it, as far as it wants to be asked."""
    check = getattr(value, "check_stored", None)
    if check is None:
        return True
    below = {key.removeprefix(prefix): key for key in stored}
    try:
        taken = check({name: _plain(key, to) for name, key in below.items() if not is_per_rank(name)})
    except StructureError as error:
        to.binding.refused.append(error)
        return False
    return taken is not False


def _plain(key: str, to: Binder) -> Any:
    """Plain data of the checkpoint; None for a tensor, and for what refers to one."""
    data = to.catalogue.objects.get(key)
    return None if any(references(data)) else decode(data, path=key)


def has_state_tree(value: Any) -> bool:
    """Whether the value's type offers state_tree."""
    return callable(getattr(type(value), "state_tree", None))


def parts_of(key: str) -> list[str]:
    """The parts that a key belongs to, outermost first. The last segment of a key is never a part.

    >>> parts_of("rerun.@part.own.@rank-1"), parts_of("model.weight"), parts_of("model.@part")
    (['rerun.@part'], [], [])
    """
    segments = key.split(".")
    return [".".join(segments[: at + 1]) for at, segment in enumerate(segments[:-1]) if segment == SEGMENT]


PART = _Part()


@dataclass(frozen=True, slots=True)
class Stateful:
    """Handles values by a function that reads their state and one that sets it."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]

    def collect(self, place: Place, value: Any, out: Collector) -> None:
        """The whole state is one object."""
        out.object(place.key, self.read(value), place.path)

    def bind(self, place: Place, value: Any, to: Binder) -> None:
        """The state is rebuilt from what is stored and handed over at the end."""
        data = to.object(place.key)
        if data is not MISSING:
            rebuilt = to.rebuild(place.key, data, lambda: self.read(value))
            to.on_finish(lambda: self.write(value, rebuilt()))


STATEFUL = Stateful(lambda value: value.state_dict(), lambda value, state: value.load_state_dict(state))


def is_stateful(value: Any) -> bool:
    """Whether the value offers state_dict and load_state_dict."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
