"""Shared memory and an inbox of one rank, which the other ranks of its node open.

Note: Why file descriptors
    A named segment outlives a killed job. Its usual place, ``/dev/shm``, has 64 MB in many containers, and a
    write beyond that ends the process. An anonymous file of Linux (memfd_create) has neither fault: it ends
    with the last process that has it open, and its memory counts like other memory of the process. Another
    rank opens the file and the inbox through ``/proc``. The system may refuse that, or the process id may
    belong to another process there (in a container). Then the open fails or the token at the beginning of the
    memory differs, and the ranks do not use shared memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
from contextlib import ExitStack

import msgspec
import torch

from shardproof.errors import StorageError
from shardproof.loading.read_once.node_messages import Inbox, Outbox

__all__ = ["Handle", "NodeMemory", "PeerMemory"]

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOCTTY", 0)
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
                memory = os.open(f"/proc/{handle.process}/fd/{handle.memory}", _OPEN)
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
