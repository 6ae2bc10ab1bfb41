"""The rendezvous of a job with one process: over nothing."""

from __future__ import annotations

from shardproof.rendezvous.ordering import Operation, Reservation, Turns
from shardproof.rendezvous.protocol import Decide

__all__ = ["LocalRendezvous"]


class LocalRendezvous:
    """One process meets itself. An exception that is posted, or raised by `decide`, is raised as it is.

    >>> LocalRendezvous().meet("save", "plan", b"two", lambda posts: posts[0] * 2)
    b'twotwo'
    """

    def __init__(self, *, deadline: float = 300.0) -> None:
        self.rank = 0
        self.world_size = 1
        self.deadline = deadline

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        """Decide on the one post there is. See `Rendezvous.meet`."""
        if isinstance(post, BaseException):
            raise post
        answer = decide([bytes(post)])
        if isinstance(answer, bytes | bytearray | memoryview):
            return bytes(answer)
        (only,) = answer
        return bytes(only)

    def operation(self, name: str) -> Operation:
        """Meetings that nobody else waits for."""
        return Operation(name)

    def reserve(self) -> Reservation:
        """A place without others: one process has nobody to keep an order with."""
        return Turns(lambda: None, lambda: self.deadline, RuntimeError).reserve()

    def progress(self, done: int, total: int) -> None:
        """Nobody else waits: nothing to do."""

    def waits(self) -> None:
        """Nobody else waits: nothing to do."""

    def beside(self, name: str) -> LocalRendezvous:
        """Another one, as good as this."""
        return LocalRendezvous(deadline=self.deadline)

    def arrive(self) -> None:
        """Nobody watches: nothing to do."""

    def hold(self) -> object:
        """There is no store."""
        return None

    def close(self) -> None:
        """Nothing runs in the background: nothing to do."""
