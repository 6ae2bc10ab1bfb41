"""Messages between the ranks of one node: eight bytes each, through a pipe that the receiver owns.

Note: Why pipes
    What a rank tells another is that memory was written, or is free. A write to a pipe and the read that
    finds it are ordered by the kernel, on processors of every kind, so the memory is seen as it was when the
    message was sent; a flag in shared memory would need a barrier that Python does not have. A rank that
    waits sleeps until a message comes or a process that it watches ends. A message is shorter than
    ``PIPE_BUF`` and so never torn, whoever writes at the same time.

What one rank takes out of the memory of the ranks of its node, round by round.
"""

from __future__ import annotations

import enum
import os
import select
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardproof.geometry import row_pointers
from shardproof.loading.destinations import DestinationWriter
from shardproof.loading.read_once.orders import Int64s
from shardproof.planning import ChunkTable

__all__ = ["CUT_BYTES", "Inbox", "Message", "MessageKind", "Outbox", "WantedParts"]

_OPEN = os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOCTTY", 0)


_FORMAT = struct.Struct("=HHI")


_MOST = 4096 // _FORMAT.size * _FORMAT.size


"""Bytes of one read: whole messages."""


class MessageKind(enum.IntEnum):
    """What a message says."""

    READ = 1
    """A round of the sender's is in its memory, verified."""
    PLACED = 2
    """The sender has taken all that it wants of a round of the receiver's."""
    FAILED = 3
    """The sender, or a process of the receiver's own, has given up."""
    ENDED = 4
    """The process is no more; said by the system, not by the process."""


_KINDS = {kind.value: kind for kind in MessageKind}


class Message(NamedTuple):
    """One message."""

    kind: MessageKind
    rank: int
    """Of the sender."""
    number: int = 0
    """Of the round."""


class Inbox:
    """Where this process is told things.

    >>> inbox = Inbox()
    >>> outbox = Outbox.opened(os.getpid(), inbox.outbox.descriptor, inbox.number)
    >>> outbox.send(Message(MessageKind.READ, 3, 7)), inbox.take(1.0)
    (None, [Message(kind=<MessageKind.READ: 1>, rank=3, number=7)])
    >>> outbox.close(), inbox.close()
    (None, None)
    """

    def __init__(self) -> None:
        self._read, descriptor = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.outbox = Outbox(descriptor)
        """For messages of this process to itself. Its descriptor is what others open."""
        self.number = os.fstat(descriptor).st_ino
        """Of the pipe, by which others know it."""
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._watched: dict[int, int] = {}

    def watch(self, processes: Iterable[tuple[int, int]]) -> None:
        """From now on `take` tells when one of these processes ends.

        Args:
            processes: rank and process descriptor (``os.pidfd_open``) of each.
        """
        for rank, descriptor in processes:
            self._watched[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def take(self, timeout: float) -> list[Message]:
        """What was said since the last call; waits for it if nothing was.

        Args:
            timeout: seconds to wait at most. Then nothing is returned.
        """
        found = [descriptor for descriptor, _ in self._poll.poll(timeout * 1000)]
        messages = []
        if self._read in found:
            for kind, rank, number in _FORMAT.iter_unpack(os.read(self._read, _MOST)):
                messages.append(Message(_KINDS[kind], rank, number))
        ended = [self._watched[descriptor] for descriptor in found if descriptor != self._read]
        return messages + [Message(MessageKind.ENDED, rank) for rank in ended]

    def close(self) -> None:
        """Nothing can be said any more."""
        if self._read >= 0:
            os.close(self._read)
            self.outbox.close()
            self._read = -1


class Outbox:
    """The way to another process's inbox, or to the own one, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @staticmethod
    def opened(process: int, descriptor: int, number: int) -> Outbox:
        """The way to the pipe of a number, which a process knows by a descriptor.

        Raises:
            OSError: it cannot be reached, or is another.
        """
        opened = os.open(f"/proc/{process}/fd/{descriptor}", _OPEN)
        found = os.fstat(opened)
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != number:
            os.close(opened)
            raise OSError(f"descriptor {descriptor} of process {process} is not the pipe {number}")
        return Outbox(opened)

    def send(self, *messages: Message) -> None:
        """Never waits: a receiver never has more messages before it than a pipe holds (see `once_node`).

        Raises:
            BrokenPipeError: the receiver is gone.
            BlockingIOError: the pipe is full.
        """
        os.write(self.descriptor, b"".join([_FORMAT.pack(*message) for message in messages]))

    def close(self) -> None:
        """Lets go of the pipe."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


CUT_BYTES = 64 << 10


"""Chunks from here on whose parts are views made beforehand."""


@dataclass(slots=True)
class _RoundParts:
    """Of one round."""

    nbytes: int = 0
    views: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Where parts of the larger chunks that are cut belong, and where they are read."""
    rows: list[int] = field(default_factory=list)
    """Of the orders, for all other chunks."""


class WantedParts:
    """The parts of chunks that this rank wants, by the rank that reads them and its round.

    Args:
        table: all chunks.
        writer: of this rank's read plan.
        taken: (4 n,) or (n, 4) `NodeOrders.taken`.
        ranks: of the node.
    """

    def __init__(self, table: ChunkTable, writer: DestinationWriter, taken: Int64s, ranks: int) -> None:
        taken = taken.reshape(-1, 4)
        chunks: list[int] = taken[:, 3].tolist()
        self._writer = writer
        self._taken: list[list[int]] = taken.tolist()
        self._count: list[int] = table.byte_count[taken[:, 3]].tolist()
        self._parts = writer.parts_of(chunks)
        self._straight = writer.straight(chunks)
        self._of: list[dict[int, _RoundParts]] = [{} for _ in range(ranks)]
        before = row_pointers(writer.part_bytes).tolist()
        for at, (rank, number, _, _) in enumerate(self._taken):
            if (of_round := self._of[rank].get(number)) is None:
                of_round = self._of[rank][number] = _RoundParts()
            of_round.rows.append(at)
            of_round.nbytes += before[self._parts[at].stop] - before[self._parts[at].start]

    def rounds(self, rank: int) -> int:
        """Rounds of a rank of which this one takes something."""
        return len(self._of[rank])

    def found(self, rank: int, memory: torch.Tensor) -> None:
        """Makes the views of what is cut from a rank's memory.

        Made between the copies, which leave nothing of Python in the processor's caches, they took 6 % of a
        load of rows into columns.

        Args:
            rank: whose memory it is.
            memory: (n,) uint8, all of it.
        """
        for of_round in self._of[rank].values():
            rows, of_round.rows = of_round.rows, []
            for at in rows:
                stored, parts = self._stored(at, memory), self._parts[at]
                is_cut = self._count[at] >= CUT_BYTES and not self._straight.address[at]
                if is_cut and self._writer.is_aligned(parts, stored):
                    of_round.views += self._writer.views(self._taken[at][3], parts, stored)
                else:
                    of_round.rows.append(at)

    def take(self, rank: int, number: int, memory: torch.Tensor) -> int:
        """Puts the parts of a round where they belong. Called without gradients.

        Args:
            rank: that has read it.
            number: of the round.
            memory: that was `found`.

        Returns:
            Their bytes.
        """
        of_round = self._of[rank].get(number)
        if of_round is None:
            return 0
        for target, source in of_round.views:
            target.copy_(source)
        for at in of_round.rows:
            self._writer.put(self._taken[at][3], self._parts[at], self._stored(at, memory))
        return of_round.nbytes

    def _stored(self, at: int, memory: torch.Tensor) -> torch.Tensor:
        byte = self._taken[at][2]
        return memory[byte : byte + self._count[at]]
