"""What every rendezvous offers to the layers above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from shardproof.errors import ShardproofError
from shardproof.rendezvous.ordering import Operation, Reservation

__all__ = ["Decide", "Meetings", "Rendezvous"]

Decide: TypeAlias = Callable[[list[bytes]], bytes | Sequence[bytes]]
"""Posts in the order of ranks to one answer for all, or to a sequence with one answer a rank."""


class Rendezvous(Protocol):
    """A place where all ranks of a job meet.

    Every rank calls `meet` in the same order with the same operation and phase. Meetings are numbered by that
    order, also when one fails, so that ranks stay in step whatever happened before.
    """

    rank: int
    world_size: int
    deadline: float
    """Seconds of silence after which a rank is given up. Work that moves is never cut short."""

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        """Post, and return the answer that rank 0 decides on once every rank has posted.

        Args:
            operation: what the ranks are doing, with its place: ``"save runs/a/step-00000010"``. A rank that
                comes to a meeting that was given up without it goes on to the next one if that meeting was
                for
                another operation.
            phase: the part of the operation that ends with this meeting.
            post: what this rank has to say, or the exception that stopped it.
            decide: called on rank 0 only, with one post a rank.

        Raises:
            RankFailure: a rank posted an exception, or `decide` failed. Equal on every rank.
            RankSilent: a rank was not heard from within the deadline. Equal on every rank that is alive.
            StructureError: ranks met for different operations or phases. Equal on every rank.
            ShardproofError: whatever `decide` raised of that tree. Equal on every rank.
        """
        ...

    def operation(self, name: str) -> Operation:
        """Meetings that belong together: those of the thread that enters it, until it leaves.

        A rank that leaves it with an error that the others do not know (an interrupt, a failure between two
        meetings) makes it fail on all ranks, and all find one order again. A call of `meet` outside of any
        is an operation of its own.

        Args:
            name: what the ranks are doing, with its place. The same on all ranks.
        """
        ...

    def reserve(self) -> Reservation:
        """The place in the order of meetings that a call of `meet` would have now, for another thread.

        Does not wait. Whoever enters it waits for its turn, and meets within it; meetings that are called
        after it was taken come after it was left or given up.
        """
        ...

    def progress(self, done: int, total: int) -> None:
        """Say that this rank moves: bytes done, of so many, in the current phase. Cheap, from any thread."""
        ...

    def waits(self) -> None:
        """Say that this rank waits for another that moves. Cheap, from any thread."""
        ...

    def beside(self, name: str) -> Rendezvous:
        """Another rendezvous of the same ranks, whose meetings have an order of their own.

        Args:
            name: the same on all ranks, and not used before at this rendezvous.
        """
        ...

    def arrive(self) -> None:
        """Begin to show signs of life before the first meeting. The meeting tells if the store is lost."""
        ...

    def hold(self) -> object:
        """What serves the store, if it would end without being held: keep it as long as it is needed."""
        ...

    def close(self) -> None:
        """End what runs in the background. Afterwards it cannot be used, not even by a save under way."""
        ...


class Meetings:
    """A fixed sequence of meetings under one operation's name, for example ``save runs/gpt/step-00001000``.

    Every rank takes part in every meeting up to the first that fails, with the result of its local work or
    with the error it ended in. So a failure anywhere ends the sequence at the same place on all ranks.
    """

    def __init__(self, rendezvous: Rendezvous, operation: str) -> None:
        self._rendezvous = rendezvous
        self._operation = operation

    def meet(self, phase: str, work: Callable[[], bytes], decide: Decide) -> bytes:
        """Does local work, posts what came of it, and returns this rank's answer.

        Raises:
            RankFailure: the work of some rank raised.
            RankSilent: some rank was not heard from in time.
            ShardproofError: what `decide` raised, on every rank.
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
                raise post from None  # an interrupt or exit stays one on the rank that it came to
            raise
