"""What the saves of one saver leave for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardproof.planning import CHUNK_BYTES, SAMPLE_BYTES, Slices, Structure, WritePlan
from shardproof.saving.background import Workers
from shardproof.saving.bases import FindBase, KnownBase
from shardproof.saving.buffers import BufferPool
from shardproof.saving.incremental import BaseDigests
from shardproof.saving.prepare import PreparedShard
from shardproof.saving.replicas import CheckReplicas
from shardproof.saving.staging import StagingPool
from shardproof.saving.unconfirmed import Unconfirmed
from shardproof.state import LastWalk

__all__ = ["CoordinatorPlan", "HeldPlan", "Kept", "KnownDigests", "KnownStructure", "Limits", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller asks for, beside the state. All ranks must ask for the same."""

    step: Any
    metadata: dict[str, Any]
    overwrite: bool
    base: FindBase | None = None
    """For the coordinator: finds the step whose chunks need not be written again. None: all are written."""
    check_replicas: CheckReplicas | None = None
    full_every: int | None = None
    """Of so many saves in a row with a `base`, at least one is written in full. None: no bound."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, bytes."""

    chunk_bytes: int = CHUNK_BYTES
    """Of a stored chunk."""
    sample_bytes: int = SAMPLE_BYTES
    """Of replicas that a rank compares in one save, where not all are."""


@dataclass(frozen=True, slots=True)
class CoordinatorPlan:
    """A plan of all ranks, at the coordinator."""

    id: str
    digests: tuple[bytes, ...]
    plan: WritePlan


@dataclass(slots=True)
class HeldPlan:
    """One rank's part of a plan."""

    id: str
    shard: PreparedShard
    digest: bytes
    """Of the structure that it was made from."""
    slices: Slices | None = None
    """Of the pieces that other ranks hold too, once they are asked for."""


@dataclass(frozen=True, slots=True)
class KnownStructure:
    """The structure of one rank's state, for as long as it does not change."""

    token: object
    """See `Collected.token`."""
    structure: Structure
    digest: bytes


@dataclass(frozen=True, slots=True)
class KnownDigests:
    """Digests of this rank's chunks in an earlier attempt."""

    attempt: str
    digests: BaseDigests


@dataclass(slots=True)
class Kept:
    """What one save leaves for the next."""

    workers: Workers
    """Threads that write buffers."""
    toucher: Workers
    """The thread on which staging memory is touched."""
    staging: StagingPool
    unconfirmed: Unconfirmed
    """Coordinator: commits that are not known to be durable."""
    planned: CoordinatorPlan | None = None
    """Coordinator: the last plan, and the structure digests that it is valid for."""
    held: HeldPlan | None = None
    """This rank's part of a plan."""
    walk: LastWalk = field(default_factory=LastWalk)
    """How this rank's tensors were described."""
    structure: KnownStructure | None = None
    """Of this rank's last state."""
    is_well: bool = False
    """Whether this rank saw the last save succeed."""
    pool: BufferPool | None = None
    """Buffers, given back by a save that got through: a failed one may have lost some of them."""
    base: KnownBase | None = None
    """Coordinator: the last step that was saved by `planned`."""
    known: KnownDigests | None = None
    """Digests that the chunks of `held` had in the last step."""
    background: str = ""
    """Coordinator: name of the rendezvous in the background."""
    turn: int | None = None
    """Coordinator: number of the next sample of replicas."""
