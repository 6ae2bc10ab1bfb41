"""Work that one rank does for all of them."""

from __future__ import annotations

from collections.abc import Callable

import shardproof as sp

__all__ = ["on_rank_0"]


def on_rank_0(
    rendezvous: sp.rendezvous.Rendezvous, operation: str, phase: str, work: Callable[[], bytes]
) -> bytes:
    """Runs `work` on rank 0 alone. All ranks call it.

    Args:
        rendezvous: the rendezvous of the ranks.
        operation: a verb and a place, as for `shardproof.rendezvous.MeetingSequence`.
        phase: name of the meeting.
        work: called on rank 0.

    Returns:
        The result of `work`, on all ranks.

    Raises:
        ShardproofError: `work` failed. Raised on all ranks.

    Example:
        >>> on_rank_0(sp.rendezvous.connect(), "load runs/a", "format", lambda: b"dcp")
        b'dcp'
    """
    meetings = sp.rendezvous.MeetingSequence(rendezvous, operation)
    return meetings.meet(phase, lambda: work() if rendezvous.rank == 0 else b"", lambda posts: posts[0])
