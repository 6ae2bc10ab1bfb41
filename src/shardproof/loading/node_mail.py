"""Messages between the ranks of one node: eight bytes each, through a pipe that the receiver owns.

Note: Why pipes
    What a rank tells another is that memory was written, or is free. A write to a pipe and the read that
    finds it are ordered by the kernel, on processors of every kind, so the memory is seen as it was when the
    message was sent; a flag in shared memory would need a barrier that Python does not have. A rank that
    waits sleeps until a message comes or a process that it watches ends. A message is shorter than
    ``PIPE_BUF`` and so never torn, whoever writes at the same time.
"""

from __future__ import annotations

import enum
import os
import select
import stat
import struct
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Inbox", "Message", "Outbox", "Said"]

_OPEN = os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOCTTY", 0)
_FORMAT = struct.Struct("=HHI")
_MOST = 4096 // _FORMAT.size * _FORMAT.size
"""Bytes of one read: whole messages."""


class Said(enum.IntEnum):
    """What a message says."""

    READ = 1
    """A round of the sender's is in its memory, verified."""
    PLACED = 2
    """The sender has taken all that it wants of a round of the receiver's."""
    FAILED = 3
    """The sender, or a process of the receiver's own, has given up."""
    ENDED = 4
    """The process is no more; said by the system, not by the process."""


_SAID = {said.value: said for said in Said}


class Message(NamedTuple):
    """One message."""

    said: Said
    rank: int
    """Of the sender."""
    number: int = 0
    """Of the round."""


class Inbox:
    """Where this process is told things.

    >>> inbox = Inbox()
    >>> outbox = Outbox.opened(os.getpid(), inbox.outbox.descriptor, inbox.number)
    >>> outbox.send(Message(Said.READ, 3, 7)), inbox.take(1.0)
    (None, [Message(said=<Said.READ: 1>, rank=3, number=7)])
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
            for said, rank, number in _FORMAT.iter_unpack(os.read(self._read, _MOST)):
                messages.append(Message(_SAID[said], rank, number))
        ended = [self._watched[descriptor] for descriptor in found if descriptor != self._read]
        return messages + [Message(Said.ENDED, rank) for rank in ended]

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
