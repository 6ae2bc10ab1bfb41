"""The read-once exchange on one node: readers fill shared memory, and every rank copies its parts from there.

    when the memory of a round is free:  read and verify the round, send READ to the ranks that want parts
    on READ:                             copy the wanted parts, answer COPIED
    on COPIED from all ranks:            the memory is free, once all earlier rounds are free, too

No rank waits for all others at once. A rank that fails sends FAILED to all, and all leave the exchange. They
also leave when a process ends, or when no rank reads anything for the deadline.

Note: Why the exchange ends, and why a copy has the right bytes
    A reader reads a round only when all earlier rounds in the same memory are free. So a rank never copies
    bytes of another round. A rank answers each READ before it waits again, and waits for nothing in between.
    So every COPIED that a reader waits for arrives, in the order of its rounds, and the next round is read.
    A rank has at most `AHEAD` rounds that are not free. So its pipe holds, from each rank, at most `AHEAD`
    READ, `AHEAD` COPIED and one FAILED. For `MOST_RANKS` ranks this is less than a page, which every pipe
    can hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from shardproof.engine.geometry import row_pointers
from shardproof.engine.loading.checkpoint import NativeCheckpoint
from shardproof.engine.loading.chunk_reader import Chunks
from shardproof.engine.loading.destinations import DestinationWriter
from shardproof.engine.loading.read_once.group_transfer import PeerFailed
from shardproof.engine.loading.read_once.node_memory import Message, MessageKind, NodeMemory, PeerMemory
from shardproof.engine.loading.read_once.node_plan import NodeOrders
from shardproof.engine.loading.read_once.units import Int64s
from shardproof.engine.planning import ChunkTable
from shardproof.engine.rendezvous import Rendezvous

CUT_BYTES = 64 << 10
"""Least bytes of a chunk whose parts are copied through views that are made before the exchange."""


@dataclass(slots=True)
class _RoundParts:
    """The parts of one round."""

    nbytes: int = 0
    views: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Destination and source of each part of the large chunks that are cut."""
    rows: list[int] = field(default_factory=list)
    """Rows of the orders, for all other chunks."""


class WantedParts:
    """The parts of chunks that this rank wants, by their reader and its round.

    `copies` are `NodeOrders.copies`, (4 n,) or (n, 4).
    """

    def __init__(self, table: ChunkTable, writer: DestinationWriter, copies: Int64s, ranks: int) -> None:
        copies = copies.reshape(-1, 4)
        chunks: list[int] = copies[:, 3].tolist()
        self._writer = writer
        self._copies: list[list[int]] = copies.tolist()
        self._count: list[int] = table.byte_count[copies[:, 3]].tolist()
        self._parts = writer.parts_of(chunks)
        self._straight = writer.straight(chunks)
        self._of: list[dict[int, _RoundParts]] = [{} for _ in range(ranks)]
        before = row_pointers(writer.part_bytes).tolist()
        for at, (rank, number, _, _) in enumerate(self._copies):
            if (of_round := self._of[rank].get(number)) is None:
                of_round = self._of[rank][number] = _RoundParts()
            of_round.rows.append(at)
            of_round.nbytes += before[self._parts[at].stop] - before[self._parts[at].start]

    def rounds(self, rank: int) -> int:
        """Number of rounds of a rank that this rank copies from."""
        return len(self._of[rank])

    def prepare(self, rank: int, memory: torch.Tensor) -> None:
        """Makes the views of the parts in all of a reader's shared memory.

        Views that are made between the copies would take longer, because the copies displace the interpreter
        from the processor's caches.
        """
        for of_round in self._of[rank].values():
            rows, of_round.rows = of_round.rows, []
            for at in rows:
                stored, parts = self._stored(at, memory), self._parts[at]
                is_cut = self._count[at] >= CUT_BYTES and not self._straight.address[at]
                if is_cut and self._writer.is_aligned(parts, stored):
                    of_round.views += self._writer.views(self._copies[at][3], parts, stored)
                else:
                    of_round.rows.append(at)

    def copy(self, rank: int, number: int, memory: torch.Tensor) -> int:
        """Copies the parts of a round from the memory given to `prepare`. Called without gradients.

        Returns the bytes copied.
        """
        of_round = self._of[rank].get(number)
        if of_round is None:
            return 0
        for target, source in of_round.views:
            target.copy_(source)
        for at in of_round.rows:
            self._writer.put(self._copies[at][3], self._parts[at], self._stored(at, memory))
        return of_round.nbytes

    def _stored(self, at: int, memory: torch.Tensor) -> torch.Tensor:
        byte = self._copies[at][2]
        return memory[byte : byte + self._count[at]]


_LOOKS = 4
"""How often a waiting rank checks within the deadline whether another rank makes progress."""
_REPORTED_BYTES = 8 << 20
"""Bytes copied from other ranks between two reports of progress."""
MOST_RANKS = 32
"""Ranks of a node whose messages always fit into a pipe."""


