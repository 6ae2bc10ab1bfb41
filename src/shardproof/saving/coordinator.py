"""What the coordinator does at the meetings of one save: agree, plan, tell of the base, commit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
import xxhash

from shardproof._utils.gc_pause import no_garbage_collection
from shardproof.errors import AlreadyCommittedError, RankFailure, ShardproofError, StructureError
from shardproof.format import MANIFEST_NAME, chain_attempt
from shardproof.planning import Structure, plan_writes
from shardproof.saving.bases import BaseChoice, KnownBase
from shardproof.saving.commit import Written, commit
from shardproof.saving.kept import CoordinatorPlan, Kept, Limits, Request
from shardproof.saving.messages import Agreed, Described
from shardproof.saving.prepare import Attempt
from shardproof.saving.replicas import compare_replicas
from shardproof.saving.result import Divergence, SaveResult
from shardproof.saving.unconfirmed import is_in_place
from shardproof.storage import Storage

__all__ = ["Coordinator"]

_OUTCOMES = {
    False: "nothing was committed",
    True: (
        "committed, but not known to be durable (readers see it, its files stay, and a crash of the machine "
        "may undo it; save again with overwrite=True once the storage works)"
    ),
    None: (
        "whether it was committed is not known, for the storage cannot be read (its files stay; "
        "`shardproof ls` tells once the storage works; save again with overwrite=True then)"
    ),
}
"""By whether the manifest is in place; None: not known."""


class Coordinator:
    """The coordinator's side of one save: each method takes what all ranks posted, and gives the answer.

    Args:
        storage: the place.
        request: see `Request`.
        kept: from earlier saves; changed.
        limits: see `Limits`.
    """

    def __init__(self, storage: Storage, request: Request, kept: Kept, limits: Limits) -> None:
        self._storage = storage
        self._request = request
        self._kept = kept
        self._limits = limits
        self.facts: dict[str, float] = {}
        """For whoever watches the commit on this rank: the last rank to finish writing, and its seconds."""
        self._attempt: Attempt
        self._replace = request.overwrite
        self._nodes: list[int] = []
        self._choice: BaseChoice

    def agree(self, posts: Sequence[bytes]) -> bytes:
        """Names the attempt, and says whether the plan of an earlier save holds."""
        location = self._storage.location
        said = [msgspec.msgpack.decode(post, type=Described) for post in posts]
        for other in said:
            if other.failed:
                raise ShardproofError.from_wire(msgspec.json.decode(other.failed))
        for rank, other in enumerate(said):
            if other.asked() != said[0].asked():
                raise StructureError(
                    f"{location}: rank 0 was asked for {said[0].asked()}; rank {rank} for {other.asked()}. "
                    "All ranks must be asked for the same; what differs by rank belongs into the state, in "
                    "sp.PerRank",
                    ranks=[0, rank],
                )
        self._replace = said[0].overwrite or self._kept.unconfirmed.may_replace(self._storage)
        if not self._replace and self._storage.size(MANIFEST_NAME) is not None:
            raise AlreadyCommittedError(
                f"{location} holds a committed checkpoint; save under another step, or pass overwrite=True "
                "to replace it (the old one stays valid until the new one is committed)",
                path=location,
            )
        planned = self._kept.planned
        reuse = (
            planned is not None
            and tuple(one.digest for one in said) == planned.digests
            and all(one.held == planned.id for one in said)
        )
        self._nodes = [one.node for one in said]
        metadata = msgspec.json.decode(said[0].metadata)
        choice = BaseChoice(self._storage, self._request.base, self._kept.base if reuse else None)
        is_known = choice.take_kept([one.known for one in said])
        choice.bound_chain(self._request.full_every)
        tell, self._choice = bool(choice.folder) and not is_known, choice
        name, now = secrets.token_hex(8), time.time()
        attempt = chain_attempt(name, choice.length) if choice.folder else name
        self._attempt = Attempt(attempt, now, said[0].step, len(said), metadata, choice.folder)
        self._kept.background = self._kept.background or name
        turn = self._turn() if self._request.check_replicas else 0
        return msgspec.msgpack.encode(Agreed(self._attempt, reuse, tell, self._kept.background, turn))

    @no_garbage_collection()
    def plan(self, posts: Sequence[bytes]) -> list[bytes]:
        """Proves and plans; each rank gets its part."""
        self._kept.planned = self._kept.base = None
        structures = [Structure.decode(post) for post in posts]
        plan = plan_writes(
            structures,
            chunk_bytes=self._limits.chunk_bytes,
            nodes=self._nodes,
            sample_bytes=self._limits.sample_bytes,
        )
        digests = tuple(xxhash.xxh3_128_digest(post) for post in posts)
        self._kept.planned = CoordinatorPlan(self._attempt.id, digests, plan)
        return [part.encode() for part in plan.rank_plans()]

    def tell_base(self, posts: Sequence[bytes]) -> list[bytes]:
        """Tells each rank what the base has of its chunks."""
        assert self._kept.planned is not None
        plan = self._kept.planned.plan
        base = self._choice.look_up(plan)
        return [base.part(plan, rank).encode() for rank in range(len(posts))]

    @no_garbage_collection()
    def commit(self, posts: Sequence[bytes]) -> bytes:
        """Commits; a fault of the coordinator's own is named as one."""
        attempt = self._attempt
        assert self._kept.planned is not None
        written = [msgspec.msgpack.decode(post, type=Written) for post in posts]
        plan, base = self._kept.planned.plan, self._choice.base
        slowest = max(range(len(written)), key=lambda rank: written[rank].seconds)
        self.facts = {"slowest_rank": slowest, "slowest_seconds": written[slowest].seconds}
        try:
            diverged, count = self._compare(written)
            manifest, placed = commit(
                self._storage, plan, attempt, written, overwrite=self._replace, base=base
            )
        except (AlreadyCommittedError, StructureError):
            raise
        except Exception as error:
            raise self._commit_failure(error) from error
        self._kept.unconfirmed.confirm(self._storage)
        self._kept.base = KnownBase(attempt.id, placed) if self._request.base is not None else None
        if self._request.check_replicas == "sample":
            self._kept.turn = self._turn() + 1
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

    def _compare(self, written: Sequence[Written]) -> tuple[tuple[Divergence, ...], int]:
        if not self._request.check_replicas:
            return (), 0
        assert self._kept.planned is not None
        turn = self._turn() if self._request.check_replicas == "sample" else None
        return compare_replicas(self._kept.planned.plan, turn, [part.replicas for part in written])

    def _turn(self) -> int:
        """The number of this sample: from the step of the first on, so that restarts do not begin alike."""
        if self._kept.turn is None:
            self._kept.turn = xxhash.xxh32_intdigest(str(self._attempt.step).encode())
        return self._kept.turn

    def _commit_failure(self, error: Exception) -> RankFailure:
        """The error of a commit that failed, with what is known of its outcome."""
        in_place = is_in_place(self._storage, self._attempt.id)
        if in_place is not False:
            self._kept.unconfirmed.add(self._storage, self._attempt.id)
        cause = f"{type(error).__name__}: {error}"
        return RankFailure(
            f"{self._storage.location}: {_OUTCOMES[in_place]}: rank 0 failed in phase 'commit': {cause}",
            phase="commit",
            causes={"0": cause},
            committed=in_place,
        )
