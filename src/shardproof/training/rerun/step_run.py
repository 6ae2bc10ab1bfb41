"""One run of a step on one rank: the validated results and the rejected ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardproof.engine.state import local_tensor
from shardproof.training.rerun.comparison import Compare, relative_difference, reproduced
from shardproof.training.rerun.injection import Run as RunName
from shardproof.training.rerun.replay import copy_of

Rejection = Callable[[Any], Any]
"""Returns True for a result that is rejected."""
_MAX_STATEFUL = 64


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `validate`."""

    value: Any
    rejected: Rejection
    compare: Compare | None
    tolerance: float
    fatal: bool
    message: str


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The first rejected result of a step on this rank, in the first run."""

    call: int
    message: str
    nth: int
    """Position among the calls with this message, from 0. It finds the call after a change of the program."""
    value: Any


@dataclass
class StepRun:
    """The results of the `validate` calls in one run of a step."""

    name: RunName
    suspicion: Suspicion | None = None
    """The rejected result of the first run, which this run has to reproduce."""
    stores_results: bool = False
    """True to store all results, for the comparison with another run."""
    calls: int = 0
    rejected: bool = False
    fatal: bool = False
    found: Suspicion | None = None
    """The first result that this run rejected."""
    second: Any = None
    """This run's result of the suspicious call."""
    reproduced: bool = False
    """True if `second` reproduces the suspicious result."""
    results: dict[str, tuple[Any, Compare | None]] = field(default_factory=dict)
    """The stored results by name of the call, each with its comparison."""
    _to_accept: list[tuple[Any, Any, bool]] = field(default_factory=list)
    _messages: Counter[str] = field(default_factory=Counter)
    _named: bool = False
    """True if `second` belongs to the call with the suspicion's message, not only with its number."""

    def record(self, call: Call) -> None:
        """Check the result of one call."""
        number, self.calls = self.calls, self.calls + 1
        nth = self._messages[call.message]
        self._messages[call.message] += 1
        if self.stores_results:
            name = call.message or f"call {number}"
            if name in self.results:
                name = f"{name} (call {number})"
            self.results[name] = (_detached_copy(call.value), call.compare)
            return
        bad = bool(call.rejected(call.value))
        if hasattr(call.rejected, "accept"):
            self._to_accept.append((call.rejected, _detached_copy(call.value), bad))
        if bad:
            self.rejected = True
            self.fatal |= call.fatal
            if self.found is None:
                self.found = Suspicion(number, call.message, nth, _detached_copy(call.value))
        wanted = self.suspicion
        if wanted is None:
            return
        # The program may have changed since the first run, and with it the number of the call.
        same_name = self.name != "in place" and (call.message, nth) == (wanted.message, wanted.nth)
        if same_name or (number == wanted.call and not self._named):
            self._named = same_name
            self.second = _detached_copy(call.value)
            self.reproduced = reproduced(
                wanted.value, self.second, compare=call.compare, tolerance=call.tolerance
            )

    def accept(self, *, include_rejected: bool) -> None:
        """Pass the results of this run to the rejections that have an `accept` method.

        Args:
            include_rejected: also pass the rejected results, which were attributed as correct.
        """
        for rejection, value, bad in self._to_accept:
            if include_rejected or not bad:
                rejection.accept(value)

    def differences(self, first: StepRun) -> dict[str, float]:
        """The differences by name of the call; infinity if only one of the runs has the result."""
        found = dict.fromkeys([*first.results, *self.results], math.inf)
        for name in first.results.keys() & self.results.keys():
            value, compare = self.results[name]
            before = first.results[name][0]
            difference = math.nan if compare is None else float(compare(before, value))
            found[name] = relative_difference(before, value) if math.isnan(difference) else abs(difference)
        return found


class Rejections:
    """The rejections that have a state, by their names in a checkpoint.

    The name is the message of the first call. A loaded state is applied when its rejection is registered.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}

    def register(self, rejection: Rejection, message: str) -> None:
        """Register a rejection before its use.

        Raises:
            ValueError: there are too many rejections with a state.
        """
        if not hasattr(rejection, "load_state_dict"):
            return
        if any(registered is rejection for registered in self._by_name.values()):
            return
        if len(self._by_name) == _MAX_STATEFUL:
            raise ValueError(
                f"validate got {_MAX_STATEFUL + 1} different objects with a state, such as this "
                f"{type(rejection).__name__}: a new object at each step has no statistics. Make one for each "
                "validated result, before the loop"
            )
        name = message or type(rejection).__name__
        while name in self._by_name:
            name += "'"
        self._by_name[name] = rejection
        if name in self._loaded:
            rejection.load_state_dict(self._loaded.pop(name))

    def state_dict(self) -> dict[str, Any]:
        """The states by name."""
        return self._loaded | {name: one.state_dict() for name, one in self._by_name.items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore saved states."""
        self._loaded = dict(states)
        for name, rejection in self._by_name.items():
            if name in self._loaded:
                rejection.load_state_dict(self._loaded.pop(name))


def _detached_copy(value: Any) -> Any:
    """A copy that later steps cannot change. For a DTensor, a copy of the local tensor."""
    return local_tensor(value.detach()).clone() if isinstance(value, torch.Tensor) else copy_of(value)
