"""Messages between the ranks of one node: eight bytes each, through a pipe that the receiver owns.

Note: Why pipes
    A message says that memory was written, or is free. The kernel orders the write to a pipe before the read
    that returns it, on every kind of processor. So the receiver sees the memory as it was when the message
    was sent. A flag in shared memory would need a memory barrier, which Python does not have. A rank that
    waits sleeps until a message arrives, or a process that it watches ends. A message is shorter than
    ``PIPE_BUF``, so concurrent writers cannot tear it.
"""

from __future__ import annotations

import enum
import os
import select
import stat
import struct
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Inbox", "Message", "MessageKind", "Outbox"]

_OPEN = os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOCTTY", 0)
_FORMAT = struct.Struct("=HHI")
_MOST = 4096 // _FORMAT.size * _FORMAT.size
"""Bytes of one read: whole messages."""


class MessageKind(enum.IntEnum):
    """The meaning of a message."""

    READ = 1
    """The sender has read a round into its memory, and verified it."""
    COPIED = 2
    """The sender has copied all that it wants from a round of the receiver."""
    FAILED = 3
    """The sender, or a thread of the receiver itself, has failed."""
    ENDED = 4
    """The process has ended. `Inbox.take` makes this message; no process sends it."""


_KINDS = {kind.value: kind for kind in MessageKind}


class Message(NamedTuple):
    """One message."""

    kind: MessageKind
    rank: int
    """Rank of the sender."""
    number: int = 0
    """Number of the round."""


class Inbox:
    """The receiving end of this process.

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
        """Sends messages of this process to itself. Other processes open its descriptor."""
        self.number = os.fstat(descriptor).st_ino
        """Inode number of the pipe, by which other processes recognise it."""
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._watched: dict[int, int] = {}

    def watch(self, processes: Iterable[tuple[int, int]]) -> None:
        """Makes `take` report the end of these processes.

        Args:
            processes: rank and process descriptor (``os.pidfd_open``) of each.
        """
        for rank, descriptor in processes:
            self._watched[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def take(self, timeout: float) -> list[Message]:
        """Messages since the last call. If there are none, waits for one.

        Args:
            timeout: seconds to wait at most. After that, the result is empty.
        """
        found = [descriptor for descriptor, _ in self._poll.poll(timeout * 1000)]
        messages = []
        if self._read in found:
            for kind, rank, number in _FORMAT.iter_unpack(os.read(self._read, _MOST)):
                messages.append(Message(_KINDS[kind], rank, number))
        ended = [self._watched[descriptor] for descriptor in found if descriptor != self._read]
        return messages + [Message(MessageKind.ENDED, rank) for rank in ended]

    def close(self) -> None:
        """Closes the pipe. No process can send to it any more."""
        if self._read >= 0:
            os.close(self._read)
            self.outbox.close()
            self._read = -1


class Outbox:
    """The sending end of an inbox, for any thread."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @staticmethod
    def opened(process: int, descriptor: int, number: int) -> Outbox:
        """Opens the inbox of another process.

        Args:
            process: its id.
            descriptor: descriptor of the pipe in that process.
            number: `Inbox.number` of the pipe.

        Raises:
            OSError: the pipe cannot be opened, or is another one.
        """
        opened = os.open(f"/proc/{process}/fd/{descriptor}", _OPEN)
        found = os.fstat(opened)
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != number:
            os.close(opened)
            raise OSError(f"descriptor {descriptor} of process {process} is not the pipe {number}")
        return Outbox(opened)

    def send(self, *messages: Message) -> None:
        """Sends without waiting. A pipe has room for all messages to its receiver (see `node_transfer`).

        Raises:
            BrokenPipeError: the receiver has closed the pipe or ended.
            BlockingIOError: the pipe is full.
        """
        os.write(self.descriptor, b"".join([_FORMAT.pack(*message) for message in messages]))

    def close(self) -> None:
        """Closes the pipe."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
