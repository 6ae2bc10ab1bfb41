"""Policies that select the committed steps of a run to keep.

Policies combine: ``KeepLatest(3) | KeepEvery(hours=24)`` keeps the steps that either selects, and ``&`` those
that both select.

Note "A wrong metric loses no step": `KeepBest` selects every step while no step has its metric. This
selection contains that of a policy with the right name. The same holds for combinations: a union with it
removes nothing, and an intersection removes only steps that the other policy does not select. The disk may
fill meanwhile, so `MetricCheck` logs a warning at the first save without the metric.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from shardproof._utils.arguments import check_number
from shardproof._utils.humanize import brief

_NAMES_SHOWN = 8

_log = logging.getLogger("shardproof")


class SavedStep(int):
    """A committed step, as a policy sees it. Its manifest is read when a policy asks for time or metadata.

    Args:
        step: number of the step.
        read: returns the time of the save (Unix seconds) and the metadata.

    >>> step = SavedStep(100, lambda: (0.0, {"loss": 0.5}))
    >>> step + 1, step.metadata["loss"]
    (101, 0.5)
    """

    _read: Callable[[], tuple[float, Mapping[str, Any]]]

    def __new__(cls, step: int, read: Callable[[], tuple[float, Mapping[str, Any]]]) -> SavedStep:
        """Makes the value; see the class."""
        saved = super().__new__(cls, step)
        saved._read = read
        return saved

    @property
    def time(self) -> float:
        """Time of the save, Unix seconds."""
        return self._read()[0]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that was given to the save."""
        return self._read()[1]


@runtime_checkable
class Retention(Protocol):
    """A policy that selects the committed steps to keep."""

    def select(self, steps: Sequence[SavedStep]) -> set[int]:
        """The steps to keep of the committed `steps`, which come in any order."""
        ...


class RetentionPolicy:
    """A policy that combines with others by ``|`` and ``&``. The other one may be any `Retention`."""

    def __or__(self, other: Retention) -> RetentionPolicy:
        return _Combined(self, other, "|") if isinstance(other, Retention) else NotImplemented

    def __ror__(self, other: Retention) -> RetentionPolicy:
        return _Combined(other, self, "|") if isinstance(other, Retention) else NotImplemented

    def __and__(self, other: Retention) -> RetentionPolicy:
        return _Combined(self, other, "&") if isinstance(other, Retention) else NotImplemented

    def __rand__(self, other: Retention) -> RetentionPolicy:
        return _Combined(other, self, "&") if isinstance(other, Retention) else NotImplemented

    def select(self, steps: Sequence[SavedStep]) -> set[int]:
        """See `Retention.select`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Combined(RetentionPolicy):
    """Keeps the steps that either policy selects ("|"), or that both select ("&")."""

    first: Retention
    second: Retention
    operator: Literal["|", "&"]

    def __str__(self) -> str:
        return f"({self.first} {self.operator} {self.second})"

    def select(self, steps: Sequence[SavedStep]) -> set[int]:
        """See `Retention.select`."""
        first, second = set(self.first.select(steps)), set(self.second.select(steps))
        return first | second if self.operator == "|" else first & second


@dataclass(frozen=True, slots=True)
class KeepAll(RetentionPolicy):
    """Keeps every step."""

    def select(self, steps: Sequence[SavedStep]) -> set[int]:
        """All of `steps`."""
        return set(steps)


@dataclass(frozen=True, slots=True)
class KeepLatest(RetentionPolicy):
    """Keeps the `n` newest committed steps.

    Raises:
        ValueError: `n` is not a whole number of at least 1.

    >>> sorted(KeepLatest(2).select([100, 300, 200]))
    [200, 300]
    """

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLatest", "n", self.n)

    def select(self, steps: Sequence[int]) -> set[int]:
        """The `n` largest of `steps`."""
        return set(sorted(steps)[-self.n :])


@dataclass(frozen=True, slots=True)
class KeepEvery(RetentionPolicy):
    """Keeps the steps with a multiple of `steps` as number, or one step for each period of `hours`.

    With `hours`, the first step stays, and then each first step that was saved at least `hours` after the
    previous one that stays. With both arguments, a step stays if either rule selects it.

    Args:
        steps: distance of the numbers; None for no such rule.
        hours: distance of the times; None for no such rule.

    Raises:
        TypeError: `hours` is no number.
        ValueError: both are None, or one is not positive.

    >>> sorted(KeepEvery(steps=1000).select([500, 1000, 1500, 2000]))
    [1000, 2000]
    """

    steps: int | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.hours is None:
            raise ValueError("KeepEvery needs steps or hours")
        if self.steps is not None:
            _check_count("KeepEvery", "steps", self.steps)
        check_number("hours", self.hours, "of hours")
        if self.hours is not None and not 0 < self.hours < math.inf:
            raise ValueError(f"KeepEvery needs a positive number of hours, not {self.hours!r}")

    def select(self, steps: Sequence[SavedStep]) -> set[int]:
        """See `Retention.select`."""
        kept: set[int] = set()
        if self.steps is not None:
            kept |= {step for step in steps if step % self.steps == 0}
        if self.hours is not None:
            last = -math.inf
            for step in sorted(steps):
                if not last <= step.time < last + self.hours * 3600:  # the clock may have been set back
                    kept.add(step)
                    last = step.time
        return kept


@dataclass(frozen=True, slots=True)
class KeepBest(RetentionPolicy):
    """Keeps the `n` steps with the best value of a metric in their metadata.

    A step without a finite scalar under this name is not selected. While no step has a finite
    value, every step is selected, so that a mistyped name loses no step. Of equal values the newer step is
    better.

    Args:
        metric: name in the metadata of a save.
        n: number of steps.
        mode: "min" if smaller is better, "max" if larger is.

    Raises:
        ValueError: an argument is not one of these.

    >>> losses = {100: 0.5, 200: 0.2, 300: 0.3}
    >>> steps = [SavedStep(step, lambda loss=loss: (0.0, {"loss": loss})) for step, loss in losses.items()]
    >>> sorted(KeepBest("loss", 2).select(steps))
    [200, 300]
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"KeepBest needs the name of a metric, not {self.metric!r}")
        _check_count("KeepBest", "n", self.n)
        if self.mode not in ("min", "max"):
            raise ValueError(f"KeepBest has the mode 'min' or 'max', not {self.mode!r}")

    def select(self, steps: Sequence[SavedStep]) -> set[int]:
        """See `Retention.select`."""
        return self._best(steps) or set(steps)

    @staticmethod
    def within(policy: Retention | None) -> list[KeepBest]:
        """The policies of this kind that a policy is, or combines."""
        if isinstance(policy, _Combined):
            return [*KeepBest.within(policy.first), *KeepBest.within(policy.second)]
        return [policy] if isinstance(policy, KeepBest) else []

    def _best(self, steps: Sequence[SavedStep]) -> set[int]:
        """The `n` best of the steps that have a finite value."""
        values = [(step, self._value(step.metadata)) for step in steps]
        finite = [(value, step) for step, value in values if value is not None]
        return {step for _, step in sorted(finite, reverse=True)[: self.n]}

    def _value(self, metadata: Mapping[str, Any]) -> float | None:
        """The metric of a step, larger for better; None if it has no finite one."""
        value = metadata.get(self.metric)
        if value is None or isinstance(value, (bool, str, bytes)):
            return None
        try:
            number = float(value)  # also of a scalar of NumPy or torch
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return None
        if not math.isfinite(number):
            return None
        return number if self.mode == "max" else -number


