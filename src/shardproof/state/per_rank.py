"""Values that every rank has for itself."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from shardproof.errors import StructureError
from shardproof.state.binding import Binder
from shardproof.state.collecting import Collector
from shardproof.state.generators import RandomState
from shardproof.state.statefuls import STATEFUL
from shardproof.state.visiting import Place, is_per_rank, join

__all__ = ["PER_RANK", "PerRank"]


class PerRank:
    """A state tree of which every rank stores and gets back its own.

    Args:
        value: any state tree.
        missing: what happens on ranks beyond those that saved: "keep" leaves the value as it is and
            says so in the report, "error" counts it as missing.

    >>> state = {"losses": PerRank([0.5, 0.25])}
    >>> state["losses"].value
    [0.5, 0.25]
    """

    def __init__(self, value: Any, *, missing: Literal["keep", "error"] = "keep") -> None:
        if missing not in ("keep", "error"):
            raise ValueError(f"missing is {missing!r}, not 'keep' or 'error'")
        self.value = value
        self.missing = missing

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, missing={self.missing!r})"


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
        elif to.rank >= to.catalogue.world_size:
            if to.selected(inner.key):
                (to.binding.missing if value.missing == "error" else to.binding.kept).append(inner.key)
        elif isinstance(value, RandomState):
            STATEFUL.bind(inner, value, to)
        else:
            to.visit(inner, value.value)

    @staticmethod
    def _inner(place: Place, value: PerRank | RandomState, rank: int) -> Place:
        if is_per_rank(place.key):
            raise StructureError(
                f"{place.path} is a per-rank value inside of a per-rank value", key=place.key
            )
        return Place(join(place.key, f"@rank-{rank}"), place.path, partial(setattr, value, "value"))


PER_RANK = _PerRank()