def through_memory(
    checkpoint: NativeCheckpoint,
    writer: DestinationWriter,
    orders: NodeOrders,
    memory: NodeMemory,
    peers: Sequence[PeerMemory | None],
    rendezvous: Rendezvous,
    *,
    threads: int,
    on_bytes: Callable[[int], None],
) -> tuple[int, int]:
    """Reads the rounds of this rank, and copies the parts that it wants. Every rank of the node calls this.

    Returns the bytes read and the bytes received. `peers` are the shared memories of all ranks, None for this
    one. The exchange fails if no rank makes progress for the deadline of the rendezvous. Any thread calls
    `on_bytes` with the bytes read or copied since the previous call. While this rank waits, it reports to the
    rendezvous that another rank makes progress.

    Raises:
        CorruptChunkError: stored bytes do not match their digest.
        StorageError: a file is missing, short or unreadable, or there is too little memory.
        PeerFailed: another rank failed, or no rank makes progress.
    """
    with ThreadPoolExecutor(threads, "shardproof-read") as pool:
        try:
            part = _NodeExchange(checkpoint, writer, orders, memory, peers, on_bytes)
            return part.run(pool if threads > 1 else None, rendezvous.deadline, rendezvous.report_waiting)
        except BaseException:
            send_failed(peers)  # before the pool ends, which waits for its reads
            raise


def send_failed(peers: Sequence[PeerMemory | None]) -> None:
    """Sends FAILED to all other ranks."""
    failed = Message(MessageKind.FAILED, peers.index(None))
    for peer in peers:
        if peer is not None:
            with suppress(OSError):  # the process has ended
                peer.outbox.send(failed)


class _OwnRounds:
    """The rounds that this rank reads.

    A round is *free* when all ranks have copied their parts of it. Rounds share memory, so a round is read
    once those before it in the same place are free.
    """

    def __init__(self, checkpoint: NativeCheckpoint, orders: NodeOrders, memory: NodeMemory) -> None:
        self.read_bytes = 0
        self._own = memory
        rows = np.frombuffer(orders.read_chunks, np.int64)
        self._chunks = Chunks(checkpoint.files, checkpoint.manifest, checkpoint.table, rows)
        self._lock = threading.Lock()
        rounds = np.frombuffer(orders.rounds, np.int64).reshape(-1, 2).tolist()
        self._after = [after for _, after in rounds]
        """By round, the number of free rounds that it needs."""
        self.receivers: list[list[int]] = [[] for _ in rounds]
        for number, rank in np.frombuffer(orders.receivers, np.int64).reshape(-1, 2).tolist():
            self.receivers[number].append(rank)
        self._left = [len(receivers) for receivers in self.receivers]
        """By round, the number of ranks that have yet to copy from it."""
        self._units: list[list[tuple[int, range]]] = [[] for _ in rounds]
        done = 0
        for number, byte, count in np.frombuffer(orders.read, np.int64).reshape(-1, 3).tolist():
            self._units[number].append((rounds[number][0] + byte, range(done, done + count)))
            done += count
        self._chunks.look_for_pages([batch for units in self._units for _, batch in units])
        self.unread = len(rounds)
        """Rounds that are not read yet."""
        self._begun = self._freed = 0
        """Rounds, from the first on, whose read has begun, and that are free again."""

    def may_begin(self) -> bool:
        """True if the next round can be read."""
        return self._begun < len(self._units) and self._after[self._begun] <= self._freed

    def begin(self) -> int:
        """Begins the next round, and returns its number."""
        self._begun += 1
        return self._begun - 1

    def read(self, number: int, memory: torch.Tensor) -> int:
        """Reads and verifies a round, in any thread. Returns the bytes read."""
        done, into = 0, memoryview(memory.numpy().data)
        for byte, batch in self._units[number]:
            span = self._chunks.span(batch)
            self._chunks.read(batch, into[byte : byte + span])
            done += span
        with self._lock:
            self.read_bytes += done
            self._own.tick()
        return done

    def on_copied(self, number: int) -> None:
        """Called when a rank has copied its parts of a round."""
        self._left[number] -= 1
        while self._freed < self._begun and not self._left[self._freed]:
            self._freed += 1


