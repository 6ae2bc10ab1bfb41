"""How a rank leaves an operation before its last meeting.

Note: One order after an interrupt
----------------------------------
Meetings have numbers, and a rank posts once to each meeting. After an interrupt, or a failure between two
meetings, a rank does not know the current meeting of the other ranks. But the other ranks cannot pass a
meeting to which this rank has not posted. So the rank gives up the first such meeting, by compare-and-set
on its verdict, and continues after it. Ranks of the same operation find the reason in the verdict. Ranks of
another operation skip that meeting.

The rank's count of meetings changes only after a meeting has a result. An operation that the rank left
stays on a list until the store has answered. So an interrupt between two steps only makes the rank repeat
these steps, and each step can be repeated.

A meeting has a position in its operation: the name of the operation, and the number of meetings that the
operation had before this one. The verdict names the position of the meeting that is given up, and other ranks
compare it with their own. Three ranks save, and rank 1 is interrupted after meeting 7:

    meeting    7             8
    rank 0     ("save", 0)   ("save", 1): waits
    rank 1     ("save", 0)   interrupted: gives up meeting 8 at ("save", 1)
    rank 2     left          ("load", 0): waits

Rank 0 is at the position of the verdict, so its save fails with the reason. Rank 2 is at another one, so it
skips meeting 8 and posts to meeting 9. Positions do not change if a generation begins, and numbers of
meetings do.

Another rank may have written the verdict of meeting 8 first. If it tells all ranks to join again (the note
in `membership`), rank 1 leaves the generation, too. If it is also about another operation, rank 1 gives up a
meeting of the new generation: the first one, or the second if rank 1 proposes that verdict again in the
first.
A rank that has not joined has posted to no meeting. It keeps its verdict until it has joined.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from shardproof.engine.rendezvous import meeting_errors
from shardproof.engine.rendezvous import store_requests as requests
from shardproof.engine.rendezvous.channel import Channel
from shardproof.engine.rendezvous.ordering import Operation
from shardproof.engine.rendezvous.wire import ERROR, GIVEN_UP, MeetingKeys, pack, pack_error, unpack


@dataclass(frozen=True, slots=True)
class LeaveResult:
    """The answer of the store to a rank that left an operation."""

    following: int
    """The number of the meeting after those that this rank gave up."""
    is_reported: bool
    """True if the standing verdict makes the operation fail on its other ranks."""
    renew: bool
    """True if all ranks join again, in a new generation."""
    carried: bytes | None = None
    """The verdict that this rank proposes again in the new generation; None if that is not needed."""


def fail_next_meeting(
    channel: Channel, number: int, operation: Operation, world_size: int
) -> Future[LeaveResult] | None:
    """Make the next meeting fail in which other ranks may wait for this one. Does not wait for them.

    Args:
        channel: the channel of this rank.
        number: the number of the first meeting whose result this rank has not seen.
        operation: the operation that this rank left.
        world_size: the number of ranks.

    Returns:
        The answer of the store, equal for each call. None: the rank keeps the verdict until it has joined.
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

    def request(store: Any) -> LeaveResult:
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
                return LeaveResult(at, standing.kind == ERROR or same, standing.renew is not None, carried)
            if standing.kind != GIVEN_UP and first is None:
                first = at - 1

    return channel.submit(request)
