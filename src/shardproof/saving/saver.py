"""A save, from the live state to the committed manifest.

    collect (local) -> agree (meet) -> [plan (meet)] -> write (local) -> commit (meet)

The sequence of meetings is fixed: every rank takes part in each, with its result or with its error, whatever
happened to it before. So one rank's failure is everyone's answer and nobody waits for a rank that gave up.
"""

from __future__ import annotations

import logging
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
    StorageError,
    StructureError,
)
from shardproof.format import MANIFEST_NAME, Manifest, index_name, read_manifest, shard_name
from shardproof.garbage import no_garbage_collection
from shardproof.planning import CHUNK_BYTES, RankPlan, Structure, WritePlan, plan_writes
from shardproof.rendezvous import Meetings, Rendezvous
from shardproof.saving.buffers import BufferPool
from shardproof.saving.commit import Written, commit
from shardproof.saving.prepare import Attempt, PreparedShard, prepare_shard
from shardproof.saving.shard import write_shard
from shardproof.saving.source import chunks_of
from shardproof.state import Collected, collect, encode_plain
from shardproof.storage import Storage

__all__ = ["Committed", "Saver"]

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


class _Agreed(msgspec.Struct, frozen=True, array_like=True):
    attempt: Attempt
    reuse: bool


@dataclass(frozen=True, slots=True)
class _LeaderPlan:
    id: str
    digests: tuple[bytes, ...]
    plan: WritePlan


@dataclass(frozen=True, slots=True)
class _HeldPlan:
    id: str
    shard: PreparedShard


