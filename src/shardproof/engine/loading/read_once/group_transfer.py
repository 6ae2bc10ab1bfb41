"""The read-once exchange over a process group, in the rounds that the coordinator planned.

    for each round:  read and verify units  ->  wait for the previous round, and unpack it
                     ->  did any rank fail?  ->  start to send this round

The next units are read while a round is sent. The rank that reads a unit verifies it. The receiver does not
verify it again: the process group protects these bytes like every other tensor of the training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.engine.format import Files, Manifest
from shardproof.engine.geometry import row_pointers
from shardproof.engine.loading.chunk_reader import Chunks
from shardproof.engine.loading.destinations import DestinationWriter, can_view, part_of, shaped
from shardproof.engine.loading.read_executor import in_threads
from shardproof.engine.loading.read_once.group_collectives import Exchange, PendingExchange
from shardproof.engine.loading.read_once.units import Orders
from shardproof.engine.planning import ChunkTable
from shardproof.engine.state import as_bytes


class Sender:
    """Reads units, fills this rank's own destinations from them, and packs messages for other ranks."""

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        table: ChunkTable,
        writer: DestinationWriter,
        orders: Orders,
        world_size: int,
        threads: int,
    ) -> None:
        self.sizes = [[0] * world_size for _ in range(orders.rounds)]
        """Bytes for each rank, by round."""
        rows, counts, rounds, sent, sent_chunks, boxes = (
            np.frombuffer(column, np.int64)
            for column in (
                orders.read_chunks,
                orders.read_counts,
                orders.read_rounds,
                orders.sent,
                orders.sent_chunks,
                orders.sent_boxes,
            )
        )
        self._table = table
        self._dtypes: list[torch.dtype] = [getattr(torch, record.dtype) for record in manifest.tensors]
        chunks = Chunks(files, manifest, table, rows)  # sorted by file, as the orders
        self._reads = _UnitReads(chunks, counts, writer, threads)
        self._at = {row: at for at, row in enumerate(chunks.rows)}
        self._begun: list[list[int]] = [[] for _ in range(orders.rounds)]
        for unit, number in enumerate(rounds.tolist()):
            self._begun[number].append(unit)
        self._last = list(rounds.tolist())
        self._messages: list[list[tuple[int, int, int, range]]] = [[] for _ in range(orders.rounds)]
        done = 0
        for unit, rank, number, nbytes, chunk_count in sent.reshape(-1, 5).tolist():
            self._messages[number].append((rank, unit, nbytes, range(done, done + chunk_count)))
            self.sizes[number][rank] += nbytes
            self._last[unit] = max(self._last[unit], number)
            done += chunk_count
        self._sent_chunks: list[list[int]] = sent_chunks.reshape(-1, 2).tolist()
        box_of = row_pointers(sent_chunks.reshape(-1, 2)[:, 1])
        self._box_of: list[int] = box_of.tolist()
        self._boxes = boxes.reshape(int(box_of[-1]), 2, orders.sent_width)
        most = max((sum(sizes) for sizes in self.sizes), default=0)
        self._buffers = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def buffer(self, number: int) -> torch.Tensor:
        """The buffer of a round. Two buffers alternate: one is sent while the other is packed."""
        return self._buffers[number % 2]

    def pack(self, number: int) -> int:
        """Reads the units that a round needs first, and packs its messages, ordered by rank.

        Returns the bytes read and the bytes packed.

        Raises:
            CorruptChunkError: stored bytes do not match their digest.
            StorageError: a file is missing, short or unreadable.
        """
        before = self._reads.nbytes
        self._reads.read(self._begun[number])
        buffer, done = self.buffer(number), 0
        for _, unit, nbytes, rows in sorted(self._messages[number], key=lambda message: message[:2]):
            self._pack(unit, rows, buffer[done : done + nbytes])
            done += nbytes
        self._reads.drop([unit for unit in self._reads.memory if self._last[unit] <= number])
        return self._reads.nbytes - before + done

    @property
    def read(self) -> int:
        """Bytes read so far."""
        return self._reads.nbytes

    def _pack(self, unit: int, rows: range, message: torch.Tensor) -> None:
        """Fills one message. Whole chunks that are neighbours in the unit are one copy."""
        chunks, memory = self._reads.chunks, self._reads.memory[unit]
        base = chunks.start[self._reads.units[unit].start]
        done = planned = 0  # bytes of the message that are filled, and bytes that are planned
        run = 0  # first byte in the unit of the bytes that are planned and not filled
        for row in rows:
            chunk, parts = self._sent_chunks[row]
            at = self._at[chunk]
            inside, count = chunks.start[at] - base, chunks.count[at]
            if planned > done and (parts or inside != run + planned - done):
                message[done:planned].copy_(memory[run : run + planned - done])
                done = planned
            if not parts:
                run = inside if planned == done else run
                planned += count
                continue
            for box in range(self._box_of[row], self._box_of[row + 1]):
                done += self._pack_part(chunk, box, memory[inside : inside + count], message[done:])
            planned = done
        message[done:planned].copy_(memory[run : run + planned - done])

    def _pack_part(self, chunk: int, box: int, stored: torch.Tensor, into: torch.Tensor) -> int:
        extents = self._table.box_sizes[self._table.box_start[chunk] : self._table.box_start[chunk + 1]]
        dtype = self._dtypes[self._table.tensor[chunk]]
        offsets, sizes = self._boxes[box, :, : len(extents)].tolist()
        part = part_of(shaped(stored, dtype, extents.tolist()), offsets, sizes)
        into = into[: part.nbytes]
        if can_view(into, dtype):
            into.view(dtype).view(sizes).copy_(part)
        else:
            into.copy_(as_bytes(part))
        return part.nbytes


