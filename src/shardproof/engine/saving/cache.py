"""The cache between saves: plans, buffers and threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardproof.engine.planning import CHUNK_BYTES, SAMPLE_BYTES, Structure, WritePlan
from shardproof.engine.rendezvous import Rendezvous
from shardproof.engine.saving.background import Workers
from shardproof.engine.saving.commit import Unconfirmed
from shardproof.engine.saving.shard_writer import BufferPool, PreparedShard
from shardproof.engine.saving.staging import StagingPool
from shardproof.engine.state import Collected, LastWalk


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


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """One rank's part of a plan."""

    id: str
    """The attempt that the plan was made in."""
    shard: PreparedShard
    digest: bytes
    """Digest of the structure that the plan was made from."""


@dataclass(frozen=True, slots=True)
class CachedStructure:
    """The structure of one rank's state, valid until the state has another token."""

    token: object
    """See `Collected.token`."""
    structure: Structure
    digest: bytes


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
    records_provenance: bool = True
    """Coordinator: True if manifests have the origin of the save."""
    coordinator_plan: CoordinatorPlan | None = None
    plan: CachedPlan | None = None
    walk: LastWalk = field(default_factory=LastWalk)
    """Descriptions of this rank's tensors."""
    structure: CachedStructure | None = None
    meshes: tuple[Any, ...] = ()
    """The device meshes of this rank's DTensors."""
    succeeded: bool = False
    """True if the last save succeeded on this rank."""
    buffers: BufferPool | None = None
    """Absent during a save and after a failed one, which may have lost buffers."""
    background_name: str = ""
    """Coordinator: name of the rendezvous in the background."""
    background: tuple[str, Rendezvous] | None = None
    """That rendezvous and its name."""
    reordered: set[str] = field(default_factory=set)
    """Coordinator: keys of objects for which it has warned that the ranks' dicts differ in their order."""

    def structure_of(self, collected: Collected) -> tuple[Structure, bytes]:
        """The structure of a state and its digest, from the cache if the structure has not changed."""
        cached, objects = self.structure, tuple([entry.key for entry in collected.objects])
        if cached is None or cached.token is not collected.token or cached.structure.objects != objects:
            structure = Structure.of(collected)
            cached = self.structure = CachedStructure(collected.token, structure, structure.digest())
        self.meshes = collected.meshes
        return cached.structure, cached.digest

    def background_rendezvous(self, rendezvous: Rendezvous, name: str) -> Rendezvous:
        """The rendezvous for meetings in the background, separate from that of the saver.

        `name` is that of the first save, equal on all ranks.
        """
        if self.background is None or self.background[0] != name:
            self.background = name, rendezvous.new_rendezvous(name)
        self.background[1].deadline = rendezvous.deadline
        return self.background[1]
