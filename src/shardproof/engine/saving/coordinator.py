"""The coordinator's side of the meetings of one save: agree, plan, commit.

Note "No false refusal": the coordinator checks before a save writes that its bytes fit into the file systems
of the ranks, and refuses a save only if it certainly fails. The check counts the bytes of the chunks and of
their second copies, and no headers, digests or objects. A save with a base is not checked, because unchanged
chunks are not written. A file system may free blocks some time after their file is removed, so the check
waits a few seconds for space before it refuses.
"""

from __future__ import annotations

import logging
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof._utils.contexts import no_garbage_collection
from shardproof._utils.humanize import gigabytes, listed
from shardproof.engine.format import MANIFEST_NAME, STEP_FOLDER, overwrite_attempt, read_manifest
from shardproof.engine.planning import Structure, WritePlan, plan_writes
from shardproof.engine.saving.cache import CoordinatorPlan, Limits, SaveCache
from shardproof.engine.saving.commit import PlaceChunks, commit, is_in_place, place_chunks, warn_of_orders
from shardproof.engine.saving.messages import Agreement, Attempt, RankReport, SaveResult, WriteReport
from shardproof.engine.saving.provenance import provenance
from shardproof.engine.saving.save_option import SaveOption
from shardproof.engine.saving.save_request import SaveRequest
from shardproof.engine.storage import FreeSpace, Storage
from shardproof.errors import (
    AlreadyCommittedError,
    FormatError,
    NoSpaceError,
    NotCommittedError,
    RankFailure,
    ShardproofError,
    StorageError,
    StructureError,
)

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

_log = logging.getLogger("shardproof")
_WAIT_SECONDS = 3.0
_POLL_SECONDS = 0.1
"""Of the check for space: how long it waits for freed blocks, and how often it looks."""


class Coordinator:
    """The coordinator's side of one save. Each method takes the posts of all ranks and returns the answer."""

    def __init__(
        self,
        storage: Storage,
        request: SaveRequest,
        options: Sequence[SaveOption],
        cache: SaveCache,
        limits: Limits,
    ) -> None:
        self._storage = storage
        self._request = request
        self._options = options
        self._cache = cache
        self._limits = limits
        self.facts: dict[str, float] = {}
        """For the commit event of this rank: the slowest rank, and its seconds."""
        self._attempt: Attempt
        self._replace = request.overwrite
        self._nodes: list[int] = []
        self._spaces: list[FreeSpace | None] = []

    def agree(self, reports: Sequence[RankReport]) -> Agreement:
        """Checks that the requests agree, names the attempt, and decides which caches the ranks use."""
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
        name, now = secrets.token_hex(8), self._time()
        self._cache.background_name = self._cache.background_name or name
        name = overwrite_attempt(name) if self._request.record_overwrite else name
        attempt = Attempt(name, now, reports[0].step, len(reports), metadata)
        answers: dict[str, Any] = {}
        for option in self._options:
            posts_of_option = [report.options[option.name].post for report in reports]
            attempt, answers[option.name] = option.decide(attempt, posts_of_option, reuse_plan)
        self._attempt = attempt
        if cached is not None and reuse_plan:
            self._check_space(cached.plan)
        return Agreement(attempt, reuse_plan, self._cache.background_name, answers)

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
        self._cache.coordinator_plan = None
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
        """Raises if the files of a full save do not fit."""
        if self._attempt.is_full:
            needed = plan.bytes_by_rank()
            check_space(self._storage.location, self._spaces, needed, self._storage.free_space)

    @no_garbage_collection()
    def commit(self, reports: Sequence[WriteReport]) -> SaveResult:
        """Commits what the ranks wrote. An error of the coordinator becomes a `RankFailure` of rank 0."""
        attempt, options = self._attempt, self._options
        assert self._cache.coordinator_plan is not None
        plan = self._cache.coordinator_plan.plan
        place: PlaceChunks = place_chunks
        slowest = max(range(len(reports)), key=lambda rank: reports[rank].seconds)
        self.facts = {"slowest_rank": slowest, "slowest_seconds": reports[slowest].seconds}
        origin: dict[str, Any] = {}
        if self._cache.records_provenance:
            origin = provenance(len(set(self._nodes)), self._cache.meshes)
        try:
            for option in options:
                option.check(plan, [report.options[option.name] for report in reports])
                place = option.placer(place)
            done = commit(
                self._storage,
                plan,
                attempt,
                reports,
                overwrite=self._replace,
                place=place,
                provenance=origin,
            )
        except (AlreadyCommittedError, StructureError):
            raise
        except Exception as error:
            raise self._commit_failure(error) from error
        self._cache.unconfirmed.confirm(self._storage)
        self._complete()
        warn_of_orders(self._storage.location, reports, self._cache.reordered)
        own = done.manifest.own_files
        size, reused = sum(record.size for record in own), plan.byte_count[done.placement.file >= len(own)]
        result = SaveResult(
            self._storage.location,
            attempt.step,
            attempt.id,
            len(done.manifest.tensors),
            size,
            int(reused.sum()),
        )
        for option in options:
            result = option.complete(result, done)
        return result

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


