"""Runs work on rank 0 or on each rank. An error of one rank is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import shardproof as sp


def on_rank_0(
    rendezvous: sp.rendezvous.Rendezvous, operation: str, phase: str, work: Callable[[], bytes]
) -> bytes:
    """Runs `work` only on rank 0, and returns its result on all ranks. All ranks call it.

    Args:
        rendezvous: the rendezvous of the ranks.
        operation: a verb and a place, as for `shardproof.rendezvous.MeetingSequence`.
        phase: name of the meeting.
        work: called on rank 0.

    Raises:
        ShardproofError: `work` failed. Raised on all ranks.

    Example:
        >>> on_rank_0(sp.rendezvous.connect(), "load runs/a", "format", lambda: b"dcp")
        b'dcp'
    """
    meetings = sp.rendezvous.MeetingSequence(rendezvous, operation)
    return meetings.meet(phase, lambda: work() if rendezvous.rank == 0 else b"", lambda posts: posts[0])


def on_every_rank(
    rendezvous: sp.rendezvous.Rendezvous, operation: str, phase: str, work: Callable[[], object]
) -> None:
    """Runs `work` on each rank, and returns when all ranks have done it. See `on_rank_0` for the arguments.

    Raises:
        RankFailure: `work` failed on a rank. Raised on all ranks.

    Example:
        >>> opened = []
        >>> on_every_rank(sp.rendezvous.connect(), "load runs/a", "open", lambda: opened.append("runs/a"))
        >>> opened
        ['runs/a']
    """

    def done() -> bytes:
        work()
        return b""

    sp.rendezvous.MeetingSequence(rendezvous, operation).meet(phase, done, lambda _: b"")
