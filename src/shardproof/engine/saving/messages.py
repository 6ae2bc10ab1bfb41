"""The messages of a save: reports of the ranks, answers of the coordinator, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.engine.rendezvous import format_rank_ranges


class Attempt(msgspec.Struct, frozen=True):
    """One attempt at a save, named by the coordinator; the same on all ranks."""

    id: str
    time: float
    """Seconds since 1970."""
    step: int | None
    world_size: int
    metadata: dict[str, Any]
    base: str = ""
    """Folder of the base, which stores the unchanged chunks; empty: no base."""

    @property
    def is_full(self) -> bool:
        """True if the save writes all chunks."""
        return not self.base


class OptionReport(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report of one optional part of a save."""

    request: str
    """The caller's arguments, for messages. They must be equal on all ranks."""
    post: Any = None
    """Plain data for the coordinator."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """A rank's first report: the structure of its state, and the request of its caller."""

    digest: bytes
    """Digest of the structure."""
    cached_plan: str
    """The attempt whose plan the rank has cached; empty: none."""
    step: int | None
    metadata: bytes
    overwrite: bool
    options: dict[str, OptionReport]
    """The optional parts of the save, by name."""
    node: int
    """Equal on all ranks of one host."""
    failed: bytes = b""
    """The error of the previous save, if this rank's caller has not received it."""
    space: tuple[int, int, int | None, str, int | None] | None = None
    """The fields of the `FreeSpace` that the rank sees, without their names; None: not known."""

    def request_text(self) -> str:
        """The caller's request, for messages."""
        how = ", ".join([f"overwrite={self.overwrite}", *(one.request for one in self.options.values())])
        return f"step {self.step}, {how}, metadata {self.metadata.decode()}"


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's answer to the rank reports."""

    attempt: Attempt
    reuse_plan: bool
    """True if all ranks use their cached plan."""
    background: str
    """Name of the rendezvous in the background: the name of the coordinator's first attempt."""
    options: dict[str, Any]
    """The answer to each optional part of the save, by name."""


class WriteReport(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report of its shard file. Without a file, `size` and `data_start` are 0."""

    size: int
    data_start: int
    digest: str
    digests: bytes
    """(n, 2) uint64 of the planned chunks, in the order of the plan, written or not."""
    objects: dict[str, bytes]
    """The objects that this rank stores, as JSON."""
    object_keys: tuple[str, ...]
    """Keys of all objects in this rank's state."""
    object_digests: bytes
    """16 bytes for each of `object_keys`. They do not depend on the insertion order of dicts."""
    options: dict[str, Any] = {}
    """The post of each optional part of the save, by name."""
    seconds: float = 0.0
    """Time that the rank took to write."""
    orders: dict[str, bytes] = {}
    """Key to a digest of the order of its dicts, for objects with dicts that are not in sorted order."""


def pack_rows(chosen: NDArray[np.bool_]) -> bytes:
    r"""One bit per row, the first row in the lowest bit of the first byte.

    >>> pack_rows(np.array([True, False, True]))
    b'\x05'
    """
    return np.packbits(chosen, bitorder="little").tobytes()


def unpack_rows(rows: bytes, count: int) -> NDArray[np.bool_]:
    r"""Inverse of `pack_rows`, of `count` rows.

    >>> unpack_rows(b"\x05", 3).tolist()
    [True, False, True]
    """
    return np.unpackbits(np.frombuffer(rows, np.uint8), count=count, bitorder="little").astype(bool)


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
