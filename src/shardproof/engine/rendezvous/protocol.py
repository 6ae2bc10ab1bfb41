"""The interface of every rendezvous, the meetings of one operation, and the order of meetings on one rank."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import msgspec

from shardproof.engine.rendezvous import meeting_errors
from shardproof.engine.rendezvous.meeting_errors import from_rank
from shardproof.errors import ShardproofError

Decide: TypeAlias = Callable[[list[bytes]], bytes | Sequence[bytes]]
"""Takes one post per rank, in the order of ranks. Returns one answer for all ranks, or one per rank."""
Post = TypeVar("Post")
_Answer = TypeVar("_Answer")

_LOOK = 1.0
"""Seconds between two checks for progress of the thread at the first place."""


class Rendezvous(Protocol):
    """A place where all ranks of a job meet.

    Every rank calls `meet` in the same order with the same operation and phase. This order numbers the
    meetings. A failed meeting uses up its number, too, so ranks stay in step after every error.
    """

    rank: int
    world_size: int
    deadline: float
    """Seconds of silence after which the other ranks give up a rank. Progress ends the silence."""

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        """Post a report, and return the answer that rank 0 decides on once every rank has posted.

        Args:
            operation: name of the operation, with the location: ``"save runs/a/step-00000010"``. The other
                ranks may have given up a meeting before this rank called. If that meeting was for another
                operation, this rank continues with the next meeting.
            phase: the part of the operation that ends with this meeting.
            post: the report of this rank, or the exception that stopped it.
            decide: makes the answer. Runs on rank 0 only.

        Raises:
            RankFailure: a rank posted an exception, or `decide` failed. Equal on every rank.
            RankSilent: a rank showed no sign of life for the deadline. Equal on every live rank.
            StructureError: ranks met for different operations or phases. Equal on every rank.
            ShardproofError: `decide` raised it. Equal on every rank.
        """

    def operation(self, name: str) -> Operation:
        """An operation: the meetings of the thread that enters the result as a context.

        A rank may leave the context with an error that the others do not know, such as an interrupt. The
        operation then fails on all ranks, and the ranks stay in one order. A call of `meet` outside of every
        operation is an operation by itself.

        Args:
            name: name of the operation, with the location. The same on all ranks.
        """

    def reserve(self) -> Reservation:
        """Reserve the next place in the order of meetings, for any thread. Does not wait.

        The thread that enters the reservation waits for its turn, and meets inside it. Meetings that are
        called after this call wait until a thread has left or released the reservation.
        """

    def progress(self, done: int, total: int) -> None:
        """Report bytes done and bytes in all of the current phase. Cheap; any thread may call it."""

    def report_waiting(self) -> None:
        """Report that this rank waits for a rank that makes progress. Cheap; any thread may call it."""

    def new_rendezvous(self, name: str) -> Rendezvous:
        """A new rendezvous of the same ranks, with its own order of meetings.

        Args:
            name: the same on all ranks, and new at this rendezvous.
        """

    def notify(self, topic: str) -> None:
        """Wake all ranks that wait for the notification of a topic, now or later.

        A topic has one notification. Later calls with the same topic do nothing.

        Args:
            topic: a name that is new at this rendezvous, and the same on all ranks.
        """

    def notification(self, topic: str) -> Future[None]:
        """A future that is done once any rank has called `notify` with this topic. The wait sends nothing.

        A rank waits for one notification at a time, and does not meet at this rendezvous before it is done.

        Args:
            topic: see `notify`.
        """

    def start_heartbeat(self) -> None:
        """Begin to post signs of life before the first meeting. Reports no error: the meeting does."""

    def store_server(self) -> object:
        """The object that serves the store, or None. The store lives while a reference to it exists."""

    def close(self) -> None:
        """End the background threads. Every later use fails, even by a save under way."""


class MeetingSequence:
    """A fixed sequence of meetings of one operation, for example ``save runs/gpt/step-00001000``.

    Every rank takes part in every meeting up to the first that fails. It posts the result of its local
    work, or the error that ended the work. So one failure ends the sequence at the same meeting on all
    ranks.

    Args:
        rendezvous: the rendezvous of all ranks.
        operation: name of the operation, the same on all ranks.
    """

    def __init__(self, rendezvous: Rendezvous, operation: str) -> None:
        self._rendezvous = rendezvous
        self._operation = operation

    def meet(self, phase: str, work: Callable[[], bytes], decide: Decide) -> bytes:
        """Do local work, post its result or its error, and return this rank's answer.

        Args:
            phase: see `Rendezvous.meet`.
            work: does the local work and returns the post.
            decide: see `Decide`.

        Returns:
            The answer to this rank.

        Raises:
            RankFailure: the work of a rank raised an exception.
            RankSilent: a rank showed no sign of life for the deadline.
            ShardproofError: `decide` raised it. Equal on every rank.
        """
        post: bytes | BaseException
        try:
            post = work()
        except BaseException as error:
            post = error
        try:
            return self._rendezvous.meet(self._operation, phase, post, decide)
        except ShardproofError:
            if isinstance(post, BaseException) and not isinstance(post, Exception):
                raise post from None  # an interrupt or exit keeps its class on its own rank
            raise
        finally:
            del post  # the frames of an error have this one

    def exchange(
        self,
        phase: str,
        work: Callable[[], Post | ShardproofError],
        decide: Callable[[list[Post]], _Answer],
        post: type[Post],
        answer: type[_Answer],
    ) -> _Answer:
        """As `meet`, with typed messages, which msgpack can encode, and one answer for all ranks.

        Args:
            phase: see `Rendezvous.meet`.
            work: does the local work and returns the post. An error that it returns keeps its class: if any
                rank returns one, all ranks raise that of the first rank, and `decide` is not called. The
                text names the rank unless all ranks returned the same error.
            decide: takes one post per rank, in the order of ranks, and returns the answer.
            post: type of the posts.
            answer: type of the answer.

        Raises:
            RankFailure, RankSilent, ShardproofError: as `meet`.
            ShardproofError: `work` returned it on a rank.
        """
        return self._exchange(phase, work, lambda posts: msgspec.msgpack.encode(decide(posts)), post, answer)

    def exchange_each(
        self,
        phase: str,
        work: Callable[[], Post | ShardproofError],
        decide: Callable[[list[Post]], Sequence[_Answer]],
        post: type[Post],
        answer: type[_Answer],
    ) -> _Answer:
        """As `exchange`, where `decide` returns one answer for each rank, in the order of ranks."""

        def each(posts: list[Post]) -> list[bytes]:
            return [msgspec.msgpack.encode(one) for one in decide(posts)]

        return self._exchange(phase, work, each, post, answer)

    def _exchange(
        self,
        phase: str,
        work: Callable[[], Post | ShardproofError],
        decide: Callable[[list[Post]], bytes | Sequence[bytes]],
        post: type[Post],
        answer: type[_Answer],
    ) -> _Answer:
        def encoded() -> bytes:
            done = work()
            try:
                if isinstance(done, ShardproofError):
                    return msgspec.msgpack.encode((done.to_wire(), None))
                return msgspec.msgpack.encode((None, done))
            finally:
                del done  # the frames of an error have this one

        def decided(posts: list[bytes]) -> bytes | Sequence[bytes]:
            kind = tuple[dict[str, Any] | None, msgspec.Raw]
            found = [msgspec.msgpack.decode(one, type=kind) for one in posts]
            errors = [error for error, _ in found]
            for rank, error in enumerate(errors):
                if error is not None:
                    alike = len(found) > 1 and all(other == error for other in errors)
                    raise ShardproofError.from_wire(error) if alike else from_rank(rank, len(found), error)
            return decide([msgspec.msgpack.decode(body, type=post) for _, body in found])

        return msgspec.msgpack.decode(self.meet(phase, encoded, decided), type=answer)


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
