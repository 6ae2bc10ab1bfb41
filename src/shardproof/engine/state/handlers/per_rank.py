"""Values that belong to one rank each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from shardproof.engine.state.binder import Binder
from shardproof.engine.state.collector import Collector
from shardproof.engine.state.handlers.generators import RandomState
from shardproof.engine.state.handlers.stateful_objects import STATEFUL
from shardproof.engine.state.plain.decode import references
from shardproof.engine.state.tensors import torch_dtype
from shardproof.engine.state.visitor import Place, is_per_rank, join
from shardproof.errors import StructureError


class PerRank:
    """A state tree that every rank saves and restores separately.

    A load restores the value of rank ``r`` on rank ``r``. The two options apply if more or fewer ranks load
    than saved.

    Args:
        value: any state tree.
        missing: for a loading rank without a saved value: "keep" leaves the value unchanged and lists it in
            `LoadReport.unchanged`, "error" reports it as missing.
        fewer: for the saved values of ranks that do not exist in the load: "drop" ignores them and lists them
            in `LoadReport.dropped` and in a warning, "gather" puts them into `gathered` on every rank,
            "error" fails the load.

    Attributes:
        gathered: with ``fewer="gather"``, after a load: saved rank to value, for the ranks that do not exist
            in the load. It is the same on every rank. A container becomes a dict from dotted key to new
            tensors on the CPU, plain values, and the `state_dict` of objects. A save does not include it; put
            values to save into `value`.

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
    """The key of the per-rank value that a stored key belongs to, and the rank; None for other keys.

    >>> owner_of("loader.@rank-3.epoch"), owner_of("model.weight")
    (('loader', 3), None)
    """
    place, found, rest = f".{key}".partition(".@rank-")
    number = rest.partition(".")[0]
    return (place[1:], int(number)) if found and number.isdecimal() and len(number) < 19 else None


class _PerRank:
    """Handles `PerRank` and `RandomState`: the value's keys lie below ``<key>.@rank-<rank>``."""

    def collect(self, place: Place, value: PerRank | RandomState, collector: Collector) -> None:
        inner = self._inner(place, value, collector.rank)
        if isinstance(value, RandomState):
            STATEFUL.collect(inner, value, collector)
        else:
            collector.visit(inner, value.value)

    def bind(self, place: Place, value: PerRank | RandomState, binder: Binder) -> None:
        inner = self._inner(place, value, binder.rank)
        stored = binder.keys_below(join(place.key, "@rank-"))
        binder.binding.used.update(stored)
        if not stored:
            if binder.selected(place.key):
                binder.binding.missing.append(place.key)
            return
        binder.binding.own[place.key] = False
        if isinstance(value, PerRank) and value.fewer != "drop":
            self._bind_others(place, value, stored, binder)
        if binder.rank >= binder.catalogue.world_size:
            if binder.selected(inner.key):
                (binder.binding.missing if value.missing == "error" else binder.binding.unchanged).append(
                    inner.key
                )
        elif isinstance(value, RandomState):
            STATEFUL.bind(inner, value, binder)
        else:
            binder.visit(inner, value.value)

    @staticmethod
    def _bind_others(place: Place, value: PerRank, stored: Sequence[str], binder: Binder) -> None:
        """Binds the values of saved ranks that do not exist in the load."""
        others: dict[int, list[str]] = {}
        for key in filter(binder.selected, stored):
            owner = owner_of(key)
            if owner is not None and owner[1] >= binder.world_size:
                others.setdefault(owner[1], []).append(key)
        if value.fewer == "error":
            for rank in sorted(others):
                binder.mismatch(
                    join(place.key, f"@rank-{rank}"),
                    f"values of at most {binder.world_size} ranks, the number that load",
                    f"the value of rank {rank}; use PerRank(fewer='gather') or PerRank(fewer='drop') to load",
                )
            return
        binder.binding.own[place.key] = True
        values = {
            rank: _stored_value(join(place.key, f"@rank-{rank}"), keys, binder)
            for rank, keys in sorted(others.items())
        }
        binder.on_finish(
            lambda: setattr(value, "gathered", {rank: build() for rank, build in values.items()})
        )

    @staticmethod
    def _inner(place: Place, value: PerRank | RandomState, rank: int) -> Place:
        if is_per_rank(place.key):
            raise StructureError(
                f"{place.path} is a per-rank value inside a per-rank value. Use one PerRank", key=place.key
            )
        return Place(join(place.key, f"@rank-{rank}"), place.path, partial(setattr, value, "value"))


def _stored_value(name: str, keys: Sequence[str], binder: Binder) -> Callable[[], Any]:
    """Returns a function that builds one rank's value for `PerRank.gathered`, after all tensors are read."""
    objects = {key: binder.catalogue.objects[key] for key in keys if key in binder.catalogue.objects}
    referenced = {tensor for data in objects.values() for tensor, _ in references(data)}
    values = {key: binder.rebuild(key, data) for key, data in objects.items()}
    for key in keys:
        if key not in values and key not in referenced:
            dtype, shape = binder.catalogue.tensors[key]
            values[key] = partial(_same, binder.fresh(key, torch_dtype(dtype), tuple(shape), None))
    if name in values:
        return values[name]
    return lambda: {key.removeprefix(f"{name}."): values[key]() for key in sorted(values)}


def _same(value: Any) -> Any:
    return value


PER_RANK = _PerRank()
