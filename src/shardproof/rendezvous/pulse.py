"""A rank's own signs of life: evidence that it works, not that its process exists."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from shardproof.rendezvous.records import Sign, WrongBytes, checked

__all__ = ["Pulse", "amounts", "describe", "is_elsewhere"]


class Pulse:
    """What a rank has to show for itself. Written by the rank's threads, read by the thread that posts it.

    Evidence is progress that was reported, a step of a wait that is itself bounded, and, while the coordinator
    decides, processor time of the thread that decides. A process that lives but stands still (a hung file
    system, a deadlock) has none, and falls silent like one that is gone.
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
