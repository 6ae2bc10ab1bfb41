"""Objects that give their state as a value and take it back: schedulers, data loaders, generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardproof.state.binding import MISSING, Binder
from shardproof.state.collecting import Collector
from shardproof.state.visiting import Place

__all__ = ["STATEFUL", "Stateful", "is_stateful"]


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
            to.later_on(lambda: self.write(value, rebuilt()))


STATEFUL = Stateful(lambda value: value.state_dict(), lambda value, state: value.load_state_dict(state))


def is_stateful(value: Any) -> bool:
    """Whether the value offers state_dict and load_state_dict."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
