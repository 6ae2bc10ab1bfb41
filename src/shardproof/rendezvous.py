"""Meetings of ranks: each rank posts, rank 0 decides, each rank gets an answer. Moves no tensor data.

These are the public names of `shardproof.engine.rendezvous`.
"""

from __future__ import annotations

from shardproof.engine.rendezvous import (
    Decide,
    LocalRendezvous,
    MeetingSequence,
    Operation,
    Rendezvous,
    Reservation,
    StoreRendezvous,
    check_deadline,
    check_group,
    connect,
    connected,
    format_rank_ranges,
)

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
