"""What one rank opens to the other ranks of its node: memory that they can map, and an inbox.

Note: Why file descriptors
    A named segment outlives a job that is killed, and the usual place for one, ``/dev/shm``, has 64 MB in
    many containers; writing beyond what is there ends the process. An anonymous file of Linux (memfd_create)
    has neither fault: it is gone with the last process that holds it, and it takes memory like any that the
    process allocates. Another rank opens it through ``/proc``, and the inbox likewise. Where that is not
    allowed, or the process number means another process there (a container of its own), the token at its
    beginning is not found, and the ranks do without.
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
"""Where the data begin. The token is before, and the count that shows that its owner moves."""


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """How another process of the node finds the memory and the inbox."""

    process: int
    memory: int
    inbox: int
    pipe: int
    """Number of the inbox's pipe."""
    token: bytes


class NodeMemory:
    """This rank's own.

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
        """New memory; None where the system has none of the kind, or refuses it."""
        has_all = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
        try:
            return NodeMemory() if has_all and os.path.isdir("/proc/self/fd") else None
        except OSError:
            return None

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Makes it so large, and maps it: (nbytes,) uint8, shared.

        Raises:
            StorageError: the node has not so much memory.
        """
        try:
            os.posix_fallocate(self._memory, 0, _BEGIN + nbytes)  # at once, not at each page's first use
        except OSError as error:
            raise StorageError(
                f"{nbytes} bytes of memory to share with the other ranks of this node could not be had "
                f"({error}): load with read_once=False",
                errno=errno.errorcode.get(error.errno or 0, str(error.errno)),
            ) from error
        return _mapped(self._memory, nbytes)

    def tick(self) -> None:
        """Shows the others that this rank moves."""
        self._ticks += 1
        os.pwrite(self._memory, _TICKS.pack(self._ticks), _TOKEN_BYTES)

    def close(self) -> None:
        """Lets go of both. What is mapped stays until nobody uses the tensors."""
        self.inbox.close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


class PeerMemory:
    """That of another rank of the node."""

    def __init__(self, memory: int, process: int, outbox: Outbox) -> None:
        self._memory = memory
        self.process = process
        """Descriptor by which the process can be watched."""
        self.outbox = outbox

    @staticmethod
    def opened(handle: Handle) -> PeerMemory | None:
        """What is behind a handle; None where it cannot be reached."""
        with ExitStack() as opened:
            try:
                memory = os.open(f"/proc/{handle.process}/fd/{handle.memory}", _OPEN)
                opened.callback(os.close, memory)
                process = os.pidfd_open(handle.process)
                opened.callback(os.close, process)
                if os.pread(memory, _TOKEN_BYTES, 0) != handle.token:
                    return None
                outbox = Outbox.opened(handle.process, handle.inbox, handle.pipe)
            except OSError:  # not allowed, or it means something else here
                return None
            opened.pop_all()
            return PeerMemory(memory, process, outbox)

    def map(self, nbytes: int) -> torch.Tensor:
        """What its owner reserved: (nbytes,) uint8."""
        return _mapped(self._memory, nbytes)

    def ticks(self) -> int:
        """How often its owner has moved."""
        return int(_TICKS.unpack(os.pread(self._memory, _TICKS.size, _TOKEN_BYTES))[0])

    def close(self) -> None:
        """Lets go of all. What is mapped stays until nobody uses the tensors."""
        self.outbox.close()
        for descriptor in (self._memory, self.process):
            if descriptor >= 0:
                os.close(descriptor)
        self._memory = self.process = -1


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(descriptor, _BEGIN + nbytes), dtype=torch.uint8)[_BEGIN:]
