"""The order of meetings in one process: places in it are taken by one thread and may be used by another."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from shardproof.rendezvous import meeting_errors

__all__ = ["Operation", "Order", "Reservation", "Turns"]

_LOOK = 1.0
"""Seconds between two looks at whether whoever has the turn moves."""


class Reservation:
    """A place in the order of meetings. Whoever enters it waits for its turn, and holds it until leaving.

    It counts until it is left, or given up, or nobody refers to it any more.

    >>> from shardproof.rendezvous import LocalRendezvous
    >>> alone = LocalRendezvous()
    >>> reservation = alone.reserve()
    >>> with reservation:
    ...     alone.meet("save", "plan", b"two", lambda posts: posts[0] * 2)
    b'twotwo'
    """

    def __init__(self, turns: Turns) -> None:
        self.thread: int | None = None
        """That has entered it."""
        self._turns = turns

    def __enter__(self) -> None:
        try:
            self._turns.wait_for(self)
            self.thread = threading.get_ident()
        except BaseException:
            self.give_up()  # an error keeps its frames, and these would keep the place
            raise

    def __exit__(self, *error: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Lets the next one meet. Nothing to do where it was left already."""
        self.thread = None
        self._turns.leave(self)


class Turns:
    """Places in the order in which they were taken.

    Args:
        evidence: changes as long as whoever has the turn moves.
        patience: seconds without a change after which nobody waits any more.
        stuck: makes the error that is raised then, of these seconds.
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
        """The next place. Does not wait."""
        reservation = Reservation(self)
        try:
            # Not `_changed`, which an interrupt may enter and not leave: it is entered in Python.
            with self._lock:
                self._order.append(weakref.ref(reservation))
            return reservation
        except BaseException:
            reservation.give_up()  # an error keeps its frames, and these would keep the place
            raise

    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        first = self._first()
        return first is not None and first.thread == threading.get_ident()

    def is_next(self, reservation: Reservation) -> bool:
        """Whether nobody else has the turn, or has it before this place."""
        return self._first() is reservation

    def wait_for(self, reservation: Reservation) -> None:
        """Returns when it is the turn of a place.

        Raises:
            RuntimeError: the place was left before.
            Exception: what `stuck` makes.
        """
        seen, since = self._evidence(), time.monotonic()
        while not self._is_first(reservation, min(_LOOK, self._patience())):
            if all(place() is not reservation for place in self._order):
                raise RuntimeError("a place in the order of meetings was used after it was left")
            if (now := self._evidence()) != seen:
                seen, since = now, time.monotonic()
            elif (silent := time.monotonic() - since) >= self._patience():
                raise self._stuck(silent)

    def leave(self, reservation: Reservation) -> None:
        """Takes a place out of the order."""
        with self._lock:
            self._order = [place for place in self._order if place() not in (None, reservation)]
            self._changed.notify_all()

    def _is_first(self, reservation: Reservation, seconds: float) -> bool:
        """Whether its turn comes within so many seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: self._first() is reservation, seconds)

    def _first(self) -> Reservation | None:
        return next((there for place in self._order if (there := place()) is not None), None)


class Order(Protocol):
    """Keeps the order of the meetings of a rank."""

    def enter(self, operation: Operation) -> None:
        """Meetings of this thread belong to this operation."""

    def exit(self, operation: Operation) -> None:
        """They do not any more."""

    def leave(self, operation: Operation) -> None:
        """This rank takes no part in the rest of this operation."""


class Operation:
    """What all ranks do together, in one meeting or several. Left with an error, it fails on all ranks.

    A thread that enters it meets for it. Another thread may claim it, and enter it after that.

    Args:
        name: the same on all ranks.
        order: of the meetings of this rank; None where no other rank waits.
    """

    def __init__(self, name: str, order: Order | None = None) -> None:
        self.name = name
        self.phase = "begin"
        """Of its last meeting."""
        self.first: int | None = None
        """Number of its first meeting, once that had a result."""
        self.is_over = False
        """Whether its last meeting failed, on all ranks alike."""
        self.cause = ""
        """Why this rank left it."""
        self.following: int | None = None
        """Number of the meeting after those that were given up for it."""
        self._order = order
        self._owner: dict[str, int] = {}

    def claim(self) -> bool:
        """Whether the calling thread is the first that claims it, which then carries it out or leaves it."""
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
