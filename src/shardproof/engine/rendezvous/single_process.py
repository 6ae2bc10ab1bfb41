"""The rendezvous of a job with one process. It needs no store."""

from __future__ import annotations

from concurrent.futures import Future

from shardproof._utils import forks
from shardproof.engine.rendezvous.ordering import Operation, Reservation, Turns
from shardproof.engine.rendezvous.protocol import Decide


class LocalRendezvous:
    """A rendezvous of one rank. It raises a posted exception, and one that `decide` raises, unchanged.

    Args:
        deadline: as in `Rendezvous`. No other rank waits, so `meet` does not use it.

    >>> LocalRendezvous().meet("save", "plan", b"two", lambda posts: posts[0] * 2)
    b'twotwo'
    """

    def __init__(self, *, deadline: float = 300.0) -> None:
        self.rank = 0
        self.world_size = 1
        self.deadline = deadline
        self._lock = forks.lock()
        self._notification: tuple[str, Future[None]] | None = None

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

    def report_waiting(self) -> None:
        """Does nothing: no other rank waits."""

    def new_rendezvous(self, name: str) -> LocalRendezvous:
        """A new rendezvous of this process. See `Rendezvous.new_rendezvous`."""
        return LocalRendezvous(deadline=self.deadline)

    def notify(self, topic: str) -> None:
        """Wake the thread that waits for this notification. See `Rendezvous.notify`."""
        notification = self.notification(topic)
        if not notification.done():
            notification.set_result(None)

    def notification(self, topic: str) -> Future[None]:
        """A future that is done once `notify` has been called. See `Rendezvous.notification`."""
        with self._lock:
            if self._notification is None or self._notification[0] != topic:
                self._notification = topic, Future()
            return self._notification[1]

    def start_heartbeat(self) -> None:
        """Does nothing: no other rank watches."""

    def store_server(self) -> object:
        """None: there is no store."""
        return None

    def close(self) -> None:
        """Does nothing: there are no background threads."""
