"""The result of a save."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardproof.rendezvous import format_rank_ranges

__all__ = ["Divergence", "SaveResult"]


class Divergence(msgspec.Struct, frozen=True):
    """A box of a tensor whose replicas differ between ranks.

    >>> print(Divergence("w", (0, 4), (2, 4), (3,), (0, 1, 3), True))
    'w'[0:2,4:8]: rank 3 differs from the others of ranks 0-1, 3
    >>> print(Divergence("b", (0,), (2,), (0, 1), (0, 1), False))
    'b'[0:2]: ranks 0-1 differ, and no majority says which of them is right
    """

    key: str
    offsets: tuple[int, ...]
    """Offsets of the box, in elements of the global tensor."""
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks that differ from the majority, ascending; all holders if there is no majority."""
    holders: tuple[int, ...]
    """All ranks with the box, ascending."""
    by_majority: bool
    """True if more than half of the holders have the same bytes."""

    def __str__(self) -> str:
        ends = zip(self.offsets, self.sizes, strict=True)
        box = ",".join(f"{offset}:{offset + size}" for offset, size in ends)
        where = f"{self.key!r}[{box}]"
        if self.by_majority:
            differ = "differs" if len(self.ranks) == 1 else "differ"
            return f"{where}: {_ranks(self.ranks)} {differ} from the others of {_ranks(self.holders)}"
        return f"{where}: {_ranks(self.ranks)} differ, and no majority says which of them is right"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {format_rank_ranges(ranks)}"


class SaveResult(msgspec.Struct, frozen=True):
    """A checkpoint that is committed, durable and complete.

    The bytes that the save wrote are hashed and flushed. Files of earlier steps that it refers to (`reused`)
    have the recorded sizes; `Checkpointer` reads their bytes again in the background (`scrub`).
    """

    location: str
    """Location of the checkpoint."""
    step: int | None
    """None if the caller gave none."""
    attempt: str
    """Id of the save, part of its file names."""
    tensors: int
    """Number of stored tensors. Tied tensors count once."""
    bytes: int
    """Size of all shard files that this save wrote."""
    reused: int = 0
    """Bytes of chunks in files of earlier steps, which were not written again (`incremental`)."""
    seconds: float = 0.0
    """Seconds from the call to the commit, on this rank."""
    diverged: tuple[Divergence, ...] = ()
    """Compared replicas that differ (`check_replicas`); the same on all ranks. After the first 100, only
    divergences with a rank that no earlier one names are listed."""
    diverged_count: int = 0
    """Number of divergences, listed or not."""
