"""A rank's own signs of life: evidence that it works, not that its process exists."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from shardproof.rendezvous.wire import Sign, WrongBytes, checked

__all__ = ["Heartbeat", "Watch", "amounts", "describe", "is_elsewhere"]


class Heartbeat:
    """What a rank has to show for itself. Written by the rank's threads, read by the thread that posts it.

    Evidence is progress that was reported, a step of a wait that is itself bounded, and, while the
    coordinator decides, processor time of the thread that decides. A process that lives but stands still (a
    hung file system, a deadlock) has none, and falls silent like one that is gone.
    """

    def __init__(self) -> None:
        self.period = 1.0
        """Seconds between two looks at the evidence."""
        self._progress = (0, 0)
        self._ticks = 0
        self._phase = ""
        self._meeting: int | None = None
        self._clock: int | None = None
        self._posted: tuple[Any, ...] = self.evidence()
        self._count = 0

    def progress(self, done: int, total: int) -> None:
        """Bytes done, of so many, in the current phase."""
        self._progress = (done, total)

    def tick(self) -> None:
        """One more bounded step was made."""
        self._ticks += 1

    def enter(self, phase: str) -> None:
        """A meeting begins."""
        self._phase = phase
        self._ticks += 1

    def joined(self, meeting: int) -> None:
        """The rank is in this meeting of its generation until it leaves."""
        self._meeting = meeting

    def leave(self) -> None:
        """A meeting is over, and so is what was done before it."""
        self._phase, self._meeting = "", None
        self._progress = (0, 0)
        self._posted = self.evidence()

    def decide(self, active: bool) -> None:
        """The calling thread starts or ends a decision: its processor time counts as a sign of life."""
        if active and hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        else:
            self._clock = None

    def news(self) -> bytes | None:
        """The value to post, or None when there is nothing new since the last one."""
        evidence = self.evidence()
        if evidence == self._posted:
            return None
        self._posted = evidence
        self._count += 1
        done, total = self._progress
        return msgspec.json.encode(Sign(self._count, self._phase, done, total, self._meeting))

    def evidence(self) -> tuple[Any, ...]:
        """Another value whenever there is something new to show."""
        clock = self._clock
        try:
            busy = int(time.clock_gettime(clock) * 100) if clock is not None else 0
        except OSError:  # the thread that decides has ended: no evidence
            busy = 0
        return (self._progress, self._ticks, self._phase, busy)


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


def amounts(sign: bytes | None) -> tuple[int, int]:
    """Bytes done and bytes in all, as a sign of life tells; zeros where there is none.

    >>> amounts(b'{"beat": 7, "phase": "", "done": 3, "total": 8}')
    (3, 8)
    """
    beat = _read(sign)
    return (beat.done, beat.total) if beat is not None else (0, 0)


def is_elsewhere(sign: bytes | None, meeting: int) -> bool:
    """Whether a sign of life tells that its rank is in another meeting than this one.

    >>> is_elsewhere(b'{"beat": 7, "phase": "", "done": 0, "total": 0, "meeting": 4}', 3)
    True
    """
    beat = _read(sign)
    return beat is not None and beat.meeting is not None and beat.meeting != meeting


def describe(sign: bytes | None, meeting: int | None = None) -> str:
    """A sign of life in words, for a rank that waits in a meeting.

    >>> describe(b'{"beat": 7, "phase": "", "done": 3145728, "total": 8388608}')
    '3.0 MiB of 8.0 MiB'
    """
    beat = _read(sign)
    if beat is not None and meeting is not None and is_elsewhere(sign, meeting):
        return f"waits in another meeting, of phase {beat.phase}"
    if beat is None:
        return "no progress reported" if sign is None else f"unreadable sign of life {sign[:40]!r}"
    if beat.total or beat.done:
        return f"{beat.done / 2**20:.1f} MiB of {beat.total / 2**20:.1f} MiB"
    return f"in the meeting of phase {beat.phase}" if beat.phase else "no progress reported"


def _read(sign: bytes | None) -> Sign | None:
    """What a sign of life tells. It is only shown to people, so wrong bytes fail no meeting."""
    try:
        return None if sign is None else checked("beat", sign, Sign)
    except WrongBytes:
        return None
