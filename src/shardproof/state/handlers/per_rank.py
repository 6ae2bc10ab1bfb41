"""Values that every rank has for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from shardproof.errors import StructureError
from shardproof.state.binder import Binder
from shardproof.state.collector import Collector
from shardproof.state.handlers.generators import RandomState
from shardproof.state.handlers.stateful_objects import STATEFUL
from shardproof.state.plain.decode import references
from shardproof.state.tensors import torch_dtype
from shardproof.state.visitor import Place, is_per_rank, join

__all__ = ["PER_RANK", "PerRank", "owner_of"]


class PerRank:
    """A state tree of which every rank stores and gets back its own.

    A load on as many ranks as saved gives each rank its own value. With more or fewer ranks, the ranks that
    both have get theirs, and the two options say what happens with the rest.

    Args:
        value: any state tree.
        missing: what happens on ranks beyond those that saved: "keep" leaves the value as it is and
            says so in `LoadReport.kept`, "error" counts it as missing.
        fewer: what happens with the values of ranks beyond those that load: "drop" restores them nowhere and
            names them in `LoadReport.dropped` and in a warning, "gather" gives them to every rank that loads,
            as `gathered`, "error" refuses the load.

    Attributes:
        gathered: with ``fewer="gather"``, after a load: saved rank to its value, of the ranks beyond those
            that load, the same on every rank. A value that is no container is itself. Of a container it is a
            dict of what is stored, by dotted key: new tensors on the CPU, plain values, and of objects what
            their `state_dict` gave. It is not saved: what is to stay belongs into `value`.

    >>> state = {"losses": PerRank([0.5, 0.25])}
    >>> state["losses"].value
    [0.5, 0.25]
    """

    def __init__(
        self,
        value: Any,
        *,
        missing: Literal["keep", "error"] = "keep",
        fewer: Literal["drop", "gather", "error"] = "drop",
    ) -> None:
        if missing not in ("keep", "error"):
            raise ValueError(f"missing is {missing!r}, not 'keep' or 'error'")
        if fewer not in ("drop", "gather", "error"):
            raise ValueError(f"fewer is {fewer!r}, not 'drop', 'gather' or 'error'")
        self.value = value
        self.missing = missing
        self.fewer = fewer
        self.gathered: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, missing={self.missing!r}, fewer={self.fewer!r})"


def owner_of(key: str) -> tuple[str, int] | None:
    """The key of the per-rank value that a stored key is of, and the rank; None for other keys.

    >>> owner_of("loader.@rank-3.epoch"), owner_of("model.weight")
    (('loader', 3), None)
    """
    place, found, rest = f".{key}".partition(".@rank-")
    number = rest.partition(".")[0]
    return (place[1:], int(number)) if found and number.isdecimal() and len(number) < 19 else None


class _PerRank:
    """Handles `PerRank` and `RandomState`: the value's keys lie below ``<key>.@rank-<rank>``."""

    def collect(self, place: Place, value: PerRank | RandomState, out: Collector) -> None:
        """The rank's own value."""
        inner = self._inner(place, value, out.rank)
        if isinstance(value, RandomState):
            STATEFUL.collect(inner, value, out)
        else:
            out.visit(inner, value.value)

    def bind(self, place: Place, value: PerRank | RandomState, to: Binder) -> None:
        """What the same rank stored."""
        inner = self._inner(place, value, to.rank)
        stored = to.keys_below(join(place.key, "@rank-"))
        to.binding.used.update(stored)
        if not stored:
            if to.selected(place.key):
                to.binding.missing.append(place.key)
            return
        to.binding.own.append(place.key)
        if isinstance(value, PerRank) and value.fewer != "drop":
            self._bind_others(place, value, stored, to)
        if to.rank >= to.catalogue.world_size:
            if to.selected(inner.key):
                (to.binding.missing if value.missing == "error" else to.binding.kept).append(inner.key)
        elif isinstance(value, RandomState):
            STATEFUL.bind(inner, value, to)
        else:
            to.visit(inner, value.value)

    @staticmethod
    def _bind_others(place: Place, value: PerRank, stored: Sequence[str], to: Binder) -> None:
        """The values of ranks beyond those that load."""
        others: dict[int, list[str]] = {}
        for key in filter(to.selected, stored):
            owner = owner_of(key)
            if owner is not None and owner[1] >= to.world_size:
                others.setdefault(owner[1], []).append(key)
        if value.fewer == "error":
            for rank in sorted(others):
                to.mismatch(
                    join(place.key, f"@rank-{rank}"),
                    f"values of at most {to.world_size} ranks, as many as load",
                    f"that of rank {rank}; PerRank(fewer='gather' or 'drop') loads all the same",
                )
            return
        to.binding.gathered.append(place.key)
        made = {
            rank: _stored_value(join(place.key, f"@rank-{rank}"), keys, to)
            for rank, keys in sorted(others.items())
        }
        to.on_finish(lambda: setattr(value, "gathered", {rank: make() for rank, make in made.items()}))

    @staticmethod
    def _inner(place: Place, value: PerRank | RandomState, rank: int) -> Place:
        if is_per_rank(place.key):
            raise StructureError(
                f"{place.path} is a per-rank value inside of a per-rank value", key=place.key
            )
        return Place(join(place.key, f"@rank-{rank}"), place.path, partial(setattr, value, "value"))


def _stored_value(name: str, keys: Sequence[str], to: Binder) -> Callable[[], Any]:
    """How to make what one rank stored, once its tensors are read; see `PerRank.gathered`."""
    objects = {key: to.catalogue.objects[key] for key in keys if key in to.catalogue.objects}
    inside = {tensor for data in objects.values() for tensor, _ in references(data)}
    made = {key: to.rebuild(key, data) for key, data in objects.items()}
    for key in keys:
        if key not in made and key not in inside:
            dtype, shape = to.catalogue.tensors[key]
            made[key] = partial(_same, to.fresh(key, torch_dtype(dtype), tuple(shape), None))
    if name in made:
        return made[name]
    return lambda: {key.removeprefix(f"{name}."): made[key]() for key in sorted(made)}


def _same(value: Any) -> Any:
    return value


PER_RANK = _PerRank()