class BestStep:
    """Selects the best step by the metric of a policy, and no step if none has the metric.

    >>> step = SavedStep(100, lambda: (0.0, {"loss": 0.5}))
    >>> BestStep(KeepBest("loss", 3)).select([step]), BestStep(KeepBest("lost")).select([step])
    ({100}, set())
    """

    def __init__(self, policy: KeepBest) -> None:
        self._policy = KeepBest(policy.metric, 1, policy.mode)

    def select(self, steps: Sequence[SavedStep]) -> set[int]:
        """The best of `steps`; empty if none has a finite value."""
        return self._policy._best(steps)


class MetricCheck:
    """Warns once if the metadata of a save lack a finite value of a metric that a policy needs."""

    def __init__(self, location: str, *policies: Retention | None) -> None:
        self._location = location
        self._wanted = [best for policy in policies for best in KeepBest.within(policy)]

    def check(self, step: object, metadata: Mapping[str, Any] | None) -> None:
        """Checks the metadata of a save. The first call without the metric logs the warning."""
        found = metadata or {}
        missing = sorted({best.metric for best in self._wanted if best._value(found) is None})
        if not missing:
            return
        self._wanted = []
        names = ", ".join(map(repr, [name for name in found if name not in missing][:_NAMES_SHOWN]))
        present = " and ".join(
            f"{name!r} is {'the text ' * isinstance(found[name], str)}{brief(found[name], 40)}"
            for name in missing
            if name in found
        )
        _log.warning(
            "%s: the metadata of step %s have no finite number %s, which KeepBest needs, but %s. KeepBest "
            "does not select such a step. It keeps every step while no step of the run has the number, and "
            "the storage may fill. Pass the number with metadata=, or correct the name in KeepBest",
            self._location,
            step,
            " and no ".join(map(repr, missing)),
            ", and ".join(filter(None, (names, present))) or "no value",
        )


def check_policy(name: str, policy: object) -> None:
    """Refuses an argument that is neither a policy nor None.

    Raises:
        ValueError: naming the argument.
    """
    if policy is not None and (isinstance(policy, type) or not isinstance(policy, Retention)):
        raise ValueError(f"{name} is a policy such as KeepLatest(3), or None, not {policy!r}")


def is_count(value: object) -> bool:
    """True for a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_count(policy: str, name: str, count: object) -> None:
    if not is_count(count):
        raise ValueError(f"{policy} needs a whole number of at least 1 for {name}, not {count!r}")
