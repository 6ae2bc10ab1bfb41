"""Meetings of many processes over the key-value store that their launcher already runs.

Note: Why no rank waits for ever
--------------------------------
Rank 0 is the coordinator. Six facts bound every wait:

1. The caller never enters the store's client. Requests run on the threads of two `Link`s: one for requests
   that the server answers at once, one for the single long wait of a meeting and for reading its result.
   The caller waits for both threads in steps of a fraction of the deadline. So it notices a server that is
   dead or stopped like a silent rank.
2. The coordinator watches the ranks that have not posted; the other ranks watch the coordinator. At each
   step, the watcher reads the sign of life that the rank's `Heartbeat` posts, and adds up the time without
   news. A sign of life is evidence of work. A rank that hangs is as silent as one that is dead, and the
   watcher waits for a rank that makes progress.
3. A rank that gives up writes its verdict to the meeting's one verdict key, by compare-and-set. The first
   verdict is the only one. A coordinator that was stopped, and that the others gave up, finds their verdict
   when it wakes, and not its own.
4. Ranks join a generation (the note in `membership`). In a generation, each rank numbers its meetings by
   itself, from the first meeting for which it joined. The result of a meeting uses up its number, even if
   it is an error. So a rank that comes too late finds the verdict under the number that the others used,
   and is in step again. A rank that left out a whole operation sees from the verdict's operation that the
   verdict concerns another operation, and takes the next number. A rank that leaves an operation gives up
   its next meeting (the note "One order after an interrupt"). Threads of one rank meet one at
   a time, in the order in which they took their places (`Turns`). A thread waits for another thread as long
   as the rank shows signs of life.
5. A sign of life names the meeting that its rank is in. A rank that waits in another meeting counts as
   silent. So two live ranks cannot keep each other waiting. The verdict then tells all ranks to join a new
   generation, in which they count from the same meeting.
6. A coordinator whose process may serve the store waits until the other ranks have read its verdict, for a
   limited time.

One case remains: the ranks may give up the coordinator while it decides, and its actions until then stay in
effect. So the commit of a checkpoint may have taken effect although all ranks raise `RankSilent`.

Note: One order after an interrupt
----------------------------------
Meetings have numbers, and a rank posts once to each meeting. A rank that is interrupted between two meetings
does not know the meeting in which the other ranks are. But they cannot pass a meeting to which this rank has
not posted. So the rank writes a verdict that gives up the first such meeting, by compare-and-set, and
continues after it.

The verdict names a position: the name of the operation that the rank left, and the number of meetings that
the operation had before this one. Each other rank compares it with its own position. If they are equal, its
operation fails with the reason in the verdict. Otherwise it skips the meeting. Three ranks save, and rank 1
is interrupted after meeting 7:

    meeting    7             8
    rank 0     ("save", 0)   ("save", 1): waits
    rank 1     ("save", 0)   interrupted: gives up meeting 8 at ("save", 1)
    rank 2     left          ("load", 0): waits

The save of rank 0 fails with the reason. Rank 2 skips meeting 8 and posts to meeting 9.

Another rank may have written the verdict of meeting 8 first. Three cases follow:

- It gives up the same operation, or has its error: the other ranks know that the save failed.
- It gives up another operation: rank 1 gives up meeting 9 in the same way.
- It tells all ranks to join a new generation (the note in `membership`): rank 1 joins, too. There it proposes
  that verdict again, if the coordinator did not write it. If the verdict is about another operation, rank 1
  then gives up the next meeting for its own. A new generation counts meetings anew; positions stay.

A rank that has not joined has posted to no meeting. It keeps its verdict until it has joined.

A second interrupt repeats steps, and each step can be repeated: the rank counts a meeting only after it has a
result, and keeps the operation on a list until the store has answered.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from shardproof.engine.rendezvous import meeting_errors
from shardproof.engine.rendezvous import store_requests as requests
from shardproof.engine.rendezvous.channel import Channel
from shardproof.engine.rendezvous.heartbeat import Heartbeat
from shardproof.engine.rendezvous.meeting import Meeting, MeetingGivenUp, attend
from shardproof.engine.rendezvous.protocol import Decide, Operation, Reservation, Turns
from shardproof.engine.rendezvous.store_requests import LinkLost, wait_in_steps
from shardproof.engine.rendezvous.wire import (
    ERROR,
    GIVEN_UP,
    MeetingKeys,
    WrongBytes,
    pack,
    pack_error,
    unpack,
)
from shardproof.errors import ShardproofError
from shardproof.reentrance import refuse_inside

_log = logging.getLogger("shardproof")


class StoreRendezvous:
    """The ranks of a job meet over a `torch.distributed` store.

    Every store works (TCPStore, HashStore, FileStore, PrefixStore). The rendezvous makes clients of its own,
    so its waits do not block the other users of the store. Several threads of one process may call meetings.
    The meetings run one at a time, and all ranks must call them in the same order.

    Args:
        store: the store that all ranks share.
        rank: the rank of this process.
        world_size: the number of ranks.
        deadline: seconds of silence after which the others give up a rank.
        name: the prefix of all keys. Two rendezvous of the same ranks at one store need different names, or
            their first meetings in the same order on every rank.
        server: the object that `store` is a client of, if it may be the server of the store.
        global_ranks: the numbers of the ranks in the default process group. None: they are not known, or
            equal.

    Raises:
        ValueError: `rank` is outside the world, or `deadline` is not positive.

    Example:
        >>> from torch.distributed import HashStore
        >>> alone = StoreRendezvous(HashStore(), rank=0, world_size=1, deadline=10.0)
        >>> alone.meet("save", "plan", b"two", lambda posts: posts[0] * 2)
        b'twotwo'
        >>> alone.close()
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        deadline: float = 300.0,
        name: str = "shardproof",
        server: weakref.ref[Any] | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self._heartbeat = Heartbeat()
        self.deadline = deadline
        self._own_name = name
        self._server = server
        self.global_ranks = global_ranks
        self._store = store
        self._channel: Channel | None = None
        self._number = 0
        self._turns = Turns(
            self._heartbeat.evidence,
            lambda: 2 * self._deadline,
            lambda seconds: meeting_errors.stuck(rank, seconds),
        )
        self._entered: dict[int, Operation] = {}
        """The current operation of each thread."""
        self._left: deque[Operation] = deque()
        """Operations that this rank left, with a next meeting that it has not given up yet."""
        self._closed = False
        self._process = os.getpid()

    @property
    def deadline(self) -> float:
        """Seconds of silence after which the other ranks give up a rank."""
        return self._deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"a deadline is a positive number of seconds, not {seconds!r}")
        self._deadline = float(seconds)
        # Every rank reads the coordinator's sign of life once a period: this bounds the requests a second.
        self._heartbeat.period = min(max(1.0, self.world_size / 2048), self._deadline / 8)

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        """Post, and return the answer that rank 0 decides on. See `Rendezvous.meet`."""
        self._check()
        current = self._entered.get(threading.get_ident())
        if current is None:
            with self.operation(operation):
                return self.meet(operation, phase, post, decide)
        with self._my_turn():
            current.phase, current.is_over = phase, False
            while True:
                try:
                    number = self._next_number()
                except LinkLost as lost:
                    raise meeting_errors.store_lost(operation, phase, str(lost), None) from lost
                except WrongBytes as wrong:
                    raise meeting_errors.wrong_bytes(operation, phase, str(wrong)) from wrong
                first = number if current.first is None else current.first
                meeting = Meeting(
                    number,
                    self.world_size,
                    operation,
                    phase,
                    self._deadline,
                    waits_for_readers=self.rank == 0 and _ends_with_this_process(self._store),
                    operation_position=(current.name, number - first),
                )
                try:
                    answer = attend(self._open(), meeting, post, decide)
                except MeetingGivenUp:
                    self._number = number + 1
                    continue
                except ShardproofError:
                    self._number, current.is_over = number + 1, True
                    raise
                current.first = first
                self._number = number + 1
                return answer

    def operation(self, name: str) -> Operation:
        """Meetings of one operation. See `Rendezvous.operation`."""
        return Operation(name, self)

    def enter(self, operation: Operation) -> None:
        """Assign the meetings of this thread to this operation. See `Order.enter`.

        The rank leaves the thread's earlier operation, unless another thread has claimed it. The interrupt
        did not reach that thread, which continues the operation.
        """
        before = self._entered.get(threading.get_ident())
        if before is not None and before is not operation and not before.is_over and before.claim():
            self.leave(before)
        self._entered[threading.get_ident()] = operation

    def exit(self, operation: Operation) -> None:
        """Meetings of this thread belong to no operation."""
        if self._entered.get(threading.get_ident()) is operation:
            del self._entered[threading.get_ident()]

    def leave(self, operation: Operation) -> None:
        """Leave an operation. Notifies the other ranks now, unless a thread of this rank is in a meeting."""
        self._left.append(operation)
        if self.closed:
            return
        place = self._turns.reserve()
        try:
            if self._turns.is_next(place):
                _fail_next_meeting(self._open(), self._number, self._left[0], self.world_size)
        except (LinkLost, WrongBytes) as error:
            _log.warning(
                "%s: this rank left the operation and cannot report it to the other ranks now; they wait "
                "until its next meeting: %s",
                operation.name,
                error,
            )
        finally:
            place.release()

    def _next_number(self) -> int:
        """The number of the next meeting, after the meetings that this rank gave up by leaving operations."""
        while self._left:
            left = self._left[0]
            while left.following is None:
                self._fail_meetings(left)
            self._number = left.following
            self._left.popleft()
        return self._number

    def _fail_meetings(self, left: Operation) -> None:
        """Make meetings of an operation fail. Leave the generation if the verdict says so."""
        channel = self._open()
        answer = _fail_next_meeting(channel, self._number, left, self.world_size)
        if answer is None:
            left.following = self._number + 1
            return
        result = wait_in_steps(answer, self._deadline)
        channel.remember_verdicts(range(self._number, result.following))
        if result.renew:
            channel.leave(result.following - 1, result.carried)
        if result.is_reported:
            left.following = result.following
        self._number = result.following

    def reserve(self) -> Reservation:
        """Take a place in the order of this process's meetings. See `Rendezvous.reserve`."""
        self._check()
        return self._turns.reserve()

    def progress(self, done: int, total: int) -> None:
        """Report progress in bytes. Costs one assignment."""
        self._heartbeat.progress(done, total)

    def report_waiting(self) -> None:
        """Report one step of a wait that has its own bound. See `Rendezvous.report_waiting`."""
        self._heartbeat.tick()

    def new_rendezvous(self, name: str) -> StoreRendezvous:
        """A new rendezvous of these ranks at this store. See `Rendezvous.new_rendezvous`.

        Its threads start now. The caller may need it at the end of the program, when no thread can be
        started.
        """
        other = StoreRendezvous(
            self._store,
            self.rank,
            self.world_size,
            deadline=self._deadline,
            name=f"{self._own_name}/{name}",
            server=self._server,
            global_ranks=self.global_ranks,
        )
        with suppress(RuntimeError):  # the first meeting reports it
            if not name.startswith("schedule "):  # a restarted process uses this name again
                self._open().note_other(other._name)
            other._open()
        return other

    def notify(self, topic: str) -> None:
        """Wake all ranks that wait for a notification. See `Rendezvous.notify`."""
        self._check()
        self._open().notify(f"{self._name}/topic/{topic}", self._number, self.world_size)

    def notification(self, topic: str) -> Future[None]:
        """Wait for a notification on the connection of meetings. See `Rendezvous.notification`."""
        self._check()
        return self._open().notification(f"{self._name}/topic/{topic}")

    def start_heartbeat(self) -> None:
        """Begin to show signs of life. See `Rendezvous.start_heartbeat`."""
        self._check()
        with self._my_turn():
            try:
                self._open().start_heartbeat()
            except (LinkLost, WrongBytes) as error:
                _log.warning("the store of the rendezvous cannot be reached: %s", error)

    def store_server(self) -> object:
        """The process group's store, which serves this one as long as a reference to it exists."""
        return self._server() if self._server is not None else None

    def close(self) -> None:
        """End the background threads. Later meetings raise RuntimeError."""
        self._closed = True
        if self._channel is not None and self._process == os.getpid():
            self._channel.close()

    @property
    def closed(self) -> bool:
        """True after `close`, and in a child that was forked after this rendezvous was made."""
        return self._closed or self._process != os.getpid()

    @property
    def _name(self) -> str:
        """The prefix of all keys."""
        return f"{self._own_name}/{self.world_size}"

    def _open(self) -> Channel:
        if self._channel is None:
            self._channel = Channel(
                self._store, self._name, self.rank, self.world_size, self._heartbeat, self._deadline
            )
            # also at interpreter exit, while threads can still be joined
            weakref.finalize(self, _close, self._channel, os.getpid())
        self._channel.patience = self._deadline
        return self._channel

    def _check(self) -> None:
        """Refuse a call that may not take a turn."""
        if self._closed:
            raise RuntimeError("this rendezvous is closed")
        if self._process != os.getpid():
            raise RuntimeError(
                "this rendezvous belongs to the parent process: after a fork, make one of your own"
            )
        refuse_inside("a meeting", "a meeting")

    def _my_turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._turns.is_mine() else self._turns.reserve()


