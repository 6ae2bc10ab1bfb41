"""One save, from the live state to the committed manifest.

    collect (local) -> agree (meet) -> [plan (meet)] -> stage (local) | write (local) -> commit (meet)

What is left of the bar is done by the caller's thread, what is right of it goes on while training does. Each
side meets at a rendezvous of its own, so that their meetings cannot get in each other's way.

The sequence of meetings is fixed: every rank takes part in each, with its result or with its error, whatever
happened to it before. So one rank's failure is everyone's answer and nobody waits for a rank that gave up.
"""

from __future__ import annotations

import logging
import operator
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof import events
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
from shardproof.planning import RankPlan, Structure, plan_writes
from shardproof.rendezvous import Meetings, Rendezvous
from shardproof.saving.background import Progress
from shardproof.saving.bases import BaseChoice, KnownBase
from shardproof.saving.buffers import BufferPool
from shardproof.saving.commit import Written, commit
from shardproof.saving.committed import Committed
from shardproof.saving.fence import Fence, fenced_pieces
from shardproof.saving.incremental import BaseDigests, pack_rows
from shardproof.saving.kept import HeldPlan, Kept, KnownDigests, LeaderPlan, Request
from shardproof.saving.messages import Agreed, Described
from shardproof.saving.prepare import Attempt, Entries, prepare_shard
from shardproof.saving.shard import write_changes, write_shard
from shardproof.saving.snapshot import Snapshot
from shardproof.state import Collected, collect, encode_plain
from shardproof.storage import Sink, Storage

__all__ = ["Session"]

_LATEST_STEP = 10**18
_log = logging.getLogger("shardproof")


