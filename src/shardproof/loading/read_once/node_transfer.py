"""Reading once on one node: rounds are read into shared memory, from where every rank takes its parts.

    when the memory of a round is free:  read and verify it, tell those who want something of it
    when told that a round is there:     take the parts that are wanted, tell its reader
    when told that a round is taken:     its memory is free as soon as all have taken it, and all before it

Nobody waits for all. A rank that fails tells all, and all leave; so they do when a process ends, or when none
of them reads anything for as long as a rank may be silent.

Note: Why it comes to an end, and why what is taken is what was read
    A round is read when all rounds that were where it is to be have been taken, so nobody takes from it what
    is not its own. A rank answers the READ that it finds before it looks again, and never waits for anything
    else before it does, so what a reader waits for comes, in the order of its rounds, and its next round is
    read. No rank has more than `AHEAD` rounds that are not taken, so of each rank, itself too, at most so
    many READ, as many PLACED and one FAILED are before it: from `MOST_RANKS` ranks not a page, which is the
    least that a pipe holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

from shardproof.format import Manifest
from shardproof.loading.block_reader import Files
from shardproof.loading.chunk_reader import Chunks
from shardproof.loading.destinations import DestinationWriter
from shardproof.loading.read_once.group_transfer import PeerFailed
from shardproof.loading.read_once.node_messages import Message, MessageKind, WantedParts
from shardproof.loading.read_once.node_plan import NodeOrders
from shardproof.loading.read_once.shared_memory import NodeMemory, PeerMemory
from shardproof.planning import ChunkTable

__all__ = ["MOST_RANKS", "through_memory"]

_LOOKS = 4
"""How often a rank that waits looks, within the deadline, whether another moves."""
_REPORTED_BYTES = 8 << 20
"""Bytes taken from others of which is told together."""
MOST_RANKS = 32
"""Ranks of a node whose messages are sure to find room."""


def through_memory(
    files: Files,
    manifest: Manifest,
    table: ChunkTable,
    writer: DestinationWriter,
    orders: NodeOrders,
    memory: NodeMemory,
    peers: Sequence[PeerMemory | None],
    *,
    threads: int,
    deadline: float,
    moved: Callable[[int], None],
    waits: Callable[[], None],
) -> tuple[int, int]:
    """Reads what this rank is to read, and takes what it wants. Called by every rank of the node.

    Args:
        files: of the checkpoint.
        manifest: of the checkpoint.
        table: its chunks.
        writer: of this rank's read plan.
        orders: of this rank.
        memory: this rank's.
        peers: that of every rank, None for this one.
        threads: reads in flight.
        deadline: seconds after which ranks of which none moves are given up.
        moved: called with bytes read or taken since the call before, from any thread.
        waits: called now and then while this rank waits and another moves.

    Returns:
        Bytes read and bytes received.

    Raises:
        CorruptChunkError: stored bytes do not match their digest.
        StorageError: a file is missing, short or unreadable, or there is too little memory.
        PeerFailed: another rank was stopped.
    """
    with ThreadPoolExecutor(threads, "shardproof-read") as pool:
        try:
            part = _NodeExchange(files, manifest, table, writer, orders, memory, peers, moved)
            return part.run(pool if threads > 1 else None, deadline, waits)
        except BaseException:
            send_failed(peers)  # now: leaving the pool waits for its reads
            raise


def send_failed(peers: Sequence[PeerMemory | None]) -> None:
    """Tells all other ranks that this one has given up."""
    failed = Message(MessageKind.FAILED, peers.index(None))
    for peer in peers:
        if peer is not None:
            with suppress(OSError):  # it is gone, and needs no telling
                peer.outbox.send(failed)


class _NodeExchange:
    """One rank's part."""

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        table: ChunkTable,
        writer: DestinationWriter,
        orders: NodeOrders,
        memory: NodeMemory,
        peers: Sequence[PeerMemory | None],
        moved: Callable[[int], None],
    ) -> None:
        self._read_bytes = self._received_bytes = 0
        self._nbytes = orders.nbytes
        self._own = memory
        self._peers = peers
        self._rank = peers.index(None)
        self._moved = moved
        self._memory: list[torch.Tensor | None] = [None] * len(peers)
        self._out = [memory.inbox.outbox if peer is None else peer.outbox for peer in peers]
        self._chunks = Chunks(files, manifest, table, np.frombuffer(orders.read_chunks, np.int64))
        self._lock = threading.Lock()
        self._stopped = False
        self._error: BaseException | None = None

        rounds = np.frombuffer(orders.rounds, np.int64).reshape(-1, 2).tolist()
        self._begin = [byte for byte, _ in rounds]
        self._after = [after for _, after in rounds]
        self._takers: list[list[int]] = [[] for _ in rounds]
        for number, rank in np.frombuffer(orders.takers, np.int64).reshape(-1, 2).tolist():
            self._takers[number].append(rank)
        self._left = [len(takers) for takers in self._takers]
        """By own round, the ranks that have not taken their parts yet."""
        self._units: list[list[tuple[int, range]]] = [[] for _ in rounds]
        done = 0
        for number, byte, count in np.frombuffer(orders.read, np.int64).reshape(-1, 3).tolist():
            self._units[number].append((self._begin[number] + byte, range(done, done + count)))
            done += count

        self._streams = writer.streams
        self._wanted_parts = WantedParts(table, writer, np.frombuffer(orders.taken, np.int64), len(peers))
        self._wanted = sum(
            self._wanted_parts.rounds(rank) for rank in range(len(peers)) if rank != self._rank
        )
        """Rounds of other ranks from which this one has yet to take."""
        self._placed: dict[int, list[Message]] = {}
        """By reader, what it is yet to be told of rounds that this rank has taken its parts of."""
        self._unreported = 0
        """Bytes taken from others since `moved` was called."""
        self._reading = len(rounds)
        """Own rounds that are not read yet."""
        self._begun = self._gone = 0
        """Own rounds that are begun, and that all have taken from, in their order."""

    def run(
        self, pool: ThreadPoolExecutor | None, deadline: float, waits: Callable[[], None]
    ) -> tuple[int, int]:
        """See `through_memory`. Without a pool this thread reads too, when there is nothing to take."""
        self._use_memory(self._rank, self._own.reserve(self._nbytes[self._rank]))
        self._own.inbox.watch(
            (rank, peer.process) for rank, peer in enumerate(self._peers) if peer is not None
        )
        try:
            with torch.no_grad():
                self._until_done(pool, deadline, waits)
        finally:
            self._stopped = True
        return self._read_bytes, self._received_bytes

    def _until_done(
        self, pool: ThreadPoolExecutor | None, deadline: float, waits: Callable[[], None]
    ) -> None:
        inbox, ticks, quiet = self._own.inbox, self._ticks(), 0
        while self._wanted or self._reading:
            free = self._begun < len(self._units) and self._after[self._begun] <= self._gone
            if free and pool is not None:
                pool.submit(self._read_beside, self._begun)
                self._begun += 1
                continue
            messages = inbox.take(0.0 if free else deadline / _LOOKS)
            for message in messages:
                self._handle(message)
            if messages:
                self._send_placed()
                waits()
                quiet = 0
            elif free:
                self._begun += 1
                self._read(self._begun - 1)
                self._is_read(self._begun - 1)
            else:
                before, ticks = ticks, self._ticks()
                quiet = quiet + 1 if before == ticks else 0
                if quiet > _LOOKS:
                    raise PeerFailed
                if not quiet:
                    waits()
        self._report()

    def _handle(self, message: Message) -> None:
        kind, rank, number = message
        if kind is MessageKind.READ and rank != self._rank:
            taken = self._wanted_parts.take(rank, number, self._of(rank))
            self._received_bytes += taken
            self._unreported += taken
            if self._unreported >= _REPORTED_BYTES:
                self._report()
            self._placed.setdefault(rank, []).append(Message(MessageKind.PLACED, self._rank, number))
            self._wanted -= 1
        elif kind is MessageKind.READ:
            self._is_read(number)
        elif kind is MessageKind.PLACED:
            self._is_placed(number)
        elif self._error is not None:
            raise self._error
        else:
            raise PeerFailed

    def _is_read(self, number: int) -> None:
        """An own round is read, and this rank's own parts of it are taken."""
        self._reading -= 1
        if self._rank in self._takers[number]:
            self._is_placed(number)

    def _is_placed(self, number: int) -> None:
        """A rank has taken its parts of an own round."""
        self._left[number] -= 1
        while self._gone < self._begun and not self._left[self._gone]:
            self._gone += 1

    def _read_beside(self, number: int) -> None:
        """Reads a round on another thread than the one that hears of it."""
        if self._stopped:
            return
        try:
            with torch.no_grad(), self._streams.entered():
                self._read(number)
            self._send(self._rank, Message(MessageKind.READ, self._rank, number))
        except BaseException as error:
            self._error = error
            self._send(self._rank, Message(MessageKind.FAILED, self._rank, number))

    def _read(self, number: int) -> None:
        """Reads and verifies a round, tells those who take from it, and takes this rank's own parts."""
        done = 0
        memory = memoryview(self._of(self._rank).numpy().data)
        for byte, batch in self._units[number]:
            span = self._chunks.span(batch)
            self._chunks.read_unit(batch, memory[byte : byte + span])
            done += span
        with self._lock:
            self._read_bytes += done
            self._own.tick()
        self._moved(done)
        read = Message(MessageKind.READ, self._rank, number)
        for rank in self._takers[number]:
            if rank != self._rank:
                self._send(rank, read)
        self._wanted_parts.take(self._rank, number, self._of(self._rank))

    def _report(self) -> None:
        """Says what was taken from others since the last report."""
        self._moved(self._unreported)
        self._unreported = 0

    def _send_placed(self) -> None:
        """Tells each reader in one go what was taken since it was told."""
        for rank, messages in self._placed.items():
            self._send(rank, *messages)
        self._placed.clear()

    def _send(self, rank: int, *messages: Message) -> None:
        """Tells a rank, or this one, of rounds."""
        try:
            self._out[rank].send(*messages)
        except BrokenPipeError:  # it has left the load
            raise PeerFailed from None

    def _of(self, rank: int) -> torch.Tensor:
        """A rank's memory: mapped once it is there, which its first message says."""
        found = self._memory[rank]
        if found is None:
            peer = self._peers[rank]
            assert peer is not None
            found = self._use_memory(rank, peer.map(self._nbytes[rank]))
        return found

    def _use_memory(self, rank: int, memory: torch.Tensor) -> torch.Tensor:
        """Notes a rank's memory."""
        self._memory[rank] = memory
        self._wanted_parts.found(rank, memory)
        return memory

    def _ticks(self) -> list[int]:
        """How far all other ranks have come."""
        return [peer.ticks() for peer in self._peers if peer is not None]
