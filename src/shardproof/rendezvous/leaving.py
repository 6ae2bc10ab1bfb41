"""What a rank does that leaves an operation before its last meeting.

Note "One order after an interrupt". Meetings have numbers, and a rank posts once to each. A rank that is
interrupted, or fails where no meeting tells of it, does not know how far the other ranks have come. But they
cannot pass a meeting to which it has not posted. So it gives up the first such meeting, by compare-and-set on
its verdict, and goes on after it. Ranks of the same operation find the reason there, and ranks of
another one pass over it. What a rank counts changes only after the result of a meeting is there, and an
operation that it left stays on a list until the store has answered. So an interrupt between two steps repeats
them, and each can be repeated.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from shardproof.rendezvous import verdicts
from shardproof.rendezvous.channel import Channel
from shardproof.rendezvous.keys import MeetingKeys
from shardproof.rendezvous.meeting import ERROR, GIVEN_UP, wire
from shardproof.rendezvous.operation import Operation
from shardproof.rendezvous.records import pack, unpack

__all__ = ["give_up_next"]


def give_up_next(channel: Channel, number: int, operation: Operation, world_size: int) -> Future[int]:
    """Gives up the next meeting in which other ranks may wait for this one. Does not wait for the store.

    Args:
        channel: of this rank, which has joined.
        number: of the first meeting whose result this rank has not seen.
        operation: that this rank left.
        world_size: number of ranks.

    Returns:
        Number of the meeting after it. The same each time that it is asked for.
    """
    error = verdicts.failure(
        operation.name, operation.phase, world_size, {channel.rank: operation.cause or "it was interrupted"}
    )

    def request(store: Any) -> int:
        at, first = number, operation.first
        if channel.rank > 0 and store.check([MeetingKeys(channel.root, at).post(channel.rank)]):
            at, first = at + 1, at if first is None else first  # others may have passed it
        while True:
            keys = MeetingKeys(channel.root, at)
            whole = operation.name, at if first is None else first
            ours = pack(operation.name, operation.phase, GIVEN_UP, wire(error), whole=whole)
            standing = unpack(bytes(store.compare_set(keys.verdict, "", ours)))
            for key in (keys.wake, keys.ready):  # of the other ranks, and of rank 0
                store.set(key, b"1")
            at += 1
            if standing.kind == ERROR or (standing.kind == GIVEN_UP and standing.whole == whole):
                return at
            if standing.kind != GIVEN_UP:
                first = whole[1]

    return channel.later(request)
