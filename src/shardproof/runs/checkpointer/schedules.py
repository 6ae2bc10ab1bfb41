"""When to save: `Every`, the schedule of `Checkpointer.save_if_due`, and the best time between two saves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardproof._utils.arguments import check_number
from shardproof.runs.checkpointer.policies import is_count

ENOUGH_SAVES = 5
"""Saves to measure before the log has a suggestion."""
_MUCH = 2.0
"""A suggestion is logged if the interval differs from it by this factor. By Young's formula, the lost time is
then 1.25 times the least."""


class Schedule:
    """Rules that combine by ``|``. A save is due if any rule selects it."""

    @property
    def rules(self) -> tuple[Every, ...]:
        """The rules."""
        raise NotImplementedError

    def __or__(self, other: Any) -> Schedule:
        return _Union(self.rules + other.rules) if isinstance(other, Schedule) else NotImplemented

    def is_due_at(self, step: int, before: int) -> bool:
        """True if a rule by steps selects this step.

        Args:
            step: the step.
            before: the step of the call before this one.
        """
        return any(
            rule.steps is not None and step // rule.steps > before // rule.steps for rule in self.rules
        )

    @property
    def seconds(self) -> float | None:
        """Seconds from one save to the next by the rules of time; None if there is no such rule."""
        return min((rule.minutes * 60 for rule in self.rules if rule.minutes is not None), default=None)


@dataclass(frozen=True, slots=True)
class Every(Schedule):
    """A save after each number of steps or each period of time. With both arguments, either rule suffices.

    Args:
        steps: a save is due at each multiple of this number. If the steps between two calls of
            `save_if_due` contain a multiple, it is due at the later call. No save is due at step 0.
        minutes: a save is due once rank 0 has measured so many minutes since the last scheduled save, or
            since the `Checkpointer` was made. The ranks save at the same call; see docs/schedules.md.

    Raises:
        TypeError: `minutes` is no number.
        ValueError: both are None, or one is not positive.

    >>> schedule = Every(steps=500) | Every(minutes=20)
    >>> [step for step in range(1, 1501) if schedule.is_due_at(step, step - 1)]
    [500, 1000, 1500]
    >>> schedule.seconds
    1200
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("Every needs steps or minutes")
        if self.steps is not None and not is_count(self.steps):
            raise ValueError(f"Every needs a whole number of at least 1 for steps, not {self.steps!r}")
        check_number("minutes", self.minutes, "of minutes")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"Every needs a positive number of minutes, not {self.minutes!r}")

    @property
    def rules(self) -> tuple[Every, ...]:
        """This rule."""
        return (self,)


@dataclass(frozen=True, slots=True)
class _Union(Schedule):
    """Several rules."""

    all_rules: tuple[Every, ...]

    @property
    def rules(self) -> tuple[Every, ...]:
        """The rules."""
        return self.all_rules


def best_interval(cost: float, mtbf: float) -> float:
    """The time from the start of one save to the start of the next that loses the least time, in seconds.

    The lost time is the time of the saves and of the steps that a failure undoes. This is the formula of
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006), plus the cost of one save. For small costs it is close to
    ``sqrt(2 * cost * mtbf)``: J. W. Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17 (1974).

    Args:
        cost: seconds that training waits for a save.
        mtbf: seconds between two failures of the job, on average.

    >>> round(best_interval(cost=10.0, mtbf=12 * 3600.0))
    933
    >>> round(math.sqrt(2 * 10.0 * 12 * 3600.0))
    930
    """
    if cost >= 2 * mtbf:
        return mtbf + cost
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


@dataclass(frozen=True, slots=True)
class IntervalAdvice:
    """A suggested time between saves, with its inputs. All times are seconds."""

    saves: int
    """Number of saves that were measured."""
    interval: float
    """From one save to the next."""
    cost: float
    """Of one save."""
    mtbf: float
    """Between two failures of the job."""
    suggested: float
    """From one save to the next."""

    @property
    def differs_much(self) -> bool:
        """True if the interval is far from the suggested one."""
        return not 1 / _MUCH <= self.interval / self.suggested <= _MUCH


def advice_of(times: Sequence[float], costs: Sequence[float], mtbf: float) -> IntervalAdvice | None:
    """The advice for saves that began at these times; None for fewer than two, or without costs.

    Interval and cost are medians, so that a pause of the run counts little.

    >>> advice_of([0.0, 600.0, 1200.0, 9000.0], [2.0, 3.0, 2.5], mtbf=36000.0).interval
    600.0
    """
    ordered = sorted(times)
    gaps = [after - before for before, after in pairwise(ordered) if after > before]
    if not gaps or not costs:
        return None
    cost = statistics.median(costs)
    return IntervalAdvice(len(ordered), statistics.median(gaps), cost, mtbf, best_interval(cost, mtbf))
