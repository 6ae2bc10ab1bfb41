"""One run of a step on one rank: what was validated in it, and what came of that."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardproof.rerun.comparison import Compare, relative_difference, reproduced
from shardproof.rerun.injection import Run as RunName
from shardproof.rerun.replay import copy_of
from shardproof.state import local_tensor

__all__ = ["Call", "Rejection", "Rejections", "StepRun", "Suspicion"]

Rejection = Callable[[Any], Any]
"""From a result to whether it is rejected."""
_MANY = 64


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
    """The first rejected result of a step on this rank, as its first run gave it."""

    call: int
    message: str
    nth: int
    """Of the calls with this message, from 0: a program that was changed meanwhile may have others too."""
    value: Any


@dataclass
class StepRun:
    """What `validate` has seen in one run of a step."""

    name: RunName
    suspicion: Suspicion | None = None
    """From the first run, when this one is to show whether it comes up again."""
    keeps: bool = False
    """Whether to keep all results, to be compared with those of another run."""
    calls: int = 0
    rejected: bool = False
    fatal: bool = False
    found: Suspicion | None = None
    """The first result that this run rejected."""
    second: Any = None
    """What this run gave in the place of the suspicion."""
    reproduced: bool = False
    """Whether that is the same."""
    results: dict[str, tuple[Any, Compare | None]] = field(default_factory=dict)
    """By name of the call, where results are kept, with what compares them."""
    _to_accept: list[tuple[Any, Any, bool]] = field(default_factory=list)
    _messages: Counter[str] = field(default_factory=Counter)
    _named: bool = False
    """Whether `second` is of the call with the suspicion's message, not just of its number."""

    def take(self, call: Call) -> None:
        """Look at the result of one call."""
        number, self.calls = self.calls, self.calls + 1
        nth = self._messages[call.message]
        self._messages[call.message] += 1
        if self.keeps:
            self.results[self._name_of(call, number)] = (_copied(call.value), call.compare)
            return
        bad = bool(call.rejected(call.value))
        if hasattr(call.rejected, "accept"):
            self._to_accept.append((call.rejected, _copied(call.value), bad))
        if bad:
            self.rejected = True
            self.fatal |= call.fatal
            if self.found is None:
                self.found = Suspicion(number, call.message, nth, _copied(call.value))
        wanted = self.suspicion
        if wanted is None:
            return
        # In another process the program may have been changed, and the call have another number.
        same_name = self.name != "in place" and (call.message, nth) == (wanted.message, wanted.nth)
        if same_name or (number == wanted.call and not self._named):
            self._named = same_name
            self.second = _copied(call.value)
            self.reproduced = reproduced(
                wanted.value, self.second, compare=call.compare, tolerance=call.tolerance
            )

    def accept(self, *, all_of_them: bool) -> None:
        """This run counts: tell the rejections that want to know, once for each result.

        Args:
            all_of_them: also the results that were rejected, because they have been found to be right.
        """
        for rejection, value, bad in self._to_accept:
            if all_of_them or not bad:
                rejection.accept(value)

    def differences(self, first: StepRun) -> dict[str, float]:
        """By name of the call, how much the results differ; infinity where only one of the runs has it."""
        found = dict.fromkeys([*first.results, *self.results], math.inf)
        for name in first.results.keys() & self.results.keys():
            value, compare = self.results[name]
            found[name] = _difference(first.results[name][0], value, compare)
        return found

    def _name_of(self, call: Call, number: int) -> str:
        name = call.message or f"call {number}"
        return name if name not in self.results else f"{name} (call {number})"


class Rejections:
    """The rejections that have a state, under names by which a checkpoint knows them.

    They are named by the message of their first call. A state that was loaded waits for its rejection to be
    used.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    def use(self, rejection: Rejection, message: str) -> None:
        """A rejection is about to be used.

        Raises:
            ValueError: it is one of very many that have a state.
        """
        if not hasattr(rejection, "load_state_dict"):
            return
        if any(known is rejection for known in self._known.values()):
            return
        if len(self._known) == _MANY:
            raise ValueError(
                f"validate was given {_MANY + 1} different objects with a state, such as this "
                f"{type(rejection).__name__}: their running statistics never get going. Make one for each "
                "validated result, before the loop"
            )
        name = message or type(rejection).__name__
        while name in self._known:
            name += "'"
        self._known[name] = rejection
        if name in self._waiting:
            rejection.load_state_dict(self._waiting.pop(name))

    def state_dict(self) -> dict[str, Any]:
        """The states by name."""
        return self._waiting | {name: known.state_dict() for name, known in self._known.items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Go on from saved states."""
        self._waiting = dict(states)
        for name, known in self._known.items():
            if name in self._waiting:
                known.load_state_dict(self._waiting.pop(name))


def _difference(first: Any, second: Any, compare: Compare | None) -> float:
    if compare is not None:
        difference = float(compare(first, second))
        if not math.isnan(difference):
            return abs(difference)
    return relative_difference(first, second)


def _copied(value: Any) -> Any:
    """A copy that later steps cannot change; of a DTensor this rank's part."""
    return local_tensor(value.detach()).clone() if isinstance(value, torch.Tensor) else copy_of(value)