class _NodeExchange:
    """The exchange, on one rank."""

    def __init__(
        self,
        checkpoint: NativeCheckpoint,
        writer: DestinationWriter,
        orders: NodeOrders,
        memory: NodeMemory,
        peers: Sequence[PeerMemory | None],
        on_bytes: Callable[[int], None],
    ) -> None:
        self._received_bytes = 0
        self._nbytes = orders.nbytes
        self._own = memory
        self._peers = peers
        self._rank = peers.index(None)
        self._on_bytes = on_bytes
        self._memory: list[torch.Tensor | None] = [None] * len(peers)
        self._stopped = False
        self._error: BaseException | None = None
        self._rounds = _OwnRounds(checkpoint, orders, memory)
        self._streams = writer.streams
        copies = np.frombuffer(orders.copies, np.int64)
        self._wanted_parts = WantedParts(checkpoint.table, writer, copies, len(peers))
        self._wanted = sum(
            self._wanted_parts.rounds(rank) for rank in range(len(peers)) if rank != self._rank
        )
        """Rounds of other ranks that this rank has yet to copy from."""
        self._copied: dict[int, list[Message]] = {}
        """By reader, COPIED messages that are not sent yet."""
        self._unreported = 0
        """Bytes copied from other ranks since `on_bytes` was called."""

    def run(
        self, pool: ThreadPoolExecutor | None, deadline: float, on_wait: Callable[[], None]
    ) -> tuple[int, int]:
        """See `through_memory`. Without a pool this thread reads, too, when there is nothing to copy."""
        self._use_memory(self._rank, self._own.reserve(self._nbytes[self._rank]))
        self._own.inbox.watch(
            (rank, peer.process) for rank, peer in enumerate(self._peers) if peer is not None
        )
        try:
            with torch.no_grad():
                self._until_done(pool, deadline, on_wait)
        finally:
            self._stopped = True
        return self._rounds.read_bytes, self._received_bytes

    def _until_done(
        self, pool: ThreadPoolExecutor | None, deadline: float, on_wait: Callable[[], None]
    ) -> None:
        inbox, rounds, ticks, quiet = self._own.inbox, self._rounds, self._ticks(), 0
        while self._wanted or rounds.unread:
            free = rounds.may_begin()
            if free and pool is not None:
                pool.submit(self._read_in_pool, rounds.begin())
                continue
            messages = inbox.take(0.0 if free else deadline / _LOOKS)
            for message in messages:
                self._handle(message)
            if messages:
                for rank, copied in self._copied.items():  # in one write for each reader
                    self._send(rank, *copied)
                self._copied.clear()
                on_wait()
                quiet = 0
            elif free:
                number = rounds.begin()
                self._read(number)
                self._on_read(number)
            else:
                before, ticks = ticks, self._ticks()
                quiet = quiet + 1 if before == ticks else 0
                if quiet > _LOOKS:
                    raise PeerFailed
                if not quiet:
                    on_wait()
        self._report()

    def _handle(self, message: Message) -> None:
        kind, rank, number = message
        if kind is MessageKind.READ and rank != self._rank:
            copied = self._wanted_parts.copy(rank, number, self._of(rank))
            self._received_bytes += copied
            self._unreported += copied
            if self._unreported >= _REPORTED_BYTES:
                self._report()
            self._copied.setdefault(rank, []).append(Message(MessageKind.COPIED, self._rank, number))
            self._wanted -= 1
        elif kind is MessageKind.READ:
            self._on_read(number)
        elif kind is MessageKind.COPIED:
            self._rounds.on_copied(number)
        elif self._error is not None:
            raise self._error
        else:
            raise PeerFailed

    def _on_read(self, number: int) -> None:
        """Called when an own round is read, and this rank has copied its own parts."""
        self._rounds.unread -= 1
        if self._rank in self._rounds.receivers[number]:
            self._rounds.on_copied(number)

    def _read_in_pool(self, number: int) -> None:
        """Reads a round in a thread of the pool, and notifies the main thread."""
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
        """Reads and verifies a round, notifies the ranks that want parts, and copies the own parts."""
        self._on_bytes(self._rounds.read(number, self._of(self._rank)))
        read = Message(MessageKind.READ, self._rank, number)
        for rank in self._rounds.receivers[number]:
            if rank != self._rank:
                self._send(rank, read)
        self._wanted_parts.copy(self._rank, number, self._of(self._rank))

    def _report(self) -> None:
        """Reports the bytes copied from other ranks since the last report."""
        self._on_bytes(self._unreported)
        self._unreported = 0

    def _send(self, rank: int, *messages: Message) -> None:
        """Sends messages to a rank, or to this one."""
        try:
            peer = self._peers[rank]
            (self._own.inbox.outbox if peer is None else peer.outbox).send(*messages)
        except BrokenPipeError:  # the rank has left the load
            raise PeerFailed from None

    def _of(self, rank: int) -> torch.Tensor:
        """The memory of a rank. It exists once the first message of the rank has arrived."""
        found = self._memory[rank]
        if found is None:
            peer = self._peers[rank]
            assert peer is not None
            found = self._use_memory(rank, peer.map(self._nbytes[rank]))
        return found

    def _use_memory(self, rank: int, memory: torch.Tensor) -> torch.Tensor:
        """Stores the memory of a rank, and prepares the copies from it."""
        self._memory[rank] = memory
        self._wanted_parts.prepare(rank, memory)
        return memory

    def _ticks(self) -> list[int]:
        """The progress counters of all other ranks."""
        return [peer.ticks() for peer in self._peers if peer is not None]
