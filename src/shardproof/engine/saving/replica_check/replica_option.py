"""The replica check of a save: what each rank hashes, and what the coordinator compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import xxhash

from shardproof.engine import events
from shardproof.engine.planning import Slices, Structure, WritePlan
from shardproof.engine.rendezvous import MeetingSequence
from shardproof.engine.saving.commit import Committed
from shardproof.engine.saving.messages import Attempt, Divergence, OptionReport, SaveResult
from shardproof.engine.saving.replica_check.replica_digests import (
    CheckReplicas,
    chosen_slices,
    compare_replicas,
    hash_replicas,
    warn_of_divergences,
)
from shardproof.engine.saving.save_option import SaveOption, Track
from shardproof.engine.saving.shard_writer import WrittenShard
from shardproof.engine.state import Piece
from shardproof.errors import StructureError


@dataclass(slots=True)
class ReplicaCache:
    """The cache between the replica checks of one process."""

    turn: int | None = None
    """Coordinator: number of the next sample of replicas."""
    slices: tuple[str, Slices] | None = None
    """Slices of the pieces that other ranks have too, and the id of the plan that they are made from."""


class ReplicaOption(SaveOption):
    """Compares the bytes of boxes that several ranks have.

    Args:
        which: the replicas to compare.
        kept: the cache of the saver.
    """

    name = "replicas"

    def __init__(self, which: CheckReplicas, kept: ReplicaCache) -> None:
        self._which = which
        self._kept = kept
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
        if self._kept.turn is None:
            self._kept.turn = xxhash.xxh32_intdigest(str(attempt.step).encode())
        return attempt, self._kept.turn

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
        if self._kept.slices is None or self._kept.slices[0] != plan.id:
            self._kept.slices = plan.id, shared.slices(structure)
        slices = self._kept.slices[1]
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
            self._kept.turn = self._turn + 1
        return msgspec.structs.replace(result, diverged=self._diverged, diverged_count=self._count)

    def committed(self, result: SaveResult, phase: events.Phase, rank: int) -> None:
        """Logs the divergences."""
        phase.note(diverged=result.diverged_count)
        warn_of_divergences(result, rank)
