"""Meetings of ranks: each rank posts, rank 0 decides, each rank gets an answer. Moves no tensor data."""

from __future__ import annotations

from shardproof.rendezvous.connection import check_deadline, check_group, connect, connected
from shardproof.rendezvous.meeting_errors import format_rank_ranges
from shardproof.rendezvous.ordering import Operation, Reservation
from shardproof.rendezvous.protocol import Decide, MeetingSequence, Rendezvous
from shardproof.rendezvous.single_process import LocalRendezvous
from shardproof.rendezvous.store import StoreRendezvous

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