class Session:
    """One save on one rank: `begin`, then `finish`, perhaps on another thread, and `end` whatever happened.

    Args:
        rendezvous: where the ranks meet before training goes on.
        storage: the place.
        request: see `Request`.
        kept: from earlier saves; changed.
        chunk_bytes: upper bound of a stored chunk.
        failed: of the save before, if the caller was not told yet.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        storage: Storage,
        request: Request,
        kept: Kept,
        chunk_bytes: int,
        failed: ShardproofError | None = None,
    ) -> None:
        self.progress = Progress()
        self.background = ""
        """Name of the rendezvous for `finish`, the same on all ranks."""
        self._begun = time.monotonic()
        self._rendezvous = rendezvous
        self._storage = storage
        self._request = request
        self._kept = kept
        self._chunk_bytes = chunk_bytes
        self._failed = failed
        self._operation = f"save {storage.location}"
        self._collected: Collected
        self._structure: Structure
        self._attempt: Attempt
        self._objects: dict[str, bytes] = {}
        self._nodes: list[int] = []
        self._choice: BaseChoice
        self._base: BaseDigests | None = None
        self._digests: NDArray[np.uint64] | None = None
        self._snapshot: Snapshot | None = None
        self._fence: Fence | None = None
        self._problem: Exception | None = None

    def begin(self, state: Any, *, guarded: bool, stage_all: bool = False) -> None:
        """Collects, agrees, plans if it must. Afterwards `finish` can run.

        Args:
            state: the state tree.
            guarded: whether memory will change before the save is over; `stage` and the fence see to it.
            stage_all: whether nothing is left to the fence.
        """
        meeting = Meetings(self._rendezvous, self._operation)
        with self._phase("collect") as phase:
            described = _attempted(lambda: self._describe(state), phase)
        with self._phase("agree"):
            answer = meeting.meet("collect", described, self._agree)
        agreed = msgspec.msgpack.decode(answer, type=Agreed)
        self._attempt, self.background, part = agreed.attempt, agreed.background, None
        if not agreed.reuse:
            self._kept.held = self._kept.known = None
            with self._phase("plan"):
                part = meeting.meet("plan", self._structure.encode, self._plan)
        if agreed.tell:
            with self._phase("plan"):
                self._base = BaseDigests.decode(meeting.meet("base", lambda: b"", self._tell_base))
        elif agreed.attempt.base:
            assert self._kept.known is not None
            self._base = self._kept.known.digests
        try:
            self._prepare(part, guarded, stage_all)
        except Exception as error:  # told to all ranks where they meet next
            self._problem = error

    def stage(self) -> None:
        """Returns when all that may change at any time is copied. An error is the answer of `finish`."""
        if self._snapshot is not None:
            with self._phase("stage") as phase:
                self._snapshot.secure(fenced=False)
                phase.progress(self._snapshot.staged_bytes, self._snapshot.staged_bytes)

    def open_fence(self) -> None:
        """Returns when nothing of the state is read any more."""
        if self._fence is not None:
            self._fence.open()

    def finish(self, rendezvous: Rendezvous) -> Committed:
        """Writes and commits.

        Args:
            rendezvous: where the ranks meet for it.
        """
        meeting = Meetings(rendezvous, self._operation)
        try:
            with self._phase("write") as phase:
                written = _attempted(lambda: self._write(rendezvous, phase), phase)
            with self._phase("commit"):
                self.progress.is_bounded = True
                try:
                    answer = meeting.meet("write", written, self._commit)
                finally:
                    self.progress.is_bounded = False
        except RankSilent:
            raise  # note "Whose files"
        except ShardproofError:
            self._remove_uncommitted()
            raise
        done = msgspec.msgpack.decode(answer, type=Committed)
        if self._digests is not None:
            self._kept.known = KnownDigests(self._attempt.id, BaseDigests.of(self._digests))
        return msgspec.structs.replace(done, seconds=time.monotonic() - self._begun)

    def end(self) -> None:
        """Lets go of the state. Called whatever happened, once at least."""
        if self._fence is not None:
            self._fence.close()
        if self._snapshot is not None:
            self._snapshot.end()
        self._collected = Collected((), ())

    def _phase(self, name: str) -> events.Phase:
        step = self._request.step
        return events.phase(
            self._operation,
            name,
            rank=self._rendezvous.rank,
            world_size=self._rendezvous.world_size,
            step=step if isinstance(step, int) else None,
        )

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
        failed = msgspec.json.encode(self._failed.to_wire()) if self._failed is not None else b""
        known = self._kept.known.attempt if self._kept.known else ""
        asked = self._request.overwrite, self._request.base is not None
        return msgspec.msgpack.encode(
            Described(self._structure.digest(), held, step, metadata, *asked, known, _node(), failed)
        )

    def _agree(self, posts: Sequence[bytes]) -> bytes:
        """Leader: names the attempt, and says whether the plan of an earlier save holds."""
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
        self._nodes = [one.node for one in said]
        metadata = msgspec.json.decode(said[0].metadata)
        choice = self._choice = BaseChoice(self._storage, self._request.base, self._kept.base)
        tell = bool(choice.folder) and not (reuse and choice.take_kept([one.known for one in said]))
        name, now = secrets.token_hex(8), time.time()
        attempt = Attempt(name, now, said[0].step, len(said), metadata, choice.folder)
        self._kept.background = self._kept.background or attempt.id
        return msgspec.msgpack.encode(Agreed(attempt, reuse, tell, self._kept.background))

    def _plan(self, posts: Sequence[bytes]) -> list[bytes]:
        """Leader: proves and plans; each rank gets its part."""
        self._kept.planned = self._kept.base = None
        structures = [Structure.decode(post) for post in posts]
        plan = plan_writes(structures, chunk_bytes=self._chunk_bytes, nodes=self._nodes)
        digests = tuple(xxhash.xxh3_128_digest(post) for post in posts)
        self._kept.planned = LeaderPlan(self._attempt.id, digests, plan)
        return [part.encode() for part in plan.rank_plans()]

    def _tell_base(self, posts: Sequence[bytes]) -> list[bytes]:
        """Leader: tells each rank what the base has of its chunks."""
        assert self._kept.planned is not None
        plan = self._kept.planned.plan
        base = self._choice.look_up(plan)
        return [base.part(plan, rank).encode() for rank in range(len(posts))]

    def _prepare(self, part: bytes | None, guarded: bool, stage_all: bool) -> None:
        """Takes a new `part` of the plan or the one held from before, and makes the snapshot."""
        if part is not None:
            prepared = prepare_shard(self._structure, RankPlan.decode(part))
            self._kept.held = HeldPlan(self._attempt.id, prepared)
        assert self._kept.held is not None
        self._objects = {entry.key: msgspec.json.encode(entry.value) for entry in self._collected.objects}
        pieces = [(piece, entry.key) for entry in self._collected.tensors for piece in entry.pieces]
        views = [piece for piece, _ in pieces]
        stepped = () if stage_all else self._collected.stepped
        fenced = fenced_pieces(views, stepped) if guarded else None
        self._snapshot = Snapshot(
            views,
            [key for _, key in pieces],
            self._kept.held.shard.plan,
            self._kept.staging,
            self._kept.toucher,
            fenced,
            self._rendezvous.deadline,
            self.progress,
        )
        if fenced is not None and any(fenced):
            self._fence = Fence(self._snapshot, stepped, partial(self._phase, "fence"))

    def _write(self, rendezvous: Rendezvous, phase: events.Phase) -> bytes:
        """Writes this rank's shard file, if it has one."""
        if self._problem is not None:
            raise self._problem
        assert self._kept.held is not None and self._snapshot is not None
        shard = self._kept.held.shard
        keys = tuple(self._objects)
        digests = b"".join([xxhash.xxh3_128_digest(value) for value in self._objects.values()])
        if self._request.base is not None:
            self._digests = np.zeros((0, 2), np.uint64)
        if not shard.is_written:
            return msgspec.msgpack.encode(Written(0, 0, "", b"", {}, keys, digests))
        owned = {key: self._objects[key] for key in shard.plan.objects}
        total = shard.data_bytes

        def create() -> Sink:
            return self._storage.create(shard_name(rendezvous.rank, self._attempt.id))

        def header(entries: Entries, size: int) -> bytes:
            return shard.header(self._attempt, rendezvous.rank, owned, entries, size=size)

        def moved(done: int) -> None:
            self.progress.moved()
            rendezvous.progress(done, total)
            phase.progress(done, total)

        pool, self._kept.pool = self._kept.pool or BufferPool(), None
        through = pool, self._kept.workers, moved
        if self._base is None:
            head = header(shard.entries, 0)
            total += len(head)
            file = write_shard(create(), head, self._snapshot, shard.entries.padding, *through)
        else:
            file = write_changes(create, shard, header, self._snapshot, self._base, *through)
        self._kept.pool = pool
        if self._request.base is not None:
            self._digests = file.digests
        phase.note(staged=self._snapshot.staged_bytes, waited=self._snapshot.waited)
        of_file = file.size, file.data_start, file.digest, file.digests.tobytes()
        rows = b"" if file.written.all() else pack_rows(file.written)
        return msgspec.msgpack.encode(Written(*of_file, owned, keys, digests, rows))

    def _commit(self, posts: Sequence[bytes]) -> bytes:
        """Leader: commits; a fault of the leader's own is named as one."""
        self.progress.is_bounded = False  # storage may hang
        attempt = self._attempt
        assert self._kept.planned is not None
        written = [msgspec.msgpack.decode(post, type=Written) for post in posts]
        plan, base = self._kept.planned.plan, self._choice.base
        try:
            manifest, placed = commit(
                self._storage, plan, attempt, written, overwrite=self._request.overwrite, base=base
            )
        except (AlreadyCommittedError, StructureError):
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            outcome = "nothing was committed"
            if self._is_visible():
                outcome = "committed, but perhaps not flushed to stable storage (save again to be sure)"
            raise RankFailure(
                f"{self._storage.location}: {outcome}: rank 0 failed in phase 'commit': {cause}",
                phase="commit",
                causes={"0": cause},
            ) from error
        self._kept.base = KnownBase(attempt.id, placed) if self._request.base is not None else None
        own = manifest.own_files
        size, reused = sum(record.size for record in own), plan.byte_count[placed.file >= len(own)].sum()
        counts = len(manifest.tensors), size, int(reused)
        return msgspec.msgpack.encode(Committed(self._storage.location, attempt.step, attempt.id, *counts))

    def _is_visible(self) -> bool:
        """Whether the manifest of this attempt is in place, although publishing it raised an error."""
        try:
            return read_manifest(self._storage).attempt == self._attempt.id
        except (FormatError, NotCommittedError, StorageError):
            return False

    def _remove_uncommitted(self) -> None:
        """Removes this rank's files of a save that was refused.

        Note "Whose files": a file may be removed only when no manifest can name it, now or later. A refusal
        that came from the leader is such a case unless its publishing failed after the manifest was visible,
        so the manifest is looked at once more. A silent leader is not: it may be slow, and commit. Nor is an
        interrupt on this rank, which says nothing of what the leader will do. Prune removes what stays.
        """
        attempt = self._attempt
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


def _node() -> int:
    return zlib.crc32(socket.gethostname().encode())


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


def _attempted(work: Callable[[], bytes], phase: events.Phase) -> Callable[[], bytes]:
    """What `work` gives or raises, to be given or raised at the meeting."""
    try:
        result = work()
    except BaseException as error:
        phase.fail(error)
        return partial(_raise, error)
    return lambda: result


def _raise(error: BaseException) -> bytes:
    raise error
