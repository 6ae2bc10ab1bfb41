"""The proof that every box of a sharded state dict has one main replica.

At a rendezvous, each rank sends the digest of its boxes. If the coordinator has not proved these digests
before, each rank sends its boxes, and the coordinator compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import xxhash

import shardproof as sp
from shardproof.engine.format import box_name


class Box(NamedTuple):
    """A box of a tensor on this rank, or a ShardedObject, which has no offsets."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_main: bool
    """True if this rank has the main replica."""


class MainReplicas:
    """Proves that each box has one main replica, and caches the proof."""

    def __init__(self) -> None:
        self._proved: tuple[bytes, ...] = ()
        """The digests of all ranks that the coordinator proved last."""

    def prove(
        self,
        rendezvous: sp.rendezvous.Rendezvous,
        location: str,
        describe: Callable[[], Sequence[Box]],
    ) -> None:
        """Compares the boxes of all ranks, which `describe` returns on each. All ranks call it.

        Raises:
            StructureError: two ranks have the main replica of one box, or no rank has one. The message names
                key, box and ranks.
            RankFailure, RankSilent: a rank failed or became silent.
        """
        meetings = sp.rendezvous.MeetingSequence(rendezvous, f"compare replicas of {location}")
        posted = b""

        def digest() -> bytes:
            nonlocal posted
            posted = msgspec.msgpack.encode(describe())
            return xxhash.xxh3_128_digest(posted)

        seen: list[bytes] = []

        def is_proved(posts: list[bytes]) -> bytes:
            seen[:] = posts
            return b"proved" if tuple(posts) == self._proved else b""

        if meetings.meet("digest", digest, is_proved):
            return

        def compare(posts: list[bytes]) -> bytes:
            check_main_replicas([msgspec.msgpack.decode(post, type=list[Box]) for post in posts])
            self._proved = tuple(seen)
            return b""

        meetings.meet("boxes", lambda: posted, compare)


def check_main_replicas(ranks: Sequence[Sequence[Box]]) -> None:
    """Checks the boxes of each rank.

    Raises:
        StructureError: a box has two main replicas, or none.

    >>> check_main_replicas([[Box("w", (0,), (2,), True)], [Box("w", (2,), (2,), False)]])
    Traceback (most recent call last):
    shardproof.errors.StructureError: key 'w', box [2:4]: no rank has the main replica, and other replicas \
are on rank 1. Give it replica_id 0 on one rank
    """
    mains: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    others: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, boxes in enumerate(ranks):
        for key, offsets, sizes, is_main in boxes:
            box = key, offsets, sizes
            if not is_main:
                others.setdefault(box, []).append(rank)
            elif box in mains:
                first = mains[box]
                who = (
                    f"rank {rank} has it twice" if first == rank else f"ranks {first} and {rank} both have it"
                )
                raise sp.StructureError(
                    f"{_name(*box)}: expected one main replica (replica_id of zeros), but {who}. Give one of "
                    "the two another replica_id",
                    key=key,
                    ranks=[first, rank],
                )
            else:
                mains[box] = rank
    for box, holders in others.items():
        if box not in mains:
            word = "rank" if len(set(holders)) == 1 else "ranks"
            named = f"{word} {sp.rendezvous.format_rank_ranges(holders)}"
            raise sp.StructureError(
                f"{_name(*box)}: no rank has the main replica, and other replicas are on {named}. Give "
                "it replica_id 0 on one rank",
                key=box[0],
                ranks=sorted(set(holders)),
            )


def _name(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    return f"key {key!r}" + (f", box {box_name(offsets, sizes)}" if sizes else "")
