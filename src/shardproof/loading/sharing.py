"""The meetings at which ranks agree to read once and hand on, if they asked for it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec
import numpy as np

from shardproof.errors import (
    CorruptChunkError,
    FormatError,
    NotCommittedError,
    StorageError,
    StructureError,
    TilingError,
)
from shardproof.loading.checkpoint import Checkpoint
from shardproof.loading.chunks import Chunks
from shardproof.loading.crossover import pays, storage_speed, worth_measuring
from shardproof.loading.exchange import Exchange, can_exchange
from shardproof.loading.matching import Options, from_rank
from shardproof.loading.once_orders import Loads, Orders, Wish
from shardproof.loading.once_plan import plan_once
from shardproof.loading.placing import Placing
from shardproof.planning import ReadPlan
from shardproof.rendezvous import Meetings, Rendezvous

__all__ = ["UNREADABLE", "Sharing"]

UNREADABLE = (CorruptChunkError, FormatError, NotCommittedError, StorageError, TilingError)
"""Errors that speak of the checkpoint, not of the state that it is loaded into."""

_Answer = tuple[str, Orders | None]


class Sharing:
    """One rank's part of the agreement.

    Args:
        checkpoint: that is loaded.
        plan: what this rank reads if nothing is handed on.
        placing: of the plan.
        rendezvous: where the ranks meet.
        options: of the load; the same on all ranks.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ReadPlan,
        placing: Placing,
        rendezvous: Rendezvous,
        options: Options,
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._placing = placing
        self._rendezvous = rendezvous
        self._options = options
        self._loads: Loads
        self._exchange: Exchange

    def agree(self, meetings: Meetings) -> tuple[Orders, Exchange] | None:
        """This rank's orders and what it exchanges over; None where every rank reads what it wants.

        Raises:
            StructureError: there is no process group, or not of these ranks.
            StorageError: a rank cannot read the checkpoint.
        """
        answer = meetings.meet("share", self._wish, self._plan_once)
        choice, orders = msgspec.msgpack.decode(answer, type=_Answer)
        if choice == "measure":
            choice = meetings.meet("measure", self._measure, self._choose).decode()
        return (orders, self._exchange) if choice == "once" and orders is not None else None

    def _wish(self) -> bytes:
        group = self._options.group
        able = can_exchange(group)
        if able:
            self._exchange = Exchange(group, self._rendezvous.rank, self._rendezvous.world_size)
        elif self._options.read_once is True:
            raise StructureError(
                "read_once=True hands tensors on over a process group, and there is none: initialise "
                'torch.distributed first, or load with read_once="auto" or False'
            )
        wish = Wish.of(socket.gethostname(), self._checkpoint.table, self._plan, self._placing.part_bytes)
        return msgspec.msgpack.encode((able, wish.encode()))

    def _plan_once(self, posts: Sequence[bytes]) -> list[bytes]:
        """Leader: who reads what and hands it on, where that is possible and can be worth it."""
        said = [msgspec.msgpack.decode(post, type=tuple[bool, bytes]) for post in posts]
        reads_all = [msgspec.msgpack.encode(("all", None))] * len(posts)
        if not all(able for able, _ in said):
            return reads_all
        orders, self._loads = plan_once(self._checkpoint.table, [Wish.decode(wish) for _, wish in said])
        asked = self._options.read_once is True
        if not orders[0].rounds or not (asked or worth_measuring(self._loads)):
            return reads_all
        return [msgspec.msgpack.encode(("once" if asked else "measure", item)) for item in orders]

    def _measure(self) -> bytes:
        """How fast the group and the storage are; an error of the checkpoint is data, as in `match`."""
        group = self._exchange.measure()
        checkpoint = self._checkpoint
        try:
            chunks = Chunks(
                checkpoint.files, checkpoint.manifest, checkpoint.table, np.unique(self._plan.chunk)
            )
            return msgspec.msgpack.encode((None, storage_speed(chunks), group))
        except UNREADABLE as error:
            return msgspec.msgpack.encode((error.to_wire(), 0.0, group))

    def _choose(self, posts: Sequence[bytes]) -> bytes:
        """Leader: one choice for all ranks."""
        speeds = []
        for rank, post in enumerate(posts):
            error, storage, group = msgspec.msgpack.decode(post)
            if error is not None:
                raise from_rank(rank, len(posts), error)
            speeds.append((storage, group))
        return b"once" if pays(self._loads, speeds) else b"all"
