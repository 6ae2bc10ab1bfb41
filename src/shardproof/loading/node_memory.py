"""Memory of one rank that the other ranks of its node can map: it has no name and ends with the processes.

Note: Why a file descriptor
    A named segment outlives a job that is killed, and the usual place for one, ``/dev/shm``, has 64 MB in
    many containers; writing beyond what is there ends the process. An anonymous file of Linux (memfd_create)
    has neither fault: it is gone with the last process that holds it, and it takes memory like any that the
    process allocates. Another rank opens it through ``/proc``. Where that is not allowed, or the process
    number means another process there (a container of its own), the token at its beginning is not found, and
    the ranks do without.
"""

from __future__ import annotations

import mmap
import os
import secrets

import msgspec
import torch

from shardproof.errors import StorageError

__all__ = ["Handle", "NodeMemory", "PeerMemory", "can_share_memory"]

_TOKEN_BYTES = 16
_BEGIN = mmap.PAGESIZE
"""Where the data begin; the token is before."""


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """How another process of the node finds the memory."""

    process: int
    descriptor: int
    token: bytes


def can_share_memory() -> bool:
    """Whether this system has anonymous files that other processes can open."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class _Memory:
    """Anonymous memory behind a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Lets go of it. What is mapped stays until nobody uses the tensors."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class NodeMemory(_Memory):
    """This rank's own.

    >>> memory = NodeMemory()
    >>> memory.reserve(5)[:] = torch.arange(5, dtype=torch.uint8)
    >>> peer = PeerMemory.opened(memory.handle)
    >>> peer.map(5), memory.close(), peer.close()
    (tensor([0, 1, 2, 3, 4], dtype=torch.uint8), None, None)
    """

    def __init__(self) -> None:
        token = secrets.token_bytes(_TOKEN_BYTES)
        super().__init__(os.memfd_create("shardproof", os.MFD_CLOEXEC))
        os.pwrite(self._descriptor, token, 0)
        self.handle = Handle(os.getpid(), self._descriptor, token)

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Makes it so large, and maps it: (nbytes,) uint8, shared.

        Raises:
            StorageError: the node has not so much memory.
        """
        try:
            os.posix_fallocate(self._descriptor, 0, _BEGIN + nbytes)  # at once, not at each page's first use
        except OSError as error:
            raise StorageError(
                f"{nbytes} bytes of memory to share with the other ranks of this node could not be had "
                f"({error}): load with read_once=False"
            ) from error
        return _mapped(self._descriptor, nbytes)


class PeerMemory(_Memory):
    """That of another rank of the node."""

    @staticmethod
    def opened(handle: Handle) -> PeerMemory | None:
        """The memory behind a handle; None where it cannot be reached."""
        try:
            descriptor = os.open(f"/proc/{handle.process}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.pread(descriptor, _TOKEN_BYTES, 0)
        except OSError:  # a descriptor of another process that is no file
            found = b""
        if found != handle.token:
            os.close(descriptor)
            return None
        return PeerMemory(descriptor)

    def map(self, nbytes: int) -> torch.Tensor:
        """What its owner reserved: (nbytes,) uint8."""
        return _mapped(self._descriptor, nbytes)


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, _BEGIN + nbytes), dtype=torch.uint8)[_BEGIN:]
