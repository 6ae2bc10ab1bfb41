"""The interface of every rendezvous, and the meetings of one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from shardproof.engine.rendezvous.meeting_errors import from_rank
from shardproof.engine.rendezvous.ordering import Operation, Reservation
from shardproof.errors import ShardproofError

Decide: TypeAlias = Callable[[list[bytes]], bytes | Sequence[bytes]]
"""Takes one post per rank, in the order of ranks. Returns one answer for all ranks, or one per rank."""
Post = TypeVar("Post")
Answer = TypeVar("Answer")


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
        decide: Callable[[list[Post]], Answer],
        post: type[Post],
        answer: type[Answer],
    ) -> Answer:
        """As `meet`, with typed messages, which msgpack can encode, and one answer for all ranks.

        Args:
            phase: see `Rendezvous.meet`.
            work: does the local work and returns the post. An error that it returns keeps its class: if any
                rank returns one, all ranks raise that of the first rank, and `decide` is not called.
            decide: takes one post per rank, in the order of ranks, and returns the answer.
            post: type of the posts.
            answer: type of the answer.

        Raises:
            RankFailure, RankSilent, ShardproofError: as `meet`.
            ShardproofError: `work` returned it on a rank.
        """

        def encoded() -> bytes:
            done = work()
            try:
                if isinstance(done, ShardproofError):
                    return msgspec.msgpack.encode((done.to_wire(), None))
                return msgspec.msgpack.encode((None, done))
            finally:
                del done  # the frames of an error have this one

        def decided(posts: list[bytes]) -> bytes:
            kind = tuple[dict[str, Any] | None, msgspec.Raw]
            found = [msgspec.msgpack.decode(one, type=kind) for one in posts]
            for rank, (error, _) in enumerate(found):
                if error is not None:
                    raise from_rank(rank, len(found), error)
            return msgspec.msgpack.encode(
                decide([msgspec.msgpack.decode(body, type=post) for _, body in found])
            )

        return msgspec.msgpack.decode(self.meet(phase, encoded, decided), type=answer)