class _UnitReads:
    """Reads units into memory, and fills this rank's own destinations from there."""

    def __init__(
        self, chunks: Chunks, counts: NDArray[np.int64], writer: DestinationWriter, threads: int
    ) -> None:
        self.nbytes = 0
        """Bytes read so far."""
        self.chunks = chunks
        ends = np.cumsum(counts).tolist()
        self.units = [range(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
        """Positions in `chunks`, by unit."""
        self.memory: dict[int, torch.Tensor] = {}
        """Units that later messages need."""
        self._writer = writer
        self._threads = threads
        self._parts = writer.parts_of(chunks.rows)
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._most = max((chunks.span(unit) for unit in self.units), default=0)
        chunks.look_for_pages(self.units)

    def read(self, units: Sequence[int]) -> None:
        """Reads and verifies units; errors as `Sender.pack`."""
        in_threads(self._read_unit, units, self._threads, self._writer.streams.entered)

    def drop(self, units: Sequence[int]) -> None:
        """Frees the memory of units for others."""
        for unit in units:
            self._free.append(self.memory.pop(unit))

    def _read_unit(self, unit: int) -> None:
        batch, chunks = self.units[unit], self.chunks
        span = chunks.span(batch)
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None:
            memory = torch.empty(self._most, dtype=torch.uint8, device="cpu")
        chunks.read(batch, memoryview(memory.numpy().data)[:span])
        base = chunks.start[batch.start]
        for at in batch:
            inside = chunks.start[at] - base
            self._writer.put(chunks.rows[at], self._parts[at], memory[inside : inside + chunks.count[at]])
        with self._lock:
            self.memory[unit] = memory
            self.nbytes += span


class Receiver:
    """Unpacks received messages into their destinations, round by round."""

    def __init__(self, table: ChunkTable, writer: DestinationWriter, orders: Orders, world_size: int) -> None:
        self.received = 0
        """Bytes unpacked so far."""
        self.sizes = [[0] * world_size for _ in range(orders.rounds)]
        """Bytes from each rank, by round."""
        self._writer = writer
        received = np.frombuffer(orders.received, np.int64).reshape(-1, 4)
        chunks = np.frombuffer(orders.received_chunks, np.int64).reshape(-1, 2)
        self._chunks: list[list[int]] = chunks.tolist()
        self._count: list[int] = table.byte_count[chunks[:, 0]].tolist()
        self._parts = writer.parts_of(chunks[:, 0].tolist())
        self._messages: list[list[tuple[int, range]]] = [[] for _ in range(orders.rounds)]
        done = 0
        for rank, number, nbytes, count in received.tolist():
            self._messages[number].append((rank, range(done, done + count)))
            self.sizes[number][rank] += nbytes
            done += count
        most = max((sum(sizes) for sizes in self.sizes), default=0)
        self.buffer = torch.empty(most, dtype=torch.uint8, device="cpu")

    def unpack(self, number: int) -> int:
        """Unpacks a round that has been received. Returns its bytes."""
        done = 0
        # The sort is stable: messages of one rank stay in the order in which that rank packed them.
        for _, rows in sorted(self._messages[number], key=lambda message: message[0]):
            for row in rows:
                chunk, cut = self._chunks[row]
                if not cut:
                    count = self._count[row]
                    self._writer.put(chunk, self._parts[row], self.buffer[done : done + count])
                    done += count
                    continue
                for part in self._parts[row]:
                    count = int(self._writer.part_bytes[part])
                    self._writer.put_part(part, self.buffer[done : done + count])
                    done += count
        self.received += done
        return done


class PeerFailed(Exception):
    """Another rank failed, so all ranks left the exchange. The error of that rank has the reason."""


def through_group(
    make: Callable[[], tuple[Sender, Receiver]],
    exchange: Exchange,
    rounds: int,
    on_bytes: Callable[[int], None],
) -> tuple[int, int]:
    """Reads, sends and unpacks the chunks that several ranks want. Every rank calls this.

    Returns the bytes read and the bytes received. A rank that fails continues to the next `any_failed`, at
    which all ranks leave the exchange. So no rank waits for it inside a collective.

    Args:
        make: makes the sender and the receiver of this rank.
        exchange: over all ranks.
        rounds: number of rounds, the same on all ranks.
        on_bytes: called with the bytes read, sent or unpacked since the previous call.

    Raises:
        CorruptChunkError, StorageError: this rank cannot read a unit.
        PeerFailed: another rank failed.
    """
    error: BaseException | None = None
    parts: tuple[Sender, Receiver] | None = None
    pending: PendingExchange | None = None
    try:
        parts = make()
        exchange.reserve(len(parts[0].buffer(0)), len(parts[1].buffer))
    except BaseException as caught:
        error = caught
    for number in range(rounds + 1):
        try:
            if error is None and parts is not None and number < rounds:
                on_bytes(parts[0].pack(number))
        except BaseException as caught:
            error = caught
        if pending is not None:
            pending.wait()
        try:
            if error is None and parts is not None and number:
                on_bytes(parts[1].unpack(number - 1))
        except BaseException as caught:
            error = caught
        if number < rounds and exchange.any_failed(error is not None) and error is None:
            raise PeerFailed
        if error is not None:
            raise error
        assert parts is not None
        sender, receiver = parts
        if number < rounds:
            pending = exchange.start(
                sender.buffer(number), sender.sizes[number], receiver.buffer, receiver.sizes[number]
            )
    return sender.read, receiver.received
