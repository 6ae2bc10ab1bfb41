"""Shared memory of the ranks of one node, and messages between them.

Note: Why file descriptors
    A named segment outlives a killed job. Its usual place, ``/dev/shm``, has 64 MB in many containers, and a
    write beyond that ends the process. An anonymous file of Linux (memfd_create) has neither fault: it ends
    with the last process that has it open, and its memory counts like other memory of the process. Another
    rank opens the file and the inbox through ``/proc``. The system may refuse that, or the process id may
    belong to another process there (in a container). Then the open fails or the token at the beginning of the
    memory differs, and the ranks do not use shared memory.

Note: Why pipes
    A message has eight bytes, and goes through a pipe that the receiver owns. It says that memory was
    written, or is free. The kernel orders the write to a pipe before the read that returns it, on every kind
    of processor. So the receiver sees the memory as it was when the message was sent. A flag in shared memory
    would need a memory barrier, which Python does not have. A rank that waits sleeps until a message arrives,
    or a process that it watches ends. A message is shorter than ``PIPE_BUF``, so concurrent writers cannot
    tear it.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import secrets
import select
import stat
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
import torch

from shardproof.errors import StorageError

_OPEN = os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOCTTY", 0)
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
        """Makes `take` report the end of processes, given by rank and descriptor (``os.pidfd_open``)."""
        for rank, descriptor in processes:
            self._watched[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def take(self, timeout: float) -> list[Message]:
        """Messages since the last call. If there are none, waits for one, at most `timeout` seconds."""
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
        """Opens the inbox of another process; `number` is the `Inbox.number` of the pipe.

        Raises:
            OSError: the pipe cannot be opened, or is another one.
        """
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_WRONLY | _OPEN)
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


_TOKEN_BYTES = 16
_TICKS = struct.Struct("=Q")
_BEGIN = mmap.PAGESIZE
"""First byte of the data. Before it are the token and the progress counter of the owner."""


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """The numbers with which another process of the node opens the memory and the inbox."""

    process: int
    memory: int
    inbox: int
    pipe: int
    """Inode number of the inbox's pipe."""
    token: bytes


class NodeMemory:
    """The shared memory of this rank.

    >>> own = NodeMemory()
    >>> own.reserve(5)[:] = torch.arange(5, dtype=torch.uint8)
    >>> peer = PeerMemory.opened(own.handle)
    >>> peer.map(5)
    tensor([0, 1, 2, 3, 4], dtype=torch.uint8)
    >>> own.tick(), peer.ticks(), own.close(), peer.close()
    (None, 1, None, None)
    """

    def __init__(self) -> None:
        token = secrets.token_bytes(_TOKEN_BYTES)
        with ExitStack() as opened:
            self._memory = os.memfd_create("shardproof", os.MFD_CLOEXEC)
            opened.callback(os.close, self._memory)
            os.pwrite(self._memory, token + _TICKS.pack(0), 0)
            self.inbox = Inbox()
            opened.pop_all()
        self._ticks = 0
        inbox = self.inbox
        self.handle = Handle(os.getpid(), self._memory, inbox.outbox.descriptor, inbox.number, token)

    @staticmethod
    def made() -> NodeMemory | None:
        """New memory; None if the system does not support or allow it."""
        has_all = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
        try:
            return NodeMemory() if has_all and os.path.isdir("/proc/self/fd") else None
        except OSError:
            return None

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Allocates and maps the memory: (nbytes,) uint8, shared.

        Raises:
            StorageError: the node has too little memory.
        """
        try:
            os.posix_fallocate(self._memory, 0, _BEGIN + nbytes)  # fails here, not at the first use of a page
        except OSError as error:
            raise StorageError(
                f"cannot allocate {nbytes} bytes of memory that the ranks of this node share ({error}): "
                "load with read_once=False",
                errno=errno.errorcode.get(error.errno or 0, str(error.errno)),
            ) from error
        return _mapped(self._memory, nbytes)

    def tick(self) -> None:
        """Increments the progress counter, which the other ranks read."""
        self._ticks += 1
        os.pwrite(self._memory, _TICKS.pack(self._ticks), _TOKEN_BYTES)

    def close(self) -> None:
        """Closes the memory and the inbox. Mappings stay as long as tensors use them."""
        self.inbox.close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


class PeerMemory:
    """The shared memory of another rank of the node."""

    def __init__(self, memory: int, process: int, outbox: Outbox) -> None:
        self._memory = memory
        self.process = process
        """Process descriptor (``os.pidfd_open``) of the owner."""
        self.outbox = outbox

    @staticmethod
    def opened(handle: Handle) -> PeerMemory | None:
        """The memory of a handle; None if this process cannot open it."""
        with ExitStack() as opened:
            try:
                memory = os.open(f"/proc/{handle.process}/fd/{handle.memory}", os.O_RDWR | _OPEN)
                opened.callback(os.close, memory)
                process = os.pidfd_open(handle.process)
                opened.callback(os.close, process)
                if os.pread(memory, _TOKEN_BYTES, 0) != handle.token:
                    return None
                outbox = Outbox.opened(handle.process, handle.inbox, handle.pipe)
            except OSError:  # not allowed, or the id belongs to another process here
                return None
            opened.pop_all()
            return PeerMemory(memory, process, outbox)

    def map(self, nbytes: int) -> torch.Tensor:
        """Maps the memory that its owner reserved: (nbytes,) uint8."""
        return _mapped(self._memory, nbytes)

    def ticks(self) -> int:
        """The progress counter of the owner."""
        return int(_TICKS.unpack(os.pread(self._memory, _TICKS.size, _TOKEN_BYTES))[0])

    def close(self) -> None:
        """Closes all descriptors. Mappings stay as long as tensors use them."""
        self.outbox.close()
        for descriptor in (self._memory, self.process):
            if descriptor >= 0:
                os.close(descriptor)
        self._memory = self.process = -1


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(descriptor, _BEGIN + nbytes), dtype=torch.uint8)[_BEGIN:]
