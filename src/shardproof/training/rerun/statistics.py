"""The distribution of relative differences between runs, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

_BINS_PER_OCTAVE = 8
_OCTAVES = 64
"""Octaves on either side of 1.0. Values beyond them count in the outermost bin."""
_LAST = _OCTAVES * _BINS_PER_OCTAVE
_SHOWN = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


class Differences:
    """The distribution of the differences between two runs of the same step.

    Zeros, infinities and the largest value are exact. Other values are counted in bins of equal width on a
    logarithmic scale, eight for each factor of two from 2^-64 to 2^64. So a quantile has an error of at most
    5 %, and there are at most 1,024 counters.

    >>> seen = Differences()
    >>> for difference in (0.0, 0.0, 0.0, 1e-7):
    ...     seen.add(difference)
    >>> seen.quantile(0.5), seen.quantile(1.0), seen.count
    (0.0, 1e-07, 4)
    >>> print(seen)
    4 compared, 1 differed: p50 0, p90 1.0e-07, p99 1.0e-07, p99.9 1.0e-07, max 1.0e-07
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of differences added."""
        self.zeros = 0
        """Number of differences that are 0.0: both runs gave the same result."""
        self.infinite = 0
        """Number of infinite differences, such as between NaN and a number."""
        self.largest = 0.0
        self._bins: Counter[int] = Counter()

    def add(self, difference: float) -> None:
        """Count one difference.

        Raises:
            ValueError: the difference is negative or NaN.
        """
        if not difference >= 0.0:
            raise ValueError(f"a relative difference is a number from 0 up, not {difference}")
        self.count += 1
        self.largest = max(self.largest, difference)
        if difference == 0.0:
            self.zeros += 1
        elif math.isinf(difference):
            self.infinite += 1
        else:
            at = math.floor(math.log2(difference) * _BINS_PER_OCTAVE)
            self._bins[max(-_LAST, min(_LAST - 1, at))] += 1

    @property
    def differing(self) -> int:
        """Number of differences that are not 0.0."""
        return self.count - self.zeros

    def quantile(self, share: float) -> float:
        """The smallest difference d such that at least this share of the differences is <= d.

        Args:
            share: from 0.0 to 1.0.

        Returns:
            NaN if there are no differences.

        Raises:
            ValueError: `share` is out of range.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share is {share}, not a number from 0 to 1")
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count))
        if rank == self.count:
            return self.largest
        passed = self.zeros
        if rank <= passed:
            return 0.0
        for index in sorted(self._bins):
            passed += self._bins[index]
            if rank <= passed:
                middle = float(2.0 ** ((index + 0.5) / _BINS_PER_OCTAVE))  # of the bin, on its scale
                return min(middle, self.largest)
        return math.inf

    def quantiles(self) -> dict[str, float]:
        """p50, p90, p99, p99.9 and max, by name."""
        return {name: self.quantile(share) for name, share in _SHOWN.items()} | {"max": self.quantile(1.0)}

    def merge(self, other: Differences) -> None:
        """Add the counts of another distribution, such as that of another rank."""
        self.count += other.count
        self.zeros += other.zeros
        self.infinite += other.infinite
        self.largest = max(self.largest, other.largest)
        self._bins.update(other._bins)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "count": self.count,
            "zeros": self.zeros,
            "infinite": self.infinite,
            "largest": self.largest,
            "bins": [[index, self._bins[index]] for index in sorted(self._bins)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved counts."""
        self.count = state["count"]
        self.zeros = state["zeros"]
        self.infinite = state["infinite"]
        self.largest = state["largest"]
        self._bins = Counter(dict(state["bins"]))

    def __str__(self) -> str:
        if not self.count:
            return "none compared"
        if not self.differing:
            return f"{self.count} compared, none differed"
        texts = {name: f"{value:.1e}" if value else "0" for name, value in self.quantiles().items()}
        shown = ", ".join(f"{name} {text}" for name, text in texts.items())
        return f"{self.count} compared, {self.differing} differed: {shown}"
