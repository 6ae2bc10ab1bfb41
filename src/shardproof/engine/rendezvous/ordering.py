"""The order of meetings on one rank: operations, and the places that its threads take in the order."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from shardproof.engine.rendezvous import meeting_errors

_LOOK = 1.0
"""Seconds between two checks for progress of the thread at the first place."""


class Reservation:
    """A place in the order of meetings. One thread may take it, and another may use it.

    A thread that enters the reservation waits until its place is the first, and has the turn until it leaves.
    The place ends when a thread leaves or releases it, or with the last reference to it.

    >>> from shardproof.rendezvous import LocalRendezvous
    >>> alone = LocalRendezvous()
    >>> reservation = alone.reserve()
    >>> with reservation:
    ...     alone.meet("save", "plan", b"two", lambda posts: posts[0] * 2)
    b'twotwo'
    """

    def __init__(self, turns: Turns) -> None:
        self.thread: int | None = None
        """The thread that has entered it."""
        self._turns = turns

    def __enter__(self) -> None:
        try:
            self._turns.wait_for(self)
            self.thread = threading.get_ident()
        except BaseException:
            self.release()  # else the frames of the error keep the place
            raise

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the next place have the turn. Calling it again does nothing."""
        self.thread = None
        self._turns.leave(self)


class Turns:
    """The places of one rank, in the order in which its threads took them.

    Args:
        evidence: gives a value that changes while the thread that has the turn makes progress.
        patience: gives the seconds without a change after which the waiting threads fail.
        stuck: makes the error of these threads from the seconds.
    """

    def __init__(
        self,
        evidence: Callable[[], object],
        patience: Callable[[], float],
        stuck: Callable[[float], Exception],
    ) -> None:
        self._evidence = evidence
        self._patience = patience
        self._stuck = stuck
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._order: list[weakref.ref[Reservation]] = []

    def reserve(self) -> Reservation:
        """Take the next place. Does not wait."""
        reservation = Reservation(self)
        try:
            # Not `_changed`: it is entered in Python, where an interrupt may come before the block begins.
            with self._lock:
                self._order.append(weakref.ref(reservation))
            return reservation
        except BaseException:
            reservation.release()  # else the frames of the error keep the place
            raise

    def is_mine(self) -> bool:
        """True if this thread has the turn."""
        first = self._first()
        return first is not None and first.thread == threading.get_ident()

    def is_next(self, reservation: Reservation) -> bool:
        """True if this place is the first in the order."""
        return self._first() is reservation

    def wait_for(self, reservation: Reservation) -> None:
        """Return when it is the turn of a place.

        Raises:
            RuntimeError: a thread has left the place.
            Exception: `stuck` made it, because the thread that has the turn makes no progress.
        """
        seen, since = self._evidence(), time.monotonic()
        while True:
            with self._lock:
                pause = min(_LOOK, self._patience())
                if self._changed.wait_for(lambda: self._first() is reservation, pause):
                    return
            if all(place() is not reservation for place in self._order):
                raise RuntimeError("a place in the order of meetings was used after it was left")
            if (now := self._evidence()) != seen:
                seen, since = now, time.monotonic()
            elif (silent := time.monotonic() - since) >= self._patience():
                raise self._stuck(silent)

    def leave(self, reservation: Reservation) -> None:
        """Remove a place from the order."""
        with self._lock:
            self._order = [place for place in self._order if place() not in (None, reservation)]
            self._changed.notify_all()

    def _first(self) -> Reservation | None:
        return next((there for place in self._order if (there := place()) is not None), None)


class Order(Protocol):
    """The order of the meetings of a rank."""

    def enter(self, operation: Operation) -> None:
        """Assign the meetings of this thread to this operation.

        If an interrupt prevented this thread from leaving an earlier operation, the rank leaves that
        operation now.
        """

    def exit(self, operation: Operation) -> None:
        """End the assignment."""

    def leave(self, operation: Operation) -> None:
        """Take no part in the rest of this operation."""


class Operation:
    """An operation of all ranks, with one meeting or several.

    The meetings of the thread that enters it belong to it. An error that leaves the context makes the
    operation fail on all ranks. Another thread may claim the operation first, and enter it after that.

    Args:
        name: the same on all ranks.
        order: the order of this rank's meetings; None if no other rank waits.
    """

    def __init__(self, name: str, order: Order | None = None) -> None:
        self.name = name
        self.phase = "begin"
        """The phase of its last meeting."""
        self.first: int | None = None
        """The number of its first meeting, once that meeting has a result."""
        self.is_over = False
        """True if its last meeting failed, equally on all ranks."""
        self.cause = ""
        """The text of the error with which this rank left it."""
        self.following: int | None = None
        """The number of the meeting after those that this rank gave up for it."""
        self._order = order
        self._owner: dict[str, int] = {}

    def claim(self) -> bool:
        """True if the calling thread is the first to claim it. That thread carries it out or leaves it."""
        return self._owner.setdefault("thread", threading.get_ident()) == threading.get_ident()

    def __enter__(self) -> Self:
        if self._order is not None:
            self._order.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._order is None:
            return
        if error is not None and not self.is_over and self.claim():
            self.cause = meeting_errors.cause_text(error)
            self._order.leave(self)
        self._order.exit(self)
