"""The cache between saves: plans, digests, buffers and threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardproof.planning import CHUNK_BYTES, SAMPLE_BYTES, Slices, Structure, WritePlan
from shardproof.rendezvous import Rendezvous
from shardproof.saving.background import Workers
from shardproof.saving.failed_commit import Unconfirmed
from shardproof.saving.incremental import BaseDigests, CachedBase, FindBase
from shardproof.saving.prepared_shard import PreparedShard
from shardproof.saving.replica_check import CheckReplicas
from shardproof.saving.shard_writer import BufferPool
from shardproof.saving.staging import StagingPool
from shardproof.state import LastWalk

__all__ = [
    "CachedDigests",
    "CachedPlan",
    "CachedStructure",
    "CoordinatorPlan",
    "Limits",
    "SaveCache",
    "SaveRequest",
]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The caller's request, without the state. It must be the same on all ranks."""

    step: Any
    metadata: dict[str, Any] | None
    overwrite: bool
    base: FindBase | None = None
    """Finds the base of an incremental save, on the coordinator. None: all chunks are written."""
    check_replicas: CheckReplicas | None = None
    full_every: int | None = None
    """At least one of this many incremental saves in a row is written in full. None: no bound."""
    check_place: Callable[[], None] | None = None
    """Raises if the place cannot take a save. Called on the coordinator. None: any place can."""
    record_overwrite: bool = False
    """True if the name of the attempt records that the save may replace earlier saves of its step on other
    tiers."""
    on_commit: Callable[[], None] | None = None
    """Called on the coordinator after the commit and before any rank gets the result. None: nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, in bytes."""

    chunk_bytes: int = CHUNK_BYTES
    """Size of a stored chunk."""
    sample_bytes: int = SAMPLE_BYTES
    """Size of the replicas that a rank hashes in one save with ``check_replicas="sample"``."""


@dataclass(frozen=True, slots=True)
class CoordinatorPlan:
    """The plan of all ranks, on the coordinator."""

    id: str
    """The attempt that the plan was made in."""
    digests: tuple[bytes, ...]
    """Digests of the structures that the plan was made from, by rank."""
    plan: WritePlan


@dataclass(slots=True)
class CachedPlan:
    """One rank's part of a plan."""

    id: str
    """The attempt that the plan was made in."""
    shard: PreparedShard
    digest: bytes
    """Digest of the structure that the plan was made from."""
    slices: Slices | None = None
    """See `shared_slices`."""

    def shared_slices(self, structure: Structure) -> Slices:
        """Slices of the pieces that other ranks have too; made at the first replica check."""
        if self.slices is None:
            self.slices = self.shard.plan.shared.slices(structure)
        return self.slices


@dataclass(frozen=True, slots=True)
class CachedStructure:
    """The structure of one rank's state, valid until the state has another token."""

    token: object
    """See `Collected.token`."""
    structure: Structure
    digest: bytes


@dataclass(frozen=True, slots=True)
class CachedDigests:
    """Digests of this rank's chunks in an earlier attempt."""

    attempt: str
    digests: BaseDigests


@dataclass(slots=True)
class SaveCache:
    """The cache between the saves of one process."""

    writers: Workers
    """Threads that write buffers."""
    allocator: Workers
    """The thread that allocates staging memory."""
    staging: StagingPool
    unconfirmed: Unconfirmed
    """Coordinator: commits that are not known to be durable."""
    coordinator_plan: CoordinatorPlan | None = None
    plan: CachedPlan | None = None
    walk: LastWalk = field(default_factory=LastWalk)
    """Descriptions of this rank's tensors."""
    structure: CachedStructure | None = None
    succeeded: bool = False
    """True if the last save succeeded on this rank."""
    buffers: BufferPool | None = None
    """Absent during a save and after a failed one, which may have lost buffers."""
    base: CachedBase | None = None
    """Coordinator: the last step that was saved by `coordinator_plan`."""
    digests: CachedDigests | None = None
    """Digests of the chunks of `plan` in the last step."""
    background_name: str = ""
    """Coordinator: name of the rendezvous in the background."""
    background: tuple[str, Rendezvous] | None = None
    """That rendezvous and its name."""
    turn: int | None = None
    """Coordinator: number of the next sample of replicas."""
    reordered: set[str] = field(default_factory=set)
    """Coordinator: keys of objects for which it has warned that the ranks' dicts differ in their order."""

    def background_rendezvous(self, rendezvous: Rendezvous, name: str) -> Rendezvous:
        """The rendezvous for meetings in the background, separate from that of the saver.

        `name` is that of the first save, equal on all ranks.
        """
        if self.background is None or self.background[0] != name:
            self.background = name, rendezvous.new_rendezvous(name)
        self.background[1].deadline = rendezvous.deadline
        return self.background[1]
