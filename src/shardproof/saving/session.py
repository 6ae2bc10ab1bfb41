"""One save, from the live state to the committed manifest.

    collect (local) -> agree (meet) -> [plan (meet)] -> write (local) -> commit (meet)

The sequence of meetings is fixed: every rank takes part in each, with its result or with its error, whatever
happened to it before. So one rank's failure is everyone's answer and nobody waits for a rank that gave up.
"""

from __future__ import annotations

import logging
import operator
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from shardproof.errors import (
    AlreadyCommittedError,
    FormatError,
    NotCommittedError,
    RankFailure,
    RankSilent,
    ShardproofError,
    StorageError,
    StructureError,
)
from shardproof.format import MANIFEST_NAME, Manifest, index_name, read_manifest, shard_name
from shardproof.garbage import no_garbage_collection
from shardproof.planning import RankPlan, Structure, WritePlan, plan_writes
from shardproof.rendezvous import Meetings, Rendezvous
from shardproof.saving.buffers import BufferPool
from shardproof.saving.commit import Written, commit
from shardproof.saving.prepare import Attempt, PreparedShard, prepare_shard
from shardproof.saving.shard import write_shard
from shardproof.saving.source import chunks_of
from shardproof.state import Collected, collect, encode_plain
from shardproof.storage import Storage

__all__ = ["Committed", "Kept", "Request", "Session"]

_LATEST_STEP = 10**18
_log = logging.getLogger("shardproof")


class Committed(msgspec.Struct, frozen=True):
    """A checkpoint that is durable and whole."""

    location: str
    step: int | None
    attempt: str
    tensors: int
    bytes: int
    """Size of all shard files."""
    seconds: float = 0.0
    """From the call to the commit, on this rank."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller asks for, beside the state. All ranks must ask for the same."""

    step: Any
    metadata: dict[str, Any]
    overwrite: bool


@dataclass(frozen=True, slots=True)
class _LeaderPlan:
    id: str
    digests: tuple[bytes, ...]
    plan: WritePlan


@dataclass(frozen=True, slots=True)
class _HeldPlan:
    id: str
    shard: PreparedShard


@dataclass(slots=True)
class Kept:
    """What one save leaves for the next."""

    planned: _LeaderPlan | None = None
    """Leader: the last plan, and the structure digests that it is valid for."""
    held: _HeldPlan | None = None
    """This rank's part of a plan."""
    pool: BufferPool | None = None
    """Buffers, given back by a save that got through: a failed one may have lost some of them."""


