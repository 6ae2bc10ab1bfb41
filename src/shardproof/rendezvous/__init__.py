"""Where ranks meet: post, decide, answer, with deadlines and named culprits. No tensor data moves here."""

from __future__ import annotations

from shardproof.rendezvous.connecting import check_deadline, check_group, connect, connected
from shardproof.rendezvous.local import LocalRendezvous
from shardproof.rendezvous.meetings import Meetings
from shardproof.rendezvous.operation import Operation
from shardproof.rendezvous.protocol import Decide, Rendezvous
from shardproof.rendezvous.reservation import Reservation
from shardproof.rendezvous.store import StoreRendezvous
from shardproof.rendezvous.verdicts import fold

__all__ = [
    "Decide",
    "LocalRendezvous",
    "Meetings",
    "Operation",
    "Rendezvous",
    "Reservation",
    "StoreRendezvous",
    "check_deadline",
    "check_group",
    "connect",
    "connected",
    "fold",
]