def _close(channel: Channel, process: int) -> None:
    """Close a channel of this process: a forked child has none of its threads."""
    if process == os.getpid():
        channel.close()


def _ends_with_this_process(store: Any) -> bool:
    """True if rank 0 may serve this store. A client object does not reveal it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__ == "TCPStore" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


@dataclass(frozen=True, slots=True)
class _LeaveResult:
    """The answer of the store to a rank that left an operation."""

    following: int
    """The number of the meeting after those that this rank gave up."""
    is_reported: bool
    """True if the standing verdict makes the operation fail on its other ranks."""
    renew: bool
    """True if all ranks join again, in a new generation."""
    carried: bytes | None = None
    """The verdict that this rank proposes again in the new generation; None if that is not needed."""


def _fail_next_meeting(
    channel: Channel, number: int, operation: Operation, world_size: int
) -> Future[_LeaveResult] | None:
    """Make the next meeting fail in which other ranks may wait for this one. Does not wait for them.

    `number` is that of the first meeting whose result this rank has not seen. The result is the answer of the
    store, equal for each call; None if the rank keeps the verdict until it has joined.
    """
    error = meeting_errors.failure(
        operation.name, operation.phase, world_size, {channel.rank: operation.cause or "it was interrupted"}
    )

    def record(before: int) -> bytes:
        position = operation.name, before
        return pack(operation.name, operation.phase, GIVEN_UP, pack_error(error), operation_position=position)

    channel.begin(number)
    if channel.rank > 0 and not channel.is_member:
        channel.propose_failure(number, record(0 if operation.first is None else number - operation.first))
        return None
    joined = channel.join(number)
    root, start = joined.root, joined.number

    def request(store: Any) -> _LeaveResult:
        at, first = number, operation.first
        keys = MeetingKeys(root, start)
        if channel.rank > 0 and store.check([keys.post(channel.rank)]):
            found = requests.peek(store, keys.verdict)
            if found is None or unpack(keys.verdict, found).renew is None:
                at, first = at + 1, at if first is None else first  # the other ranks may have passed it
        while True:
            keys = MeetingKeys(root, start + at - number)
            before = 0 if first is None else at - first
            found = bytes(store.compare_set(keys.verdict, "", record(before)))
            standing = unpack(keys.verdict, found)
            requests.set_all(store, {keys.wake: b"1", keys.ready: b"1"})  # wakes the other ranks, and rank 0
            at += 1
            same = standing.kind == GIVEN_UP and standing.operation_position == (operation.name, before)
            if standing.kind == ERROR or same or standing.renew is not None:
                carried = None
                if standing.renew and not standing.parts:  # otherwise the coordinator itself wrote it
                    position = standing.operation_position
                    carried = pack(
                        standing.operation,
                        standing.phase,
                        GIVEN_UP,
                        standing.body,
                        operation_position=position,
                    )
                return _LeaveResult(at, standing.kind == ERROR or same, standing.renew is not None, carried)
            if standing.kind != GIVEN_UP and first is None:
                first = at - 1

    return channel.submit(request)
