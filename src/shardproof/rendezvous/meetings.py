"""The meetings of one operation: local work, then what came of it, for everyone to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardproof.errors import ShardproofError
from shardproof.rendezvous.protocol import Rendezvous

__all__ = ["Meetings"]


class Meetings:
    """A fixed sequence of meetings under one operation's name, for example ``save runs/gpt/step-00001000``.

    Every rank takes part in every meeting up to the first that fails, with the result of its local work or
    with the error it ended in. So a failure anywhere ends the sequence at the same place on all ranks.
    """

    def __init__(self, rendezvous: Rendezvous, operation: str) -> None:
        self._rendezvous = rendezvous
        self._operation = operation

    def meet(
        self, phase: str, work: Callable[[], bytes], decide: Callable[[list[bytes]], bytes | Sequence[bytes]]
    ) -> bytes:
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
