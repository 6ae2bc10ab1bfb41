"""How long each rank has been silent. Pure bookkeeping: the caller brings the signs of life and the time."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Watch"]


class Watch:
    """Silence of the ranks that one rank waits for, in one meeting.

    A rank's sign of life is any value that changes. What the first look finds, be it nothing, only sets what
    later ones are compared with: it may be old. Time in which the watcher itself did not run (stopped,
    starved) is nobody's silence: one step counts for at most `longest_step` seconds.

    >>> watch = Watch([1, 2], now=0.0, longest_step=1.0)
    >>> watch.observe(1, b"first seen")
    False
    >>> watch.step(1.0)
    >>> watch.observe(1, b"changed")
    True
    >>> watch.step(1.5)
    >>> watch.silence(1), watch.silence(2), watch.silent(for_seconds=1.5)
    (0.5, 1.5, [2])
    """

    def __init__(self, ranks: Iterable[int], now: float, longest_step: float) -> None:
        self._silence = dict.fromkeys(ranks, 0.0)
        self._seen: dict[int, bytes | None] = {}
        self._now = now
        self._longest_step = longest_step

    @property
    def ranks(self) -> list[int]:
        """The ranks still waited for."""
        return list(self._silence)

    def step(self, now: float) -> None:
        """Let time pass."""
        passed = min(max(now - self._now, 0.0), self._longest_step)
        self._now = now
        for rank in self._silence:
            self._silence[rank] += passed

    def observe(self, rank: int, sign: bytes | None, *, is_elsewhere: bool = False) -> bool:
        """Take what a look found of a rank's signs of life; True when it is news.

        Args:
            rank: that was looked at.
            sign: its newest sign of life.
            is_elsewhere: whether the sign tells that the rank waits in another meeting. It is no news then.
        """
        looked = rank in self._seen
        before = self._seen.get(rank)
        self._seen[rank] = sign
        if not looked or before == sign or rank not in self._silence or is_elsewhere:
            return False
        self._silence[rank] = 0.0
        return True

    def sign(self, rank: int) -> bytes | None:
        """The newest sign of life of a rank, if one was seen."""
        return self._seen.get(rank)

    def arrived(self, rank: int) -> None:
        """A rank is here: wait for it no longer."""
        self._silence.pop(rank, None)

    def silence(self, rank: int) -> float:
        """Seconds for which a rank has been silent."""
        return self._silence[rank]

    def silent(self, for_seconds: float) -> list[int]:
        """The ranks that have been silent for at least so long, ascending."""
        return sorted(rank for rank, seconds in self._silence.items() if seconds >= for_seconds)