class _Described(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of its state and of what it was asked for."""

    digest: bytes
    held: str
    step: int | None
    metadata: bytes
    overwrite: bool

    def asked(self) -> str:
        """What was asked for, in words."""
        return f"step {self.step}, overwrite={self.overwrite}, metadata {self.metadata.decode()}"


class _Agreed(msgspec.Struct, frozen=True, array_like=True):
    attempt: Attempt
    reuse: bool


class Session:
    """One save on one rank.

    Args:
        rendezvous: where the ranks meet.
        storage: the place.
        request: see `Request`.
        kept: from earlier saves; changed.
        chunk_bytes: upper bound of a stored chunk.
    """

    def __init__(
        self, rendezvous: Rendezvous, storage: Storage, request: Request, kept: Kept, chunk_bytes: int
    ) -> None:
        self._rendezvous = rendezvous
        self._storage = storage
        self._request = request
        self._kept = kept
        self._chunk_bytes = chunk_bytes
        self._meeting = Meetings(rendezvous, f"save {storage.location}")
        self._collected: Collected
        self._structure: Structure

    def run(self, state: Any) -> Committed:
        """Collects, agrees, plans if it must, writes and commits. Errors as for `Saver.save`."""
        begun = time.monotonic()
        answer = self._meeting.meet("collect", lambda: self._describe(state), self._agree)
        agreed = msgspec.msgpack.decode(answer, type=_Agreed)
        attempt, part = agreed.attempt, None
        if not agreed.reuse:
            self._kept.held = None
            part = self._meeting.meet(
                "plan", self._structure.encode, lambda posts: self._plan(attempt, posts)
            )
        try:
            answer = self._meeting.meet(
                "write", lambda: self._write(attempt, part), lambda posts: self._commit(attempt, posts)
            )
        except RankSilent:
            raise  # note "Whose files"
        except ShardproofError:
            self._remove_uncommitted(attempt)
            raise
        done = msgspec.msgpack.decode(answer, type=Committed)
        return msgspec.structs.replace(done, seconds=time.monotonic() - begun)

    def _describe(self, state: Any) -> bytes:
        """Collects the state; what all ranks have to agree on."""
        step = _checked_step(self._request.step)
        with no_garbage_collection():
            self._collected = collect(
                state, rank=self._rendezvous.rank, world_size=self._rendezvous.world_size
            )
            self._structure = Structure.of(self._collected)
        metadata = msgspec.json.encode(encode_plain(self._request.metadata, "metadata"))
        held = self._kept.held.id if self._kept.held else ""
        return msgspec.msgpack.encode(
            _Described(self._structure.digest(), held, step, metadata, self._request.overwrite)
        )

    def _agree(self, posts: Sequence[bytes]) -> bytes:
        """Leader: names the attempt, and says whether the plan of an earlier save holds."""
        location = self._storage.location
        said = [msgspec.msgpack.decode(post, type=_Described) for post in posts]
        for rank, other in enumerate(said):
            if other.asked() != said[0].asked():
                raise StructureError(
                    f"{location}: rank 0 was asked for {said[0].asked()}; rank {rank} for {other.asked()}. "
                    "All ranks must be asked for the same; what differs by rank belongs into the state, in "
                    "sp.PerRank",
                    ranks=[0, rank],
                )
        if not said[0].overwrite and self._storage.size(MANIFEST_NAME) is not None:
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
        metadata = msgspec.json.decode(said[0].metadata)
        attempt = Attempt(secrets.token_hex(8), time.time(), said[0].step, len(said), metadata)
        return msgspec.msgpack.encode(_Agreed(attempt, reuse))

    def _plan(self, attempt: Attempt, posts: Sequence[bytes]) -> list[bytes]:
        """Leader: proves and plans; each rank gets its part."""
        self._kept.planned = None
        plan = plan_writes([Structure.decode(post) for post in posts], chunk_bytes=self._chunk_bytes)
        digests = tuple(xxhash.xxh3_128_digest(post) for post in posts)
        self._kept.planned = _LeaderPlan(attempt.id, digests, plan)
        return [part.encode() for part in plan.rank_plans()]

    def _write(self, attempt: Attempt, part: bytes | None) -> bytes:
        """Writes this rank's shard file, if it has one, as a new `part` or the part held from before says."""
        if part is not None:
            self._kept.held = _HeldPlan(attempt.id, prepare_shard(self._structure, RankPlan.decode(part)))
        assert self._kept.held is not None
        shard = self._kept.held.shard
        encoded = {entry.key: msgspec.json.encode(entry.value) for entry in self._collected.objects}
        keys = tuple(encoded)
        digests = b"".join([xxhash.xxh3_128_digest(value) for value in encoded.values()])
        if not shard.is_written:
            return msgspec.msgpack.encode(Written(0, 0, "", b"", {}, keys, digests))
        owned = {key: encoded[key] for key in shard.plan.objects}
        header = shard.header(attempt, self._rendezvous.rank, owned)
        total = len(header) + shard.data_bytes
        pool, self._kept.pool = self._kept.pool or BufferPool(), None
        file = write_shard(
            self._storage.create(shard_name(self._rendezvous.rank, attempt.id)),
            header,
            chunks_of([piece for entry in self._collected.tensors for piece in entry.pieces], shard.plan),
            shard.padding,
            pool,
            lambda done: self._rendezvous.progress(done, total),
        )
        self._kept.pool = pool
        return msgspec.msgpack.encode(
            Written(file.size, file.data_start, file.digest, file.digests.tobytes(), owned, keys, digests)
        )

    def _commit(self, attempt: Attempt, posts: Sequence[bytes]) -> bytes:
        """Leader: commits; a fault of the leader's own is named as one."""
        assert self._kept.planned is not None
        written = [msgspec.msgpack.decode(post, type=Written) for post in posts]
        try:
            manifest = commit(
                self._storage, self._kept.planned.plan, attempt, written, overwrite=self._request.overwrite
            )
        except (AlreadyCommittedError, StructureError):
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            outcome = "nothing was committed"
            if self._is_visible(attempt):
                outcome = "committed, but perhaps not flushed to stable storage (save again to be sure)"
            raise RankFailure(
                f"{self._storage.location}: {outcome}: rank 0 failed in phase 'commit': {cause}",
                phase="commit",
                causes={"0": cause},
            ) from error
        size = sum(record.size for record in manifest.files)
        done = Committed(self._storage.location, attempt.step, attempt.id, len(manifest.tensors), size)
        return msgspec.msgpack.encode(done)

    def _is_visible(self, attempt: Attempt) -> bool:
        """Whether the manifest of this attempt is in place, although publishing it raised an error."""
        try:
            return read_manifest(self._storage).attempt == attempt.id
        except (FormatError, NotCommittedError, StorageError):
            return False

    def _remove_uncommitted(self, attempt: Attempt) -> None:
        """Removes this rank's files of a save that was refused.

        Note "Whose files": a file may be removed only when no manifest can name it, now or later. A refusal
        that came from the leader is such a case unless its publishing failed after the manifest was visible,
        so the manifest is looked at once more. A silent leader is not: it may be slow, and commit. Nor is an
        interrupt on this rank, which says nothing of what the leader will do. Prune removes what stays.
        """
        names = [shard_name(self._rendezvous.rank, attempt.id)]
        if self._rendezvous.rank == 0:
            names.append(index_name(attempt.id))
        try:
            if self._manifest_attempt() != attempt.id:
                for name in names:
                    self._storage.delete(name)
        except (FormatError, StorageError) as error:
            _log.warning("%s: %s stay for prune (%s)", self._storage.location, ", ".join(names), error)

    def _manifest_attempt(self) -> str | None:
        """The attempt that is committed here."""
        try:
            manifest: Manifest = read_manifest(self._storage)
        except NotCommittedError:
            return None
        return manifest.attempt


def _checked_step(step: Any) -> int | None:
    if step is None:
        return None
    if (
        isinstance(step, bool)
        or not hasattr(step, "__index__")
        or not 0 <= operator.index(step) < _LATEST_STEP
    ):
        raise StructureError(f"a step is an int from 0 to 10**18 - 1, got {step!r}")
    return operator.index(step)
