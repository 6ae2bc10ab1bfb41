"""The meeting at which the ranks choose how to exchange.

The ranks of a node offer each other shared memory in the first meeting of a load, so that they can open each
other's memory before the exchange is planned, without another meeting.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from shardproof.engine.loading.checkpoint import NativeCheckpoint
from shardproof.engine.loading.destinations import DestinationWriter
from shardproof.engine.loading.matching import LoadOptions
from shardproof.engine.loading.read_once.group_collectives import Exchange, can_exchange
from shardproof.engine.loading.read_once.group_plan import plan_once
from shardproof.engine.loading.read_once.group_transfer import Receiver, Sender, through_group
from shardproof.engine.loading.read_once.node_memory import Handle, NodeMemory, PeerMemory
from shardproof.engine.loading.read_once.node_plan import NodeOrders, plan_node
from shardproof.engine.loading.read_once.node_transfer import MOST_RANKS, send_failed, through_memory
from shardproof.engine.loading.read_once.units import ChunkRequest, Int64s, Orders
from shardproof.engine.planning import ReadPlan
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous
from shardproof.errors import (
    CorruptChunkError,
    FormatError,
    NotCommittedError,
    StorageError,
    StructureError,
    TilingError,
)


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Shared memory that a rank offers."""

    node: str
    """Host name."""
    handle: Handle


def usable_handles(offers: Sequence[Offer | None]) -> tuple[Handle, ...]:
    """The handles of all ranks, in the order of ranks.

    Empty if shared memory cannot serve the exchange: there are several nodes, too many ranks, or a rank
    without an offer.

    >>> one, other = (Offer(node, Handle(1, 2, 3, 4, b"")) for node in ("n0", "n1"))
    >>> [len(usable_handles(offers)) for offers in ([one, one], [one, other], [one, None])]
    [2, 0, 0]
    """
    offered = [offer for offer in offers if offer is not None]
    if len(offered) < len(offers) or len(offers) > MOST_RANKS or len({one.node for one in offered}) > 1:
        return ()
    return tuple(one.handle for one in offered)


UNREADABLE = (CorruptChunkError, FormatError, NotCommittedError, StorageError, TilingError)
"""Errors of the checkpoint, as opposed to errors of the state that it is loaded into."""


class _RequestReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of a rank."""

    request: bytes
    reached: bool
    """True if this rank has opened the shared memory of every rank."""


class _LoadAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of the coordinator. Without orders, every rank reads all its chunks."""

    orders: Orders | None = None
    """The orders of this rank for an exchange over the process group."""
    node_orders: NodeOrders | None = None
    """The orders of this rank for an exchange through shared memory."""

    @property
    def given(self) -> Orders | NodeOrders | None:
        """The orders of this rank; None without an exchange."""
        return self.orders or self.node_orders


class ReadOnceExchange:
    """The read-once exchange on one rank: first the agreement, then the transfers.

    `plan` is the plan of this rank without an exchange, and the caller closes `memory`. `handles`, to the
    shared memory of all ranks, are empty if it cannot serve them all.
    """

    def __init__(
        self,
        checkpoint: NativeCheckpoint,
        plan: ReadPlan,
        writer: DestinationWriter,
        rendezvous: Rendezvous,
        options: LoadOptions,
        memory: NodeMemory | None,
        handles: Sequence[Handle],
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._writer = writer
        self._rendezvous = rendezvous
        self._options = options
        self._exchange: Exchange
        self._answer = _LoadAnswer()
        self._memory = memory
        self._handles = handles
        self._peers: list[PeerMemory | None] = []

    @property
    def is_active(self) -> bool:
        """True if the ranks agreed to exchange."""
        return self._answer.given is not None

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank reads, sends and receives in the exchange."""
        return self._answer.given.total_bytes if self._answer.given is not None else 0

    def shared_chunks(self) -> Int64s:
        """Rows of the chunk table that this rank reads for several ranks, or receives from others."""
        given = self._answer.given
        return given.shared_chunks() if given is not None else np.zeros(0, np.int64)

    def run(self, threads: int, on_bytes: Callable[[int], None]) -> tuple[int, int]:
        """Reads the chunks that several ranks want, exchanges them and writes them to the destinations.

        Returns the bytes read and the bytes received. Every rank calls it.

        Any thread calls `on_bytes` with the bytes read, sent or written since the previous call.

        Raises:
            CorruptChunkError, StorageError: this rank failed.
            PeerFailed: another rank failed.
        """
        checkpoint, writer, world_size = self._checkpoint, self._writer, self._rendezvous.world_size
        manifest, table, files = checkpoint.manifest, checkpoint.table, checkpoint.files
        if (node := self._answer.node_orders) is not None:
            assert self._memory is not None
            return through_memory(
                checkpoint,
                writer,
                node,
                self._memory,
                self._peers,
                self._rendezvous,
                threads=threads,
                on_bytes=on_bytes,
            )
        orders = self._answer.orders
        assert orders is not None

        def make() -> tuple[Sender, Receiver]:
            sender = Sender(files, manifest, table, writer, orders, world_size, threads)
            return sender, Receiver(table, writer, orders, world_size)

        return through_group(make, self._exchange, orders.rounds, on_bytes)

    def abandon(self) -> None:
        """Makes all other ranks leave the exchange; for a rank that fails before `run`."""
        if self._answer.node_orders is not None:
            send_failed(self._peers)
        else:
            self._exchange.any_failed(True)

    def close(self) -> None:
        """Closes the shared memory of the other ranks."""
        for memory in self._peers:
            if memory is not None:
                memory.close()
        self._peers = []

    def agree(self, meetings: MeetingSequence) -> None:
        """Agrees with the other ranks how to exchange. Without a chunk that several ranks need, they do not.

        Raises:
            StructureError: there is no process group, or it does not have these ranks.
            StorageError: a rank cannot read the checkpoint.
        """
        self._answer = meetings.exchange_each(
            "share", self._request, self._plan_all, _RequestReport, _LoadAnswer
        )
        if self._answer.node_orders is None:
            self.close()

    def _request(self) -> _RequestReport:
        group = self._options.group
        if not can_exchange(group):
            raise StructureError(
                "read_once=True sends tensors over a process group, and there is none: initialise "
                "torch.distributed first, or load with read_once=False"
            )
        self._exchange = Exchange(group, self._rendezvous.rank, self._rendezvous.world_size)
        checkpoint, rows = self._checkpoint, np.unique(self._plan.chunk)
        begin, end = checkpoint.blocks.covering(rows, self._writer.wanted(rows))
        request = ChunkRequest.of(
            socket.gethostname(), checkpoint.table, self._plan, self._writer.part_bytes, end - begin
        )
        own = self._rendezvous.rank
        self._peers = [
            None if rank == own else PeerMemory.opened(handle) for rank, handle in enumerate(self._handles)
        ]
        reached = bool(self._handles) and all(peer for rank, peer in enumerate(self._peers) if rank != own)
        return _RequestReport(request.encode(), reached)

    def _plan_all(self, reports: Sequence[_RequestReport]) -> list[_LoadAnswer]:
        """Coordinator: plans the exchange, through shared memory if all ranks reach that of all others."""
        requests = [ChunkRequest.decode(report.request) for report in reports]
        table = self._checkpoint.table
        if all(report.reached for report in reports):
            on_node, saved = plan_node(table, requests)
            answers = [_LoadAnswer(node_orders=one) for one in on_node]
        else:
            orders, saved = plan_once(table, requests)
            answers = [_LoadAnswer(orders) for orders in orders]
        return answers if saved else [_LoadAnswer()] * len(reports)
