"""The incremental part of a save: which chunks are written, and what the ranks cache for the next save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.engine import events
from shardproof.engine.format import chain_attempt
from shardproof.engine.rendezvous import MeetingSequence
from shardproof.engine.saving.commit import Committed, PlaceChunks
from shardproof.engine.saving.incremental.base_choice import BaseChoice, CachedBase, FindBase
from shardproof.engine.saving.incremental.base_chunks import NAME, Base, BaseDigests, place_with_base
from shardproof.engine.saving.incremental.changed_chunks import write_changed
from shardproof.engine.saving.messages import Attempt, OptionReport, SaveResult, pack_rows
from shardproof.engine.saving.save_option import SaveOption
from shardproof.engine.saving.shard_writer import Output, PreparedShard, WriteShard, WrittenShard
from shardproof.engine.saving.snapshot import Snapshot
from shardproof.engine.storage import aligned_buffer


@dataclass(frozen=True, slots=True)
class _CachedDigests:
    """Digests of this rank's chunks in an earlier attempt."""

    attempt: str
    plan: str
    """Id of the plan of that attempt."""
    digests: BaseDigests


@dataclass(slots=True)
class BaseCache:
    """The cache between the incremental saves of one process."""

    digests: _CachedDigests | None = None
    base: CachedBase | None = None
    """On the coordinator."""
    memory: memoryview = field(default_factory=lambda: memoryview(b""))

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for one chunk that is compared with the base; the same memory at every call."""
        if len(self.memory) < nbytes:
            self.memory = aligned_buffer(nbytes)
        return self.memory


class IncrementalOption(SaveOption):
    """Writes only chunks that differ from the base.

    Args:
        find: finds the base, on the coordinator.
        full_every: at least one of this many saves in a row is written in full. None: no bound.
        kept: the cache of the saver.
    """

    name = NAME

    def __init__(self, find: FindBase, full_every: int | None, kept: BaseCache) -> None:
        self._find = find
        self._full_every = full_every
        self._kept = kept
        self._choice: BaseChoice
        self._base: BaseDigests | None = None
        self._written: NDArray[np.bool_] | None = None
        """(chunks,) True for those in this rank's file; None: all are."""
        self._digests = np.zeros((0, 2), np.uint64)

    def report(self) -> OptionReport:
        """Posts the attempt whose chunk digests this rank has cached; empty: none."""
        plan, digests = self.cache.plan, self._kept.digests
        is_cached = plan is not None and digests is not None and digests.plan == plan.id
        request = f"incremental=Incremental(full_every={self._full_every})"
        return OptionReport(request, digests.attempt if digests is not None and is_cached else "")

    def decide(self, attempt: Attempt, posts: Sequence[Any], reuse_plan: bool) -> tuple[Attempt, Any]:
        """Coordinator: chooses the base. Answers whether each rank gets the base's digests in a meeting."""
        plan, base = self.cache.coordinator_plan, self._kept.base
        is_valid = reuse_plan and plan is not None and base is not None and base.plan == plan.id
        self._choice = choice = BaseChoice(self.storage, self._find, base if is_valid else None)
        is_cached = choice.use_cached(posts)
        choice.bound_chain(self._full_every)
        if not choice.folder:
            return attempt, False
        name = chain_attempt(attempt.id, choice.length)
        return msgspec.structs.replace(attempt, id=name, base=choice.folder), not is_cached

    def meet(
        self,
        answer: Any,
        attempt: Attempt,
        meetings: MeetingSequence,
        phase: Callable[[str], events.Phase],
    ) -> None:
        """Gets the base's digests of this rank's chunks, from the coordinator or the cache."""
        if answer:
            with phase("plan"):
                self._base = BaseDigests.decode(meetings.meet("base", lambda: b"", self._send_base))
        elif attempt.base:
            assert self._kept.digests is not None
            self._base = self._kept.digests.digests

    def _send_base(self, posts: Sequence[bytes]) -> list[bytes]:
        """Coordinator: looks the planned chunks up in the base."""
        assert self.cache.coordinator_plan is not None
        plan = self.cache.coordinator_plan.plan
        base = self._choice.look_up(plan)
        return [base.part(plan, rank).encode() for rank in range(len(posts))]

    def writer(self, write: WriteShard) -> WriteShard:
        """With a base, writes the changed chunks; without one, all."""
        return write if self._base is None else partial(self._write_changed, self._base)

    def _write_changed(
        self,
        base: BaseDigests,
        shard: PreparedShard,
        header: Callable[..., bytes],
        snapshot: Snapshot,
        output: Output,
    ) -> WrittenShard:
        file, self._written = write_changed(shard, header, snapshot, base, output, self._kept.scratch)
        return file

    def report_write(self, file: WrittenShard) -> bytes:
        """`pack_rows` of the planned chunks that the file holds; empty: all of them."""
        self._digests = file.digests
        return b"" if self._written is None or self._written.all() else pack_rows(self._written)

    def placer(self, place: PlaceChunks) -> PlaceChunks:
        """Coordinator: finds the chunks that were not written in the base."""
        return partial(place_with_base, base=self._choice.base)

    def complete(self, result: SaveResult, committed: Committed) -> SaveResult:
        """Coordinator: caches the step as the base of the next save."""
        plan = self.cache.coordinator_plan
        assert plan is not None
        self._kept.base = CachedBase(result.attempt, plan.id, Base.of(committed, self.storage.folder))
        return result

    def committed(self, result: SaveResult, phase: events.Phase, rank: int) -> None:
        """Caches the digests of this rank's chunks."""
        plan = self.cache.plan
        assert plan is not None
        self._kept.digests = _CachedDigests(result.attempt, plan.id, BaseDigests.of(self._digests))
