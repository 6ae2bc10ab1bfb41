"""Signs of life: a rank posts evidence that it works, and other ranks measure how long it is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from shardproof.engine.rendezvous.wire import Sign, WrongBytes, checked

NO_PROGRESS = "no progress reported"
"""Text of a sign of life that tells of no work for a meeting."""


class Heartbeat:
    """The evidence of work of this rank. The rank's threads write it, and the thread of a `Link` posts it.

    Three things are evidence: reported progress, a step of a wait that has its own bound, and processor
    time of the thread in which the coordinator decides. A process that hangs (a file system, a deadlock)
    produces no evidence, and counts as silent like a dead process.
    """

    def __init__(self) -> None:
        self.period = 1.0
        """Seconds between two checks of the evidence."""
        self._progress = (0, 0)
        self._ticks = 0
        self._phase = ""
        self._meeting: int | None = None
        self._clock: int | None = None
        self._posted: tuple[Any, ...] = self.evidence()
        self._count = 0

    def progress(self, done: int, total: int) -> None:
        """Report bytes done and bytes in all of the current phase."""
        self._progress = (done, total)

    def tick(self) -> None:
        """Report one step of a wait that has its own bound."""
        self._ticks += 1

    def enter(self, phase: str) -> None:
        """Begin a meeting."""
        self._phase = phase
        self._ticks += 1

    def joined(self, meeting: int) -> None:
        """Note the meeting of the generation that the rank is in, until `leave`."""
        self._meeting = meeting

    def leave(self) -> None:
        """End a meeting, and with it the progress reported before it."""
        self._phase, self._meeting = "", None
        self._progress = (0, 0)
        self._posted = self.evidence()

    def decide(self, active: bool) -> None:
        """Begin or end a decision of the calling thread. Its processor time is evidence meanwhile."""
        if active and hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        else:
            self._clock = None

    def news(self) -> bytes | None:
        """The value to post, or None if there is no new evidence since the last one."""
        evidence = self.evidence()
        if evidence == self._posted:
            return None
        self._posted = evidence
        self._count += 1
        done, total = self._progress
        return msgspec.json.encode(Sign(self._count, self._phase, done, total, self._meeting))

    def evidence(self) -> tuple[Any, ...]:
        """A value that changes with each new piece of evidence."""
        clock = self._clock
        try:
            busy = int(time.clock_gettime(clock) * 100) if clock is not None else 0
        except OSError:  # the thread that decides has ended: no evidence
            busy = 0
        return (self._progress, self._ticks, self._phase, busy)


class Watch:
    """The silence of each rank that one rank waits for, in one meeting.

    It only computes: the caller passes the signs of life and the time. A sign of life is a value that
    changes. The first observation only sets the value for the comparison, because it may be old. The
    watcher itself may not run for a while (stopped, starved). So one step adds at most `longest_step`
    seconds of silence.

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
        """The ranks that have not arrived."""
        return list(self._silence)

    def step(self, now: float) -> None:
        """Add the time since the last step to the silence of every rank."""
        passed = min(max(now - self._now, 0.0), self._longest_step)
        self._now = now
        for rank in self._silence:
            self._silence[rank] += passed

    def observe(self, rank: int, sign: bytes | None, *, is_elsewhere: bool = False) -> bool:
        """Note the newest sign of life of a rank. Returns True if it ends the rank's silence.

        A rank that `is_elsewhere`, in another meeting, is silent here.
        """
        looked = rank in self._seen
        before = self._seen.get(rank)
        self._seen[rank] = sign
        if not looked or before == sign or rank not in self._silence or is_elsewhere:
            return False
        self._silence[rank] = 0.0
        return True

    def sign(self, rank: int) -> bytes | None:
        """The newest sign of life of a rank, or None."""
        return self._seen.get(rank)

    def arrived(self, rank: int) -> None:
        """Stop watching a rank, because it has arrived."""
        self._silence.pop(rank, None)

    def silence(self, rank: int) -> float:
        """Seconds for which a rank has been silent."""
        return self._silence[rank]

    def silent(self, for_seconds: float) -> list[int]:
        """The ranks that have been silent for at least so long, ascending."""
        return sorted(rank for rank, seconds in self._silence.items() if seconds >= for_seconds)


def amounts(sign: bytes | None) -> tuple[int, int]:
    """Bytes done and bytes in all, from a sign of life; zeros without one.

    >>> amounts(b'{"beat": 7, "phase": "", "done": 3, "total": 8}')
    (3, 8)
    """
    beat = _read(sign)
    return (beat.done, beat.total) if beat is not None else (0, 0)


def is_elsewhere(sign: bytes | None, meeting: int) -> bool:
    """True if a sign of life shows that its rank is in another meeting than this one.

    >>> is_elsewhere(b'{"beat": 7, "phase": "", "done": 0, "total": 0, "meeting": 4}', 3)
    True
    """
    beat = _read(sign)
    return beat is not None and beat.meeting is not None and beat.meeting != meeting


def describe(sign: bytes | None, meeting: int | None = None) -> str:
    """A sign of life as text, for an error message about a meeting.

    >>> describe(b'{"beat": 7, "phase": "", "done": 3145728, "total": 8388608}')
    '3.0 MiB of 8.0 MiB'
    """
    beat = _read(sign)
    if beat is not None and meeting is not None and is_elsewhere(sign, meeting):
        return f"waits in another meeting, of phase {beat.phase}"
    if beat is None:
        return NO_PROGRESS if sign is None else f"unreadable sign of life {sign[:40]!r}"
    if beat.total or beat.done:
        return f"{beat.done / 2**20:.1f} MiB of {beat.total / 2**20:.1f} MiB"
    return f"in the meeting of phase {beat.phase}" if beat.phase else NO_PROGRESS


def _read(sign: bytes | None) -> Sign | None:
    """The decoded sign of life. Wrong bytes count as none: they must not fail a meeting."""
    try:
        return None if sign is None else checked("beat", sign, Sign)
    except WrongBytes:
        return None