class Saver:
    """Saves states to any place, and keeps the plan and the buffers from one save to the next.

    A plan is valid for one structure: it is used again only when every rank's structure digest equals the
    digest that the plan was made from, and every rank still holds its part of that plan.

    Args:
        rendezvous: where the ranks meet.
        chunk_bytes: upper bound of a stored chunk.
    """

    def __init__(self, rendezvous: Rendezvous, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._rendezvous = rendezvous
        self._chunk_bytes = chunk_bytes
        self._planned: _LeaderPlan | None = None
        self._held: _HeldPlan | None = None
        self._pool: BufferPool | None = None

    def save(
        self,
        storage: Storage,
        state: Any,
        *,
        step: int | None = None,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Committed:
        """Saves a state tree and returns once it is committed. Called by every rank.

        Raises:
            AlreadyCommittedError: a committed checkpoint is in the way and `overwrite` is False.
            StructureError, TilingError, PlainDataError: the state cannot be kept; nothing was written.
            RankFailure, RankSilent: a rank failed or fell silent; nothing was committed.
            StorageError: the storage failed.
        """
        begun = time.monotonic()
        meeting = Meetings(self._rendezvous, f"save {storage.location}")
        collected: Collected | None = None
        structure: Structure | None = None

        def describe() -> bytes:
            nonlocal collected, structure
            if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
                raise StructureError(f"a step is an int of 0 or more, got {step!r}")
            with no_garbage_collection():
                collected = collect(state, rank=self._rendezvous.rank, world_size=self._rendezvous.world_size)
                structure = Structure.of(collected)
            plain = msgspec.json.encode(encode_plain(metadata or {}, "metadata"))
            held = self._held.id if self._held else ""
            return msgspec.msgpack.encode((structure.digest(), held, step, plain))

        def agree(posts: list[bytes]) -> bytes:
            return self._agree(storage, posts, overwrite)

        agreed = msgspec.msgpack.decode(meeting.meet("collect", describe, agree), type=_Agreed)
        assert collected is not None and structure is not None
        part = None
        if not agreed.reuse or self._held is None:
            part = self._plan(meeting, structure, agreed.attempt)
        return self._write_and_commit(
            meeting, storage, collected, structure, part, agreed.attempt, begun, overwrite
        )

    def _agree(self, storage: Storage, posts: Sequence[bytes], overwrite: bool) -> bytes:
        """Leader: names the attempt, and says whether the plan of an earlier save holds."""
        if storage.size(MANIFEST_NAME) is not None and not overwrite:
            raise AlreadyCommittedError(
                f"{storage.location} holds a committed checkpoint; save under another step, or pass "
                f"overwrite=True to "
                "replace it (the old one stays valid until the new one is committed)",
                path=storage.location,
            )
        said = [msgspec.msgpack.decode(post, type=tuple[bytes, str, int | None, bytes]) for post in posts]
        for rank, (_, _, step, metadata) in enumerate(said):
            if (step, metadata) != said[0][2:]:
                raise StructureError(
                    f"{storage.location}: rank {rank} saves step {step} with metadata {metadata.decode()}, "
                    f"rank 0 step "
                    f"{said[0][2]} with {said[0][3].decode()}; all ranks must give the same. What differs "
                    f"by rank "
                    "belongs into the state, in sp.PerRank",
                    ranks=[0, rank],
                )
        digests = tuple(digest for digest, _, _, _ in said)
        planned = self._planned
        reuse = (
            planned is not None
            and digests == planned.digests
            and all(held == planned.id for _, held, _, _ in said)
        )
        attempt = Attempt(
            secrets.token_hex(8), time.time(), said[0][2], len(said), msgspec.json.decode(said[0][3])
        )
        return msgspec.msgpack.encode(_Agreed(attempt, reuse))

    def _plan(self, meeting: Meetings, structure: Structure, attempt: Attempt) -> bytes:
        """All ranks post their structures; the leader proves and plans; each rank gets its part."""

        def plan(posts: list[bytes]) -> list[bytes]:
            self._planned = None
            structures = [Structure.decode(post) for post in posts]
            planned = plan_writes(structures, chunk_bytes=self._chunk_bytes)
            digests = tuple(xxhash.xxh3_128_digest(post) for post in posts)
            self._planned = _LeaderPlan(attempt.id, digests, planned)
            return [part.encode() for part in planned.rank_plans()]

        self._held = None
        return meeting.meet("plan", structure.encode, plan)

    def _write_and_commit(
        self,
        meeting: Meetings,
        storage: Storage,
        collected: Collected,
        structure: Structure,
        part: bytes | None,
        attempt: Attempt,
        begun: float,
        overwrite: bool,
    ) -> Committed:
        """Writes what a new `part`, or the plan held since an earlier save, says; then all meet to commit."""

        def write() -> bytes:
            if part is not None:
                self._held = _HeldPlan(attempt.id, prepare_shard(structure, RankPlan.decode(part)))
            assert self._held is not None
            return msgspec.msgpack.encode(self._write(storage, collected, self._held.shard, attempt))

        def decide(posts: list[bytes]) -> bytes:
            written = [msgspec.msgpack.decode(post, type=Written) for post in posts]
            manifest = self._commit(storage, attempt, written, overwrite)
            size = sum(record.size for record in manifest.files)
            done = Committed(storage.location, attempt.step, attempt.id, len(manifest.tensors), size)
            return msgspec.msgpack.encode(done)

        try:
            answer = meeting.meet("write", write, decide)
        except RankSilent:
            # Note "Whose files": the leader may still commit. Prune removes the file if it does not.
            raise
        except BaseException:
            self._remove_uncommitted(storage, attempt)
            raise
        done = msgspec.msgpack.decode(answer, type=Committed)
        return msgspec.structs.replace(done, seconds=time.monotonic() - begun)

    def _commit(
        self, storage: Storage, attempt: Attempt, written: Sequence[Written], overwrite: bool
    ) -> Manifest:
        """Leader: commits; a fault of the leader's own is named as one."""
        assert self._planned is not None
        try:
            return commit(storage, self._planned.plan, attempt, written, overwrite=overwrite)
        except (AlreadyCommittedError, StructureError):
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            outcome = "nothing was committed"
            if _is_visible(storage, attempt):
                outcome = "committed, but perhaps not flushed to stable storage (save again to be sure)"
            raise RankFailure(
                f"{storage.location}: {outcome}: rank 0 failed in phase 'commit': {cause}",
                phase="commit",
                causes={"0": cause},
            ) from error

    def _write(
        self, storage: Storage, collected: Collected, shard: PreparedShard, attempt: Attempt
    ) -> Written:
        """Writes this rank's shard file, if it has one."""
        values = {entry.key: entry.value for entry in collected.objects}
        encoded = {key: msgspec.json.encode(value) for key, value in values.items()}
        keys = tuple(encoded)
        digests = b"".join([xxhash.xxh3_128_digest(value) for value in encoded.values()])
        if not shard.is_written:
            return Written(0, 0, "", b"", {}, keys, digests)
        owned = {key: encoded[key] for key in shard.plan.objects}
        header = shard.header(attempt, self._rendezvous.rank, owned)
        pieces = [piece for entry in collected.tensors for piece in entry.pieces]
        if self._pool is None:
            self._pool = BufferPool()
        total = len(header) + shard.data_bytes
        file = write_shard(
            storage.create(shard_name(self._rendezvous.rank, attempt.id)),
            header,
            chunks_of(pieces, shard.plan),
            shard.padding,
            self._pool,
            lambda done: self._rendezvous.progress(done, total),
        )
        return Written(file.size, file.data_start, file.digest, file.digests.tobytes(), owned, keys, digests)

    def _remove_uncommitted(self, storage: Storage, attempt: Attempt) -> None:
        """Removes this rank's files of a save that was refused.

        Note "Whose files": a file may be removed only when no manifest can name it, now or later. A refusal
        that came from the leader is such a case unless its publishing failed after the manifest was visible,
        so the manifest is looked at once more. A silent leader is not: it may be slow, and commit.
        """
        try:
            if read_manifest(storage).attempt == attempt.id:
                return
        except NotCommittedError:
            pass
        except (FormatError, StorageError) as error:
            _log.warning(
                "%s: files of the refused attempt %s stay for prune (%s)", storage.location, attempt.id, error
            )
            return
        try:
            if self._held is not None and self._held.shard.is_written:
                storage.delete(shard_name(self._rendezvous.rank, attempt.id))
            if self._rendezvous.rank == 0:
                storage.delete(index_name(attempt.id))
        except StorageError as error:
            _log.warning(
                "%s: files of the refused attempt %s stay for prune (%s)", storage.location, attempt.id, error
            )


def _is_visible(storage: Storage, attempt: Attempt) -> bool:
    """Whether the manifest of this attempt is in place, although publishing it raised an error."""
    try:
        return read_manifest(storage).attempt == attempt.id
    except (FormatError, NotCommittedError, StorageError):
        return False
