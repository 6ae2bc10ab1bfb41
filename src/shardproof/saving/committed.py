"""What a save leaves."""

from __future__ import annotations

import msgspec

__all__ = ["Committed"]


class Committed(msgspec.Struct, frozen=True):
    """A checkpoint that is durable and whole."""

    location: str
    step: int | None
    attempt: str
    tensors: int
    bytes: int
    """Size of all shard files that this save wrote."""
    reused: int = 0
    """Bytes of chunks that earlier steps have, so that they were not written again (`incremental`)."""
    seconds: float = 0.0
    """From the call to the commit, on this rank."""
