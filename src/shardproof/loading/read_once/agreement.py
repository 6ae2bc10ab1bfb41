"""The meetings at which ranks agree to read once and hand on, if they asked for it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

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
from shardproof.loading.chunk_reader import Chunks
from shardproof.loading.destinations import Placing
from shardproof.loading.matching import Options, from_rank
from shardproof.loading.read_once.cost_model import Sampled, memory_speed, pays, sample, worth_measuring
from shardproof.loading.read_once.group_collectives import Exchange, can_exchange
from shardproof.loading.read_once.group_plan import plan_once
from shardproof.loading.read_once.group_transfer import Receiver, Sender, through_group
from shardproof.loading.read_once.node_plan import NodeOrders, plan_node
from shardproof.loading.read_once.node_transfer import tell_failed, through_memory
from shardproof.loading.read_once.orders import Int64s, Loads, Orders, Wish
from shardproof.loading.read_once.shared_memory import Handle, NodeMemory, PeerMemory
from shardproof.planning import ReadPlan
from shardproof.rendezvous import MeetingSequence, Rendezvous

__all__ = ["UNREADABLE", "Sharing"]

UNREADABLE = (CorruptChunkError, FormatError, NotCommittedError, StorageError, TilingError)
"""Errors that speak of the checkpoint, not of the state that it is loaded into."""


class _Posted(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says first."""

    able: bool
    """There is a process group."""
    wish: bytes
    reached: bool
    """The memory of every rank."""


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator answers, at the first meeting or at the second."""

    choice: str
    """Read "all"; hand on over the "group" or through the memory of the "node"; or "measure" first what
    handing on takes."""
    orders: Orders | None = None
    node_orders: NodeOrders | None = None
    over: str = ""
    """What to measure: the "group" or the "node"."""

    @property
    def given(self) -> Orders | NodeOrders | None:
        """The orders, if anything is handed on."""
        return self.orders or self.node_orders


class _Measured(msgspec.Struct, frozen=True, array_like=True):
    """What a rank found."""

    sampled: Sampled | None = None
    handing: float = 0.0
    """Bytes a second."""
    error: dict[str, object] | None = None


class Sharing:
    """One rank's part of the agreement, and of what it comes to.

    Args:
        checkpoint: that is loaded.
        plan: what this rank reads if nothing is handed on.
        placing: of the plan.
        rendezvous: where the ranks meet.
        options: of the load; the same on all ranks.
        memory: this rank's, where it was made. Whoever made it closes it.
        handles: of all ranks, where they are to hand on through memory if they can.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ReadPlan,
        placing: Placing,
        rendezvous: Rendezvous,
        options: Options,
        memory: NodeMemory | None,
        handles: Sequence[Handle],
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._placing = placing
        self._rendezvous = rendezvous
        self._options = options
        self._exchange: Exchange
        self._answer = _Answer("all")
        self._memory = memory
        self._handles = handles
        self._peers: list[PeerMemory | None] = []
        self._loads: Loads
        self._planned: list[_Answer] = []

    @property
    def happens(self) -> bool:
        """Whether anything is handed on."""
        return self._answer.given is not None

    @property
    def moved(self) -> int:
        """Bytes that this rank reads and hands on."""
        return self._answer.given.moved if self._answer.given is not None else 0

    def shared_chunks(self) -> Int64s:
        """Rows of the chunk table that this rank reads for several, or gets from others."""
        given = self._answer.given
        return given.shared_chunks() if given is not None else np.zeros(0, np.int64)

    def hand_on(self, threads: int, moved: Callable[[int], None]) -> tuple[int, int]:
        """Reads, hands on and places what several ranks want. Called by every rank.

        Args:
            threads: reads in flight.
            moved: called with bytes read, sent or placed since the call before, from any thread.

        Returns:
            Bytes read and bytes received.

        Raises:
            CorruptChunkError, StorageError: what stopped this rank.
            PeerFailed: another rank was stopped.
        """
        checkpoint, placing, world_size = self._checkpoint, self._placing, self._rendezvous.world_size
        manifest, table, files = checkpoint.manifest, checkpoint.table, checkpoint.files
        if (node := self._answer.node_orders) is not None:
            assert self._memory is not None
            return through_memory(
                files,
                manifest,
                table,
                placing,
                node,
                self._memory,
                self._peers,
                threads=threads,
                deadline=self._rendezvous.deadline,
                moved=moved,
                waits=self._rendezvous.waits,
            )
        orders = self._answer.orders
        assert orders is not None

        def make() -> tuple[Sender, Receiver]:
            sender = Sender(files, manifest, table, placing, orders, world_size, threads)
            return sender, Receiver(table, placing, orders, world_size)

        return through_group(make, self._exchange, orders.rounds, moved)

    def abandon(self) -> None:
        """Instead of `hand_on`, on a rank that cannot come to it: all others leave it."""
        if self._answer.node_orders is not None:
            tell_failed(self._peers)
        else:
            self._exchange.any_failed(True)

    def close(self) -> None:
        """Lets go of the memory of others."""
        for memory in self._peers:
            if memory is not None:
                memory.close()
        self._peers = []

    def agree(self, meetings: MeetingSequence) -> None:
        """Decides whether and how this load hands on.

        Raises:
            StructureError: there is no process group, or not of these ranks.
            StorageError: a rank cannot read the checkpoint.
        """
        self._answer = self._meet(meetings, "share", self._wish, self._plan_all)
        if self._answer.choice == "measure":
            self._answer = self._meet(meetings, "measure", self._measure, self._choose)
        if self._answer.node_orders is None:
            self.close()

    @staticmethod
    def _meet(
        meetings: MeetingSequence,
        phase: str,
        work: Callable[[], bytes],
        decide: Callable[[list[bytes]], Sequence[bytes]],
    ) -> _Answer:
        return msgspec.msgpack.decode(meetings.meet(phase, work, decide), type=_Answer)

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
        checkpoint, rows = self._checkpoint, np.unique(self._plan.chunk)
        begin, end = checkpoint.blocks.covering(rows, self._placing.wanted(rows))
        wish = Wish.of(
            socket.gethostname(), checkpoint.table, self._plan, self._placing.part_bytes, end - begin
        )
        return msgspec.msgpack.encode(_Posted(able, wish.encode(), self._reaches()))

    def _reaches(self) -> bool:
        """Opens the memory of every rank."""
        own = self._rendezvous.rank
        self._peers = [
            None if rank == own else PeerMemory.opened(handle) for rank, handle in enumerate(self._handles)
        ]
        return bool(self._handles) and all(peer for rank, peer in enumerate(self._peers) if rank != own)

    def _plan_all(self, posts: Sequence[bytes]) -> list[bytes]:
        """Coordinator: who reads what and hands it on, where that is possible and can be worth it."""
        said = [msgspec.msgpack.decode(post, type=_Posted) for post in posts]
        reads_all = _encoded([_Answer("all")] * len(posts))
        if not all(one.able for one in said):
            return reads_all
        table, asked = self._checkpoint.table, self._options.read_once is True
        wishes = [Wish.decode(one.wish) for one in said]
        if all(one.reached for one in said):
            on_node, self._loads = plan_node(table, wishes)
            self._planned = [_Answer("node", None, one) for one in on_node]
        else:
            orders, self._loads = plan_once(table, wishes)
            self._planned = [_Answer("group", one) for one in orders]
        if not self._loads.saved or not (asked or worth_measuring(self._loads)):
            return reads_all
        if asked:
            return _encoded(self._planned)
        return _encoded([_Answer("measure", over=self._planned[0].choice)] * len(posts))

    def _measure(self) -> bytes:
        """How this rank can hand on, and how fast; an error of the checkpoint is data, as in `match`."""
        over_group = self._answer.over == "group"
        exchanged = self._exchange.measure() if over_group else 0.0  # by all ranks, whatever comes after
        checkpoint = self._checkpoint
        try:
            chunks = Chunks(
                checkpoint.files, checkpoint.manifest, checkpoint.table, np.unique(self._plan.chunk)
            )
            sampled = sample(chunks)
        except UNREADABLE as error:
            return msgspec.msgpack.encode(_Measured(error=error.to_wire()))
        return msgspec.msgpack.encode(_Measured(sampled, exchanged if over_group else memory_speed()))

    def _choose(self, posts: Sequence[bytes]) -> list[bytes]:
        """Coordinator: one choice for all ranks."""
        said = [msgspec.msgpack.decode(post, type=_Measured) for post in posts]
        for rank, one in enumerate(said):
            if one.error is not None:
                raise from_rank(rank, len(posts), one.error)
        return _encoded(self._planned if self._pays(said) else [_Answer("all")] * len(posts))

    def _pays(self, said: Sequence[_Measured]) -> bool:
        found = [(one.sampled, one.handing) for one in said if one.sampled is not None]
        return pays(self._loads, found, through_memory=self._planned[0].choice == "node")


def _encoded(answers: Sequence[_Answer]) -> list[bytes]:
    return [msgspec.msgpack.encode(answer) for answer in answers]
