"""The best time between two saves, from the time that a save costs and the time between failures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ENOUGH_SAVES = 5
"""Saves to measure before the log has a suggestion."""

MUCH = 2.0
"""A suggestion is logged if the interval differs from it by this factor. By Young's formula, the lost time is
then 1.25 times the least."""


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
        return not 1 / MUCH <= self.interval / self.suggested <= MUCH


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
