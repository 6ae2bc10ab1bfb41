"""Incremental saves: a step refers to unchanged chunks of an earlier step, and does not write them again.

`IncrementalOption` plugs into the steps of a save. The ranks cache the digests of the last step that they
committed, and the coordinator caches the positions of its chunks. While plan and step are unchanged, the next
save uses these caches. Otherwise the coordinator reads the index of the base and sends each rank the digests
of its chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.engine import events
from shardproof.engine.format import (
    chain_attempt,
    chain_length,
    has_no_references,
    read_index,
    read_manifest,
    read_seal,
)
from shardproof.engine.planning import WritePlan
from shardproof.engine.rendezvous import MeetingSequence
from shardproof.engine.saving.base_chunks import (
    NAME,
    Base,
    BaseDigests,
    match_base,
    no_base,
    place_with_base,
    write_changed,
)
from shardproof.engine.saving.commit import Committed, PlaceChunks
from shardproof.engine.saving.messages import Attempt, OptionReport, SaveResult, pack_rows
from shardproof.engine.saving.save_option import SaveOption
from shardproof.engine.saving.shard_writer import Output, PreparedShard, WriteShard, WrittenShard
from shardproof.engine.saving.snapshot import Snapshot
from shardproof.engine.storage import Storage, aligned_buffer, file_sizes
from shardproof.errors import FormatError, NotCommittedError, StorageError

FindBase = Callable[[], Storage | None]
"""Finds the base, in a sibling folder of the new step; None: there is no base."""

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True, eq=False)
class _CachedBase:
    """The coordinator's cache of the last save."""

    attempt: str
    """Attempt of the last save. A rank that reports it has the digests of its chunks cached."""
    plan: str
    """Id of the plan of that save."""
    base: Base


class _BaseChoice:
    """The base of one save, which `find` finds. Without `find`, all chunks are written.

    Note "Chains end": a step that refers to its base shares bytes with it, and damage to these bytes damages
    both. So when a chain has the length that the caller allows, the next save is written in full and starts a
    new chain. The attempt of each save contains the length of its chain, so the bound holds across restarts
    and does not depend on what retention removes. A save that replaces a step without references is written
    in full, too: references must not replace an independent copy.
    """

    def __init__(self, storage: Storage, find: FindBase | None, cached: _CachedBase | None) -> None:
        self.base: Base | None = None
        """The planned chunks in the base, once `use_cached` or `look_up` has found them."""
        self._storage = storage
        self._cached = cached
        self._found = find() if find is not None else None
        self.length = 0
        """Saves since the last full save, including this one; see `bound_chain`."""

    @property
    def folder(self) -> str:
        """Folder of the base; empty without a base."""
        return self._found.folder if self._found is not None else ""

    def use_cached(self, attempts: Sequence[str]) -> bool:
        """Uses the cached base, if the step and the caches of all ranks still match it.

        `attempts` are those whose digests the ranks have cached.

        Raises:
            StorageError: the storage failed.
        """
        if (
            self._found is None
            or self._cached is None
            or any(one != self._cached.attempt for one in attempts)
        ):
            return False
        base = self._cached.base
        if base.folder != self.folder or base.seal != read_seal(self._found) or self._lost(base):
            return False
        self.base = base
        return True

    def bound_chain(self, full_every: int | None) -> None:
        """Drops the base if the save has to be written in full (note "Chains end").

        At least one of `full_every` saves in a row is written in full; None: no bound.

        Raises:
            StorageError: the storage failed.
        """
        if self._found is None:
            return
        before = self._length_before(self._found)
        self.length = 1 if before is None else before + 1
        is_due = full_every is not None and (before is None or self.length >= full_every)
        if is_due or has_no_references(self._storage):
            self._found = self.base = None

    def _length_before(self, found: Storage) -> int | None:
        """Length of the chain that ends with the base; None if it is unknown."""
        if self.base is not None:
            assert self._cached is not None
            has_references = any(record.folder != found.folder for record in self.base.files)
            return chain_length(self._cached.attempt) if has_references else 0
        try:
            manifest = read_manifest(found)
        except (FormatError, NotCommittedError):
            return 0  # `look_up` finds no chunks there
        return chain_length(manifest.attempt) if manifest.referenced_files else 0

    def look_up(self, plan: WritePlan) -> Base:
        """Finds the planned chunks in the base; a base that cannot be read stores none of them."""
        assert self._found is not None
        try:
            manifest, seal = read_manifest(self._found), read_seal(self._found) or b""
            found = match_base(plan, manifest, read_index(self._found, manifest), self.folder, seal)
            self.base = found.without(self._lost(found), self._storage.folder)
        except (FormatError, NotCommittedError, StorageError) as error:
            _log.warning(
                "%s: all chunks are written, because the base cannot be read: %s",
                self._storage.location,
                error,
            )
            self.base = no_base(plan, self.folder)
        return self.base

    def _lost(self, base: Base) -> list[int]:
        """Rows of the base's files whose size differs from the recorded one."""
        files = [(self._storage.sibling(record.folder), record.name) for record in base.files]
        return [
            row
            for row, (record, found) in enumerate(zip(base.files, file_sizes(files), strict=True))
            if found != record.size
        ]


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
    base: _CachedBase | None = None
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
        own_cache: the cache of the saver.
    """

    name = NAME

    def __init__(self, find: FindBase, full_every: int | None, own_cache: BaseCache) -> None:
        self._find = find
        self._full_every = full_every
        self._own_cache = own_cache
        self._choice: _BaseChoice
        self._base: BaseDigests | None = None
        self._written: NDArray[np.bool_] | None = None
        """(chunks,) True for those in this rank's file; None: all are."""
        self._digests = np.zeros((0, 2), np.uint64)

    def report(self) -> OptionReport:
        """Posts the attempt whose chunk digests this rank has cached; empty: none."""
        plan, digests = self.cache.plan, self._own_cache.digests
        is_cached = plan is not None and digests is not None and digests.plan == plan.id
        request = f"incremental=Incremental(full_every={self._full_every})"
        return OptionReport(request, digests.attempt if digests is not None and is_cached else "")

    def decide(self, attempt: Attempt, posts: Sequence[Any], reuse_plan: bool) -> tuple[Attempt, Any]:
        """Coordinator: chooses the base. Answers whether each rank gets the base's digests in a meeting."""
        plan, base = self.cache.coordinator_plan, self._own_cache.base
        is_valid = reuse_plan and plan is not None and base is not None and base.plan == plan.id
        self._choice = choice = _BaseChoice(self.storage, self._find, base if is_valid else None)
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
            assert self._own_cache.digests is not None
            self._base = self._own_cache.digests.digests

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
        file, self._written = write_changed(shard, header, snapshot, base, output, self._own_cache.scratch)
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
        self._own_cache.base = _CachedBase(result.attempt, plan.id, Base.of(committed, self.storage.folder))
        return result

    def committed(self, result: SaveResult, phase: events.Phase, rank: int) -> None:
        """Caches the digests of this rank's chunks."""
        plan = self.cache.plan
        assert plan is not None
        self._own_cache.digests = _CachedDigests(result.attempt, plan.id, BaseDigests.of(self._digests))
