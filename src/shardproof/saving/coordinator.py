"""The coordinator's side of the meetings of one save: agree, plan, send the base, commit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
import xxhash

from shardproof._utils.gc_pause import no_garbage_collection
from shardproof.errors import (
    AlreadyCommittedError,
    FormatError,
    NotCommittedError,
    RankFailure,
    ShardproofError,
    StorageError,
    StructureError,
)
from shardproof.format import MANIFEST_NAME, chain_attempt, overwrite_attempt, read_manifest
from shardproof.planning import Structure, WritePlan, plan_writes
from shardproof.saving.cache import CoordinatorPlan, Limits, SaveCache, SaveRequest
from shardproof.saving.commit import commit, warn_of_orders
from shardproof.saving.failed_commit import is_in_place
from shardproof.saving.incremental import BaseChoice, CachedBase
from shardproof.saving.messages import Agreement, Attempt, Divergence, RankReport, SaveResult, WriteReport
from shardproof.saving.replica_check import compare_replicas
from shardproof.saving.space_check import check_space, free_space
from shardproof.storage import FreeSpace, Storage

__all__ = ["Coordinator"]

_OUTCOMES = {
    False: "nothing was committed",
    True: (
        "committed, but not known to be durable (readers see it, its files stay, and a crash of the machine "
        "may undo it; save again with overwrite=True once the storage works)"
    ),
    None: (
        "it is unknown whether it was committed, because the storage does not answer (its files stay; once "
        "the storage works, run `shardproof ls` and save again with overwrite=True)"
    ),
}
"""Outcome by whether the manifest is in place; None: unknown."""


class Coordinator:
    """The coordinator's side of one save. Each method takes the posts of all ranks and returns the answer."""

    def __init__(self, storage: Storage, request: SaveRequest, cache: SaveCache, limits: Limits) -> None:
        self._storage = storage
        self._request = request
        self._cache = cache
        self._limits = limits
        self.facts: dict[str, float] = {}
        """For the commit event of this rank: the slowest rank, and its seconds."""
        self._attempt: Attempt
        self._replace = request.overwrite
        self._nodes: list[int] = []
        self._spaces: list[FreeSpace | None] = []
        self._choice: BaseChoice

    def agree(self, posts: Sequence[bytes]) -> bytes:
        """Checks that the requests agree, names the attempt, and decides which caches the ranks use."""
        reports = [msgspec.msgpack.decode(post, type=RankReport) for post in posts]
        self._check_requests(reports)
        cached = self._cache.coordinator_plan
        reuse_plan = (
            cached is not None
            and tuple(report.digest for report in reports) == cached.digests
            and all(report.cached_plan == cached.id for report in reports)
        )
        self._nodes = [report.node for report in reports]
        self._spaces = [None if report.space is None else FreeSpace(*report.space) for report in reports]
        metadata = msgspec.json.decode(reports[0].metadata)
        choice = BaseChoice(self._storage, self._request.base, self._cache.base if reuse_plan else None)
        is_cached = choice.use_cached([report.cached_digests for report in reports])
        choice.bound_chain(self._request.full_every)
        send_base, self._choice = bool(choice.folder) and not is_cached, choice
        if cached is not None and reuse_plan:
            self._check_space(cached.plan)
        name, now = secrets.token_hex(8), self._time()
        attempt = overwrite_attempt(name) if self._request.record_overwrite else name
        attempt = chain_attempt(attempt, choice.length) if choice.folder else attempt
        self._attempt = Attempt(attempt, now, reports[0].step, len(reports), metadata, choice.folder)
        self._cache.background_name = self._cache.background_name or name
        turn = self._turn() if self._request.check_replicas else 0
        return msgspec.msgpack.encode(
            Agreement(self._attempt, reuse_plan, send_base, self._cache.background_name, turn)
        )

    def _time(self) -> float:
        """The time of this save, Unix seconds; later than that of the save that it replaces.

        A restore from two tiers takes the later save of a step, and the clock may have been set back.
        """
        now = time.time()
        if self._replace:
            try:
                now = max(now, read_manifest(self._storage).time + 0.001)
            except (FormatError, NotCommittedError):
                pass  # there is no checkpoint to replace, or a damaged one, which a restore passes over
        return now

    def _check_requests(self, reports: Sequence[RankReport]) -> None:
        """Raises a failure that a rank reports, and checks that the requests are equal and allowed."""
        location = self._storage.location
        for report in reports:
            if report.failed:
                raise ShardproofError.from_wire(msgspec.json.decode(report.failed))
        first = reports[0]
        for rank, report in enumerate(reports):
            if report.request_text() != first.request_text():
                raise StructureError(
                    f"{location}: the request of rank 0 is {first.request_text()}; that of rank {rank} is "
                    f"{report.request_text()}. All ranks must pass the same arguments; put values that "
                    "differ by rank into the state, in sp.PerRank",
                    ranks=[0, rank],
                )
        if self._request.check_place is not None:
            self._request.check_place()
        self._replace = first.overwrite or self._cache.unconfirmed.may_replace(self._storage)
        if not self._replace and self._storage.size(MANIFEST_NAME) is not None:
            raise AlreadyCommittedError(
                f"{location} has a committed checkpoint; save under another step, or pass overwrite=True "
                "to replace it (the old one stays valid until the new one is committed)",
                path=location,
            )

    @no_garbage_collection()
    def plan(self, posts: Sequence[bytes]) -> list[bytes]:
        """Proves that the boxes tile each tensor, makes the plan, and returns each rank's part of it."""
        self._cache.coordinator_plan = self._cache.base = None
        structures = [Structure.decode(post) for post in posts]
        plan = plan_writes(
            structures,
            chunk_bytes=self._limits.chunk_bytes,
            nodes=self._nodes,
            sample_bytes=self._limits.sample_bytes,
        )
        self._check_space(plan)
        digests = tuple(xxhash.xxh3_128_digest(post) for post in posts)
        self._cache.coordinator_plan = CoordinatorPlan(self._attempt.id, digests, plan)
        return [part.encode() for part in plan.rank_plans()]

    def _check_space(self, plan: WritePlan) -> None:
        """Raises if the files of a save without a base do not fit."""
        if not self._choice.folder:
            location, storage = self._storage.location, self._storage
            check_space(location, self._spaces, plan.bytes_by_rank(), lambda: free_space(storage))

    def send_base(self, posts: Sequence[bytes]) -> list[bytes]:
        """Looks the planned chunks up in the base; returns the digests of each rank's chunks."""
        assert self._cache.coordinator_plan is not None
        plan = self._cache.coordinator_plan.plan
        base = self._choice.look_up(plan)
        return [base.part(plan, rank).encode() for rank in range(len(posts))]

    @no_garbage_collection()
    def commit(self, posts: Sequence[bytes]) -> bytes:
        """Compares replicas and commits. An error of the coordinator becomes a `RankFailure` of rank 0."""
        attempt = self._attempt
        assert self._cache.coordinator_plan is not None
        reports = [msgspec.msgpack.decode(post, type=WriteReport) for post in posts]
        plan, base = self._cache.coordinator_plan.plan, self._choice.base
        slowest = max(range(len(reports)), key=lambda rank: reports[rank].seconds)
        self.facts = {"slowest_rank": slowest, "slowest_seconds": reports[slowest].seconds}
        try:
            diverged: tuple[Divergence, ...] = ()
            count = 0
            if self._request.check_replicas:
                turn = self._turn() if self._request.check_replicas == "sample" else None
                diverged, count = compare_replicas(plan, turn, [report.replicas for report in reports])
            manifest, placed = commit(
                self._storage, plan, attempt, reports, overwrite=self._replace, base=base
            )
        except (AlreadyCommittedError, StructureError):
            raise
        except Exception as error:
            raise self._commit_failure(error) from error
        self._cache.unconfirmed.confirm(self._storage)
        self._complete()
        warn_of_orders(self._storage.location, reports, self._cache.reordered)
        self._cache.base = CachedBase(attempt.id, placed) if self._request.base is not None else None
        if self._request.check_replicas == "sample":
            self._cache.turn = self._turn() + 1
        own = manifest.own_files
        size, reused = sum(record.size for record in own), plan.byte_count[placed.file >= len(own)].sum()
        return msgspec.msgpack.encode(
            SaveResult(
                self._storage.location,
                attempt.step,
                attempt.id,
                len(manifest.tensors),
                size,
                int(reused),
                diverged=diverged,
                diverged_count=count,
            )
        )

    def _complete(self) -> None:
        """Calls `on_commit` of the request. Its error reaches all ranks; the checkpoint stays committed."""
        try:
            if self._request.on_commit is not None:
                self._request.on_commit()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise RankFailure(
                f"{self._storage.location}: committed, but rank 0 failed in the work that follows the "
                f"commit: {cause}",
                phase="commit",
                causes={"0": cause},
                committed=True,
            ) from error

    def _turn(self) -> int:
        """The number of this sample. The first is a hash of the step, so restarts compare other samples."""
        if self._cache.turn is None:
            self._cache.turn = xxhash.xxh32_intdigest(str(self._attempt.step).encode())
        return self._cache.turn

    def _commit_failure(self, error: Exception) -> RankFailure:
        """The error of a failed commit, which says whether the manifest is in place."""
        in_place = is_in_place(self._storage, self._attempt.id)
        if in_place is False and isinstance(error, StorageError):
            in_place = error.details.get("committed", False)
        if in_place is not False:
            self._cache.unconfirmed.add(self._storage, self._attempt.id)
        cause = f"{type(error).__name__}: {error}"
        return RankFailure(
            f"{self._storage.location}: {_OUTCOMES[in_place]}: rank 0 failed in phase 'commit': {cause}",
            phase="commit",
            causes={"0": cause},
            committed=in_place,
        )
