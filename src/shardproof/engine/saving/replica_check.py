"""Replica checks: ranks hash their replicas of a box, and the coordinator compares the digests.

    rank: SharedPieces --slices--> chosen --hash_replicas--> 16 bytes each, in the write report
    coordinator: Replicas --slices--> the same chosen slices; digests --compare_replicas--> Divergence

`ReplicaOption` plugs into the steps of a save. Each rank hashes before its caller continues, and the
coordinator compares before the commit. The reports do not name the slice of a digest: both sides derive it
from the plan (see "How successive samples cover all replicas" in `engine.planning.replicas`). Bytes are
compared, so a NaN equals itself and 0.0 differs from -0.0.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof._utils.libc import address
from shardproof.engine import events
from shardproof.engine.planning import Slices, Structure, WritePlan
from shardproof.engine.rendezvous import MeetingSequence
from shardproof.engine.saving.commit import Committed
from shardproof.engine.saving.messages import Attempt, Divergence, OptionReport, SaveResult
from shardproof.engine.saving.save_option import SaveOption, Track
from shardproof.engine.saving.shard_writer import WrittenShard
from shardproof.engine.saving.staging import SliceSource, StagingPool, copies_of
from shardproof.engine.state import Piece
from shardproof.errors import StructureError

CheckReplicas = Literal["sample", "all"]
"""The replicas that a save compares: a sample, which changes with each save, or all."""

_LISTED = 100
"""Divergences in a result. More are listed only if they name a rank that no other names."""
_SHOWN = 8
"""Divergences in a warning."""
_log = logging.getLogger("shardproof")


def chosen_slices(slices: Slices, turns: int, turn: int | None) -> NDArray[np.int64]:
    """Rows of the slices that one save compares, in their order: one of `turns` samples, or all.

    A `turn` of None chooses all.
    """
    if turn is None:
        return np.arange(len(slices.box))
    return np.flatnonzero(slices.turn == turn % turns)


def hash_replicas(
    pieces: Sequence[Piece],
    slices: Slices,
    rows: NDArray[np.int64],
    pool: StagingPool,
    on_progress: Callable[[int], None],
) -> bytes:
    """Hashes some rows of the slices of a rank's pieces. `on_progress` takes the bytes hashed so far.

    Returns the 16 bytes of the xxh3_128 digest of each slice.
    """
    boxes, byte_count = slices.boxes.take(rows), slices.byte_count[rows]
    columns = slices.box[rows], slices.start[rows], byte_count, boxes.offsets, boxes.sizes
    source = SliceSource(pieces, *columns, copies_of(piece.view for piece in pieces))
    digests, done = [], 0
    try:
        for row, count in enumerate(source.byte_counts):
            there = source.addresses[row]
            if there == 0:
                with pool.changed:
                    there = address(pool.scratch(int(byte_count.max())))
                source.read(row, there)
            digests.append(xxhash.xxh3_128_digest((ctypes.c_char * count).from_address(there)))
            done += count
            on_progress(done)
    finally:
        source.finish()
    return b"".join(digests)


def compare_replicas(
    plan: WritePlan, turn: int | None, digests: Sequence[bytes]
) -> tuple[tuple[Divergence, ...], int]:
    """Compares the results of `hash_replicas` of all ranks; `turn` as for `chosen_slices`.

    Returns:
        The divergences, ordered by set of holders and tensor; and their total number.

    Raises:
        StructureError: a rank hashed more or fewer slices than requested.
    """
    replicas = plan.replicas
    slices = replicas.slices()
    rows = chosen_slices(slices, replicas.turns, turn)
    counts = np.array([len(part) // 16 for part in digests], np.int64)
    words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
    of_set = np.repeat(np.arange(len(replicas.counts)), replicas.counts)[slices.box[rows]]
    expected = np.zeros(len(digests), np.int64)  # digests of each rank
    of_sets = np.bincount(of_set, minlength=len(replicas.ranks)).tolist()
    for holders, count in zip(replicas.ranks, of_sets, strict=True):
        expected[holders] += count
    if (counts != expected).any():
        rank = int((counts != expected).argmax())
        raise StructureError(
            f"rank {rank} hashed {counts[rank]} replicas, but {expected[rank]} were expected; nothing was "
            "committed",
            rank=rank,
        )
    at = np.cumsum(counts) - counts  # index of the next digest by rank
    found: list[Divergence] = []
    named: set[int] = set()
    total = 0
    begins = np.searchsorted(of_set, np.arange(len(replicas.ranks) + 1))
    for number in np.flatnonzero(np.diff(begins)).tolist():
        ranks, first = replicas.ranks[number], int(begins[number])
        length = int(begins[number + 1]) - first
        of_holders = words[at[ranks][:, None] + np.arange(length)]
        at[ranks] += length
        differs = (of_holders != of_holders[:1]).any(axis=(0, 2))
        total += int(differs.sum())
        for column in np.flatnonzero(differs).tolist():
            row = int(rows[first + column])
            at_fault, by_majority = _verdict(ranks.tolist(), of_holders[:, column])
            if len(found) < _LISTED or not named.issuperset(at_fault):
                named.update(at_fault)
                key = plan.merged.keys[int(replicas.tensor[slices.box[row]])]
                box = slices.boxes.pair(row)
                found.append(Divergence(key, *box, at_fault, tuple(ranks.tolist()), by_majority))
    return tuple(found), total


def _verdict(ranks: Sequence[int], digests: NDArray[np.uint64]) -> tuple[tuple[int, ...], bool]:
    """The ranks at fault, and whether a majority of the holders agrees. `ranks` are the holders.

    >>> _verdict([3, 5, 7], np.array([[1, 1], [1, 2], [1, 1]], np.uint64))
    ((5,), True)
    >>> _verdict([3, 5], np.array([[1, 1], [1, 2]], np.uint64))
    ((3, 5), False)
    """
    values = [tuple(digest) for digest in digests.tolist()]
    most, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return tuple(ranks), False
    return tuple([rank for rank, digest in zip(ranks, values, strict=True) if digest != most]), True


def warn_of_divergences(result: SaveResult, rank: int) -> None:
    """Logs the divergences, on rank 0 and on the ranks at fault."""
    concerns = [one for one in result.diverged if rank == 0 or rank in one.ranks]
    if concerns:
        _log.warning(
            "%s: replicas differ in %d places: %s%s",
            result.location,
            result.diverged_count,
            "; ".join(map(str, concerns[:_SHOWN])),
            "; ..." if len(concerns) > _SHOWN else "",
        )


@dataclass(slots=True)
class ReplicaCache:
    """The cache between the replica checks of one process."""

    turn: int | None = None
    """Coordinator: number of the next sample of replicas."""
    slices: tuple[str, Slices] | None = None
    """Slices of the pieces that other ranks have too, and the id of the plan that they are made from."""


class ReplicaOption(SaveOption):
    """Compares the bytes of boxes that several ranks have."""

    name = "replicas"

    def __init__(self, which: CheckReplicas, own_cache: ReplicaCache) -> None:
        self._which = which
        self._own_cache = own_cache
        self._turn: int | None = None
        """Number of the sample; None: all replicas."""
        self._digests = b""
        self._diverged: tuple[Divergence, ...] = ()
        self._count = 0

    def report(self) -> OptionReport:
        """Checks the argument. There is nothing to post."""
        if self._which not in get_args(CheckReplicas):
            raise StructureError(f"check_replicas is 'sample', 'all' or None, not {self._which!r}")
        return OptionReport(f"check_replicas={self._which!r}")

    def decide(self, attempt: Attempt, posts: Sequence[Any], reuse_plan: bool) -> tuple[Attempt, Any]:
        """Coordinator: answers with the number of the sample.

        The first is a hash of the step, so restarts compare other samples.
        """
        if self._which == "all":
            return attempt, None
        if self._own_cache.turn is None:
            self._own_cache.turn = xxhash.xxh32_intdigest(str(attempt.step).encode())
        return attempt, self._own_cache.turn

    def meet(
        self,
        answer: Any,
        attempt: Attempt,
        meetings: MeetingSequence,
        phase: Callable[[str], events.Phase],
    ) -> None:
        """Takes the number of the sample."""
        self._turn = answer

    def read_state(self, pieces: Sequence[Piece], structure: Structure, track: Track) -> None:
        """Hashes the replicas that the request selects."""
        plan = self.cache.plan
        assert plan is not None
        shared = plan.shard.plan.shared
        if self._own_cache.slices is None or self._own_cache.slices[0] != plan.id:
            self._own_cache.slices = plan.id, shared.slices(structure)
        slices = self._own_cache.slices[1]
        rows = chosen_slices(slices, shared.turns, self._turn)
        with track("replicas", int(slices.byte_count[rows].sum())) as on_progress:
            self._digests = hash_replicas(pieces, slices, rows, self.cache.staging, on_progress)

    def report_write(self, file: WrittenShard) -> bytes:
        """The digests of the replicas that this rank compares."""
        return self._digests

    def check(self, plan: WritePlan, posts: Sequence[Any]) -> None:
        """Coordinator: compares the digests of all ranks."""
        self._diverged, self._count = compare_replicas(plan, self._turn, posts)

    def complete(self, result: SaveResult, committed: Committed) -> SaveResult:
        """Coordinator: adds the divergences."""
        if self._turn is not None:
            self._own_cache.turn = self._turn + 1
        return msgspec.structs.replace(result, diverged=self._diverged, diverged_count=self._count)

    def committed(self, result: SaveResult, phase: events.Phase, rank: int) -> None:
        """Logs the divergences."""
        phase.note(diverged=result.diverged_count)
        warn_of_divergences(result, rank)
