"""What ranks and their coordinator say to each other before a save goes on in the background."""

from __future__ import annotations

import msgspec

from shardproof.saving.prepare import Attempt

__all__ = ["Agreed", "Described"]


class Described(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of its state and of what it was asked for."""

    digest: bytes
    held: str
    step: int | None
    metadata: bytes
    overwrite: bool
    incremental: bool
    known: str
    """The attempt whose digests the rank knows."""
    node: int
    """The same for all ranks of one host."""
    check_replicas: str
    """Empty: none are compared."""
    failed: bytes = b""
    """Why the save before failed, if the caller of this rank was not told yet."""
    full_every: int | None = None
    """See `Request`."""

    def asked(self) -> str:
        """What was asked for, in words."""
        how = f"overwrite={self.overwrite}, incremental={self.incremental}"
        if self.incremental:
            how += f", full_every={self.full_every}"
        if self.check_replicas:
            how += f", check_replicas={self.check_replicas!r}"
        return f"step {self.step}, {how}, metadata {self.metadata.decode()}"


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator answers."""

    attempt: Attempt
    reuse: bool
    tell: bool
    """Whether the ranks are told digests of a base that they do not know."""
    background: str
    """Name of the rendezvous in the background: that of the coordinator's first save."""
    turn: int = 0
    """Where a sample of replicas is compared: its number."""