def check_space(
    location: str,
    spaces: Sequence[FreeSpace | None],
    needed: NDArray[np.int64],
    measure: Callable[[], FreeSpace | None],
) -> None:
    """Checks the sum of the bytes on each file system (note "No false refusal").

    Logs a warning if the bytes may not fit.

    Args:
        location: location of the save, for messages.
        spaces: the space that each rank sees; None: not known.
        needed: (ranks,) bytes that each rank is certain to write.
        measure: measures the space of rank 0 again.

    Raises:
        NoSpaceError: the bytes do not fit.
    """
    by_system: dict[int, list[int]] = {}
    for rank, space in enumerate(spaces):
        if space is not None and needed[rank] > 0:
            for system in (space.file_system, space.copies_on):
                if system is not None:
                    by_system.setdefault(system, []).append(rank)
    for system, ranks in by_system.items():
        total = int(needed[ranks].sum())
        seen = [space for space in spaces if space is not None and space.file_system == system]
        if not seen:
            continue
        free = max(space.free for space in seen)
        bound = max((space.upper_bound for space in seen if space.upper_bound is not None), default=None)
        if bound is not None and total > bound:
            if spaces[0] is None or spaces[0].file_system != system or not _grows(total, measure):
                raise _no_space(location, sorted(set(ranks)), total, bound, seen[0].advice)
        elif total > free:
            _log.warning(
                "%s: the save writes %s to a file system with %s free, and may fail. If it does, %s",
                location,
                gigabytes(total),
                gigabytes(free),
                _advice(location, seen[0].advice),
            )


def _advice(location: str, more: str) -> str:
    """Says how to get more space for a save at `location`. `more` is the advice of its storage.

    It does not advise a smaller ``keep=``: retention removes steps only after a commit.
    """
    run, _, folder = location.rpartition("/")
    end = f", or {more}" if more else ""
    if STEP_FOLDER.fullmatch(folder) is None:
        return f"remove other files of this file system, or save to another one{end}"
    return (
        f"remove all steps but the newest with `shardproof prune {shlex.quote(run)} --keep 1 --yes` (keep= "
        "of the Checkpointer removes steps only after a commit, so a smaller one does not help now), or save "
        f"to another file system{end}"
    )


def _grows(total: int, measure: Callable[[], FreeSpace | None]) -> bool:
    """True as soon as `total` bytes may fit; False if they do not within `_WAIT_SECONDS`."""
    ends = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < ends:
        time.sleep(_POLL_SECONDS)
        now = measure()
        if now is None or now.upper_bound is None or total <= now.upper_bound:
            return True
    return False


def _no_space(location: str, ranks: Sequence[int], needed: int, free: int, advice: str) -> NoSpaceError:
    who = f"ranks {listed(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return NoSpaceError(
        f"{location}: the save needs {gigabytes(needed)} on the file system of {who}, and {gigabytes(free)} "
        f"is free there: {gigabytes(needed - free)} is missing. Nothing was written. To save again, "
        f"{_advice(location, advice)}",
        file=location,
        errno="ENOSPC",
        needed=needed,
        free=free,
        ranks=list(ranks),
    )
