"""Meetings of ranks: each rank posts, rank 0 decides, each rank gets an answer. Moves no tensor data."""

from __future__ import annotations

from shardproof.engine.rendezvous.connection import (
    LocalRendezvous,
    check_deadline,
    check_group,
    connect,
    connected,
)
from shardproof.engine.rendezvous.meeting_errors import format_rank_ranges
from shardproof.engine.rendezvous.meeting_errors import (
    from_rank as from_rank,  # not listed in __all__: internal
)
from shardproof.engine.rendezvous.protocol import Decide, MeetingSequence, Operation, Rendezvous, Reservation
from shardproof.engine.rendezvous.store import StoreRendezvous

__all__ = [
    "Decide",
    "LocalRendezvous",
    "MeetingSequence",
    "Operation",
    "Rendezvous",
    "Reservation",
    "StoreRendezvous",
    "check_deadline",
    "check_group",
    "connect",
    "connected",
    "format_rank_ranges",
]
