"""`Every`: the schedule of `Checkpointer.save_if_due`, by steps, by time, or by both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardproof._utils.arguments import check_number
from shardproof.runs.checkpointer.policies import is_count


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
