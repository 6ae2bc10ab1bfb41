"""The rendezvous of a job with one process. It needs no store."""

from __future__ import annotations

from shardproof.rendezvous.ordering import Operation, Reservation, Turns
from shardproof.rendezvous.protocol import Decide

__all__ = ["LocalRendezvous"]


class LocalRendezvous:
    """A rendezvous of one rank. It raises a posted exception, and one that `decide` raises, unchanged.

    >>> LocalRendezvous().meet("save", "plan", b"two", lambda posts: posts[0] * 2)
    b'twotwo'
    """

    def __init__(self, *, deadline: float = 300.0) -> None:
        self.rank = 0
        self.world_size = 1
        self.deadline = deadline

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        """Decide on the only post. See `Rendezvous.meet`."""
        if isinstance(post, BaseException):
            raise post
        answer = decide([bytes(post)])
        if isinstance(answer, bytes | bytearray | memoryview):
            return bytes(answer)
        (only,) = answer
        return bytes(only)

    def operation(self, name: str) -> Operation:
        """An operation without other ranks. See `Rendezvous.operation`."""
        return Operation(name)

    def reserve(self) -> Reservation:
        """A reservation that never waits. See `Rendezvous.reserve`."""
        return Turns(lambda: None, lambda: self.deadline, RuntimeError).reserve()

    def progress(self, done: int, total: int) -> None:
        """Does nothing: no other rank waits."""

    def waits(self) -> None:
        """Does nothing: no other rank waits."""

    def beside(self, name: str) -> LocalRendezvous:
        """A new rendezvous of this process. See `Rendezvous.beside`."""
        return LocalRendezvous(deadline=self.deadline)

    def arrive(self) -> None:
        """Does nothing: no other rank watches."""

    def hold(self) -> object:
        """None: there is no store."""
        return None

    def close(self) -> None:
        """Does nothing: there are no background threads."""
