"""One run of a step on one rank: the validated results, the rejected ones, and how two runs are compared."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from shardproof.engine.state import local_tensor
from shardproof.training.rerun.injection import Run as RunName
from shardproof.training.rerun.replay import copy_of

Rejection = Callable[[Any], Any]
"""Returns True for a result that is rejected."""
_MAX_STATEFUL = 64
Compare = Callable[[Any, Any], float]
"""Returns the relative difference of the first and the second result, 0.0 if they are equal."""
_ELEMENTS = 1 << 20
"""Elements of a large tensor that are converted to float64 at a time."""
_LEAST = math.ulp(0.0)
"""Least difference of unequal values, for quotients that underflow to 0.0."""


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


def relative_difference(first: Any, second: Any) -> float:
    """The difference of two values relative to the larger magnitude: ``|a - b| / max(|a|, |b|)``.

    ========================================== ==========================================================
    equal; NaN and NaN; 0.0 and -0.0           0.0
    finite numbers of the same sign            more than 0.0 and at most 1.0
    finite numbers of opposite signs           more than 1.0 and at most 2.0
    infinity and any other value; NaN and a    infinity
    number
    integers                                   exact for any size: rounding never makes them equal
    complex numbers                            the larger difference of the real and imaginary parts
    tensors and arrays                         the largest difference of elements; 0.0 without elements
    tensors of other shape or dtype; a tensor  infinity
    and a number
    ========================================== ==========================================================

    Args:
        first: a number, a numpy array, or a tensor of any shape, dtype and device. For a DTensor, the local
            tensors are compared, because ranks may compare at different times.
        second: the result of another run.

    Raises:
        TypeError: values of other types, which need a ``compare`` function.

    >>> relative_difference(2.0, 1.0), relative_difference(1.0, -1.0), relative_difference(math.nan, math.nan)
    (0.5, 2.0, 0.0)
    >>> relative_difference(math.inf, -math.inf), relative_difference(math.nan, 1.0)
    (inf, inf)
    >>> relative_difference(2**60, 2**60 + 1) > 0
    True
    >>> relative_difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    first, second = _comparable(first), _comparable(second)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _of_tensors(first, second)
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return math.inf
    return max(_of_reals(first.real, second.real), _of_reals(first.imag, second.imag))


def reproduced(first: Any, second: Any, *, compare: Compare | None = None, tolerance: float = 0.0) -> bool:
    """Return True if a second run gave the result of the first.

    Args:
        first: result of the first run.
        second: result of the second run.
        compare: returns the relative difference, in place of `relative_difference`. If it returns NaN, as
            most formulas do for NaN, `relative_difference` is used.
        tolerance: the largest difference that counts as the same. With 0.0, the results must be equal bit for
            bit, except for the sign of zero and the payload of NaN.

    Raises:
        TypeError: the values cannot be compared, or `compare` does not return a number.

    >>> reproduced(math.nan, math.nan), reproduced(1.0, 1.001), reproduced(1.0, 1.001, tolerance=0.01)
    (True, False, True)
    >>> reproduced("a", "b", compare=lambda a, b: abs(ord(a) - ord(b)), tolerance=1)
    True
    """
    if compare is None:
        return relative_difference(first, second) <= tolerance
    difference = compare(first, second)
    if isinstance(difference, bool | np.bool_) or not isinstance(difference, numbers.Real):
        raise TypeError(
            f"compare returned {difference!r:.80}: it must return the relative difference of the two results "
            "as a number, 0.0 if they are equal"
        )
    if math.isnan(difference):
        return relative_difference(first, second) <= tolerance
    return float(difference) <= tolerance


def _comparable(value: Any) -> Any:
    """Convert a value to a number or a plain tensor."""
    if isinstance(value, torch.Tensor):
        return local_tensor(value.detach())
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, numbers.Number):
        return value
    raise TypeError(
        f"a {type(value).__name__} cannot be compared between runs: pass a number, a tensor or an array, "
        "or a function as compare= that returns the relative difference of two such values"
    )


def _of_reals(first: Any, second: Any) -> float:
    if first == second or (first != first and second != second):
        return 0.0
    if not all(isinstance(each, int) or math.isfinite(each) for each in (first, second)):
        return math.inf
    exact_first, exact_second = Fraction(first), Fraction(second)
    scale = max(abs(exact_first), abs(exact_second))
    return max(float(abs(exact_first - exact_second) / scale), _LEAST)


def _of_tensors(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    second = second.to(first.device)
    if first.is_complex():
        first, second = (torch.view_as_real(each.resolve_conj()) for each in (first, second))
    pairs = zip(
        torch.split(first.reshape(-1), _ELEMENTS), torch.split(second.reshape(-1), _ELEMENTS), strict=True
    )
    return max((_of_elements(*pair) for pair in pairs), default=0.0)


def _of_elements(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference between the elements of two flat tensors of one dtype.

    Integers are compared by their bits, because float64 cannot hold large ones exactly.
    """
    if first.numel() == 0:
        return 0.0
    a, b = first.double(), second.double()
    if first.dtype.is_floating_point:
        equal = (a == b) | (a.isnan() & b.isnan())
    else:
        equal = _bits(first) == _bits(second)
    scale = torch.maximum(a.abs(), b.abs())
    # Division comes before subtraction, because the difference may overflow.
    difference = (a / scale - b / scale).abs().clamp(min=_LEAST)
    difference = torch.where(scale.isfinite(), difference, math.inf)
    return float(torch.where(equal, 0.0, difference).max())


def _bits(whole: torch.Tensor) -> torch.Tensor:
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return whole.view(signed[whole.element_size()])
