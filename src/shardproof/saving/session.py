"""One save, from the live state to the committed manifest.

    collect (local) -> agree (meet) -> [plan (meet)] -> stage (local) | write (local) -> commit (meet)
    collect (local) | agree (meet) -> [plan (meet)] -> write (local) -> commit (meet)

What is left of the bar holds the caller, what is right of it goes on while training does. The caller's thread
collects and stages. All meetings are held by the thread of saves, which no interrupt reaches. The second line
is that of a rank whose structure is that of the plan it holds, and whose state changes in steps of optimizers
alone, up to little that is copied at once: whatever the ranks agree on, it has it. Each rank finds out for
itself which line is its own. To the others it makes no difference. After a save that failed on a rank, or
whose end it did not see, the first line is its own: who is told of a failure where all meet does not hear of
it again from a rank that was told in the background.

What the ranks write and commit they meet for at a rendezvous of its own, so that it cannot get in the way of
the caller's meetings. To agree, a rank of the second line takes its place in the order of these.

The sequence of meetings is fixed: every rank takes part in each, with its result or with its error, whatever
happened to it before. So one rank's failure is everyone's answer and nobody waits for a rank that gave up.
"""

from __future__ import annotations

import logging
import operator
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof import events
from shardproof._utils.gc_pause import no_garbage_collection
from shardproof.errors import (
    RankSilent,
    ShardproofError,
    StorageError,
    StructureError,
)
from shardproof.format import shard_name
from shardproof.planning import RankPlan, Structure
from shardproof.rendezvous import Meetings, Rendezvous, Reservation
from shardproof.saving.background import Progress, wait_while_moving
from shardproof.saving.buffers import BufferPool
from shardproof.saving.capture import Capture
from shardproof.saving.commit import Written
from shardproof.saving.coordinator import Coordinator
from shardproof.saving.incremental import BaseDigests, pack_rows
from shardproof.saving.kept import HeldPlan, Kept, KnownDigests, KnownStructure, Limits, Request
from shardproof.saving.messages import Agreed, Described
from shardproof.saving.prepare import Attempt, Entries, prepare_shard
from shardproof.saving.replicas import CheckReplicas, chosen_slices, hash_replicas
from shardproof.saving.result import SaveResult
from shardproof.saving.shard import write_changes, write_shard
from shardproof.saving.snapshot import Snapshot
from shardproof.saving.uncommitted import remove_uncommitted
from shardproof.state import Collected, Fence, collect, encode_plain
from shardproof.storage import Sink, Storage

__all__ = ["Session"]

_LATEST_STEP = 10**18
_SHOWN = 8
"""Divergences that a warning spells out."""
_log = logging.getLogger("shardproof")
_NOTHING = Capture((), (), {}, {}, None, is_complete=False)


class Session:
    """One save on one rank: `begin`; then `agree` and `finish`, perhaps on another thread; and at last `end`.

    Args:
        rendezvous: where the ranks meet before training goes on.
        storage: the place.
        request: see `Request`.
        kept: from earlier saves; changed.
        limits: see `Limits`.
        failed: of the save before, if the caller was not told yet.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        storage: Storage,
        request: Request,
        kept: Kept,
        limits: Limits,
        failed: ShardproofError | None = None,
    ) -> None:
        self.progress = Progress()
        self.background = ""
        """Name of the rendezvous for `finish`, the same on all ranks, once they have agreed."""
        self._begun = time.monotonic()
        self._rendezvous = rendezvous
        self._storage = storage
        self._request = request
        self._kept = kept
        self._failed = failed
        self._operation = f"save {storage.location}"
        self._capture = _NOTHING
        self._structure: Structure
        self._digest: bytes
        self._attempt: Attempt
        self._described: bytes | BaseException
        self._reservation: Reservation | None = None
        self.is_ahead = False
        """Whether the caller goes on before the ranks have agreed."""
        self._refusal: BaseException | None = None
        """Why the ranks do not agree."""
        self._agreed: Future[None] = Future()
        """Done when the ranks have agreed, or will not."""
        self._coordinator = Coordinator(storage, request, kept, limits)
        self._base: BaseDigests | None = None
        self._digests: NDArray[np.uint64] | None = None
        self._turn = 0
        self._replicas = b""
        self._snapshot: Snapshot | None = None
        self._fence: Fence | None = None
        self._problem: BaseException | None = None
        self._given_up: BaseException | None = None

    def begin(self, state: Any, *, guarded: bool, stage_all: bool = False) -> None:
        """Collects, and takes the place in the order of meetings in which `agree` meets the other ranks.

        Args:
            state: the state tree.
            guarded: whether memory will change before the save is over; `stage` and the fence see to it.
            stage_all: whether nothing is left to the fence.
        """
        was_well, self._kept.is_well = self._kept.is_well, False
        with self._phase("collect") as phase:
            self._described = _outcome(
                lambda: self._describe(state, guarded=guarded, stage_all=stage_all, was_well=was_well), phase
            )
        self.is_ahead = self._capture.is_complete and isinstance(self._described, bytes)
        self._reservation = self._rendezvous.reserve()

    def agree(self, *, keeps_turn: bool = False) -> None:
        """Agrees with the other ranks in the place that `begin` took, and plans if it must.

        Args:
            keeps_turn: whether no other meeting of this rank comes before that of `finish`.
        """
        assert self._reservation is not None
        self.progress.is_bounded = True  # so are meetings, and the wait for a turn
        try:
            self._reservation.__enter__()
            part = self._meet()
            if not keeps_turn:
                self._reservation.give_up()
        except BaseException as error:
            self._refusal = error
            raise
        finally:
            self.progress.is_bounded = False
        try:
            self._take(part)
        except BaseException as error:  # told to all ranks where they meet next
            self._problem = error

    def wait_until_agreed(self) -> None:
        """Returns when the ranks have agreed, or at once where that can be left to the background.

        Raises:
            BaseException: why they do not agree, or what ended this rank's work.
        """
        if self.is_ahead:
            return
        patience = 2 * self._rendezvous.deadline
        if not wait_while_moving(self._agreed, self.progress, patience):
            raise StorageError(
                f"{self._storage.location}: the ranks have not agreed for {patience:.0f} s: the save is "
                "given up. Look at the storage"
            )
        if self._refusal is not None:
            raise self._refusal
        if self.interrupt is not None:
            raise self.interrupt  # the other ranks are told in the background

    @property
    def is_refused(self) -> bool:
        """Whether the ranks do not agree, and the caller waits to be told why."""
        return self._refusal is not None and not self.is_ahead

    def let_caller_go(self) -> None:
        """The caller, or a step of an optimizer, need not wait any more for the ranks to agree."""
        if not self._agreed.done():
            self._agreed.set_result(None)

    def _meet(self) -> bytes | None:
        """The new part of the plan; None: the one that is held still holds."""
        meeting = Meetings(self._rendezvous, self._operation)
        with self._phase("agree"):
            answer = meeting.meet(
                "collect", partial(_told, self._described), self._unbounded(self._coordinator.agree)
            )
        agreed = msgspec.msgpack.decode(answer, type=Agreed)
        self._attempt, self._turn, part = agreed.attempt, agreed.turn, None
        self.background = agreed.background
        if not agreed.reuse:
            self._kept.held = self._kept.known = None
            with self._phase("plan"):
                part = meeting.meet("plan", self._structure.encode, self._coordinator.plan)
        if agreed.tell:
            with self._phase("plan"):
                self._base = BaseDigests.decode(
                    meeting.meet("base", lambda: b"", self._coordinator.tell_base)
                )
        elif agreed.attempt.base:
            assert self._kept.known is not None
            self._base = self._kept.known.digests
        return part

    @property
    def interrupt(self) -> BaseException | None:
        """What ended the work of `begin` or `hash_replicas` that is no error of theirs: Ctrl-C, an exit.

        It does not end the save: `finish` still has to run, to tell the other ranks.
        """
        problem = self._problem
        return None if isinstance(problem, Exception) else problem

    def hash_replicas(self, rendezvous: Rendezvous) -> None:
        """Hashes what other ranks hold too, as far as it is asked for. An error is the answer of `finish`.

        Args:
            rendezvous: of `finish`, where other ranks may wait for this one already.
        """
        if not self._request.check_replicas or self._problem is not None:
            return
        try:
            rendezvous.arrive()
            with self._phase("replicas") as phase:
                self._hash_replicas(rendezvous, phase)
        except BaseException as error:
            self._problem = error

    def stage(self) -> None:
        """Returns when all that may change at any time is copied. An error is the answer of `finish`."""
        if self._snapshot is not None and not self.is_ahead:
            with self._phase("stage") as phase:
                self._snapshot.secure(fenced=False)
                phase.progress(self._snapshot.staged_bytes, self._snapshot.staged_bytes)

    def give_up(self, error: BaseException) -> None:
        """What is not written yet never will be: `finish` fails with this error."""
        self._given_up = error
        if self._snapshot is not None:
            self._snapshot.give_up(error)

    def open_fence(self) -> None:
        """Returns when nothing of the state is read any more."""
        if self._fence is not None:
            self._fence.open()

    def finish(self, rendezvous: Rendezvous) -> SaveResult:
        """Writes and commits.

        Args:
            rendezvous: where the ranks meet for it.
        """
        meeting = Meetings(rendezvous, self._operation)
        try:
            with self._phase("write") as phase:
                written = _outcome(lambda: self._write(rendezvous, phase), phase)
            with self._phase("commit") as phase:
                self.progress.is_bounded = True
                try:
                    answer = meeting.meet(
                        "write", partial(_told, written), self._unbounded(self._coordinator.commit)
                    )
                finally:
                    self.progress.is_bounded = False
                done = msgspec.msgpack.decode(answer, type=SaveResult)
                phase.note(**self._coordinator.facts)
                if self._request.check_replicas:
                    phase.note(diverged=done.diverged_count)
        except RankSilent:
            raise  # note "Whose files" in `remove_uncommitted`
        except ShardproofError as error:
            if error.details.get("committed", False) is False:
                remove_uncommitted(self._storage, self._rendezvous.rank, self._attempt.id)
            raise
        self._warn(done)
        if self._digests is not None:
            self._kept.known = KnownDigests(self._attempt.id, BaseDigests.of(self._digests))
        return msgspec.structs.replace(done, seconds=time.monotonic() - self._begun)

    def succeed(self) -> None:
        """This rank has seen the save, and all that belongs to it, come to a good end."""
        self._kept.is_well = True

    def end(self) -> None:
        """Lets go of the state. Called whatever happened, once at least."""
        if self._reservation is not None:
            self._reservation.give_up()
        self.let_caller_go()
        if self._fence is not None:
            self._fence.close()
        if self._snapshot is not None:
            self._snapshot.end()
        self._capture = _NOTHING

    def _phase(self, name: str) -> events.Phase:
        step = self._request.step
        return events.phase(
            self._operation,
            name,
            rank=self._rendezvous.rank,
            world_size=self._rendezvous.world_size,
            step=step if isinstance(step, int) else None,
        )

    def _describe(self, state: Any, *, guarded: bool, stage_all: bool, was_well: bool) -> bytes:
        """Collects the state and takes note of it; what all ranks have to agree on."""
        step = _checked_step(self._request.step)
        metadata = msgspec.json.encode(encode_plain(self._request.metadata, "metadata"))
        check = _checked_mode(self._request.check_replicas)
        with no_garbage_collection():
            rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
            collected = collect(state, rank=rank, world_size=world_size, last=self._kept.walk)
            self._structure, self._digest = self._structure_of(collected)
            stepped = () if stage_all else collected.stepped
            self._capture = Capture.of(
                collected, stepped, guarded=guarded, complete=was_well and self._fits_held_plan()
            )
            if self._capture.watch:
                self._fence = Fence(stepped, self._secure, partial(self._phase, "fence"))
        held = self._kept.held.id if self._kept.held else ""
        failed = msgspec.json.encode(self._failed.to_wire()) if self._failed is not None else b""
        known = self._kept.known.attempt if self._kept.known else ""
        asked = self._request.overwrite, self._request.base is not None
        return msgspec.msgpack.encode(
            Described(
                self._digest,
                held,
                step,
                metadata,
                *asked,
                known,
                _node(),
                check,
                failed,
                self._request.full_every,
            )
        )

    def _structure_of(self, collected: Collected) -> tuple[Structure, bytes]:
        """The structure and its digest, worked out where they are not those of the save before."""
        known = self._kept.structure
        objects = tuple([entry.key for entry in collected.objects])
        if known is None or known.token is not collected.token or known.structure.objects != objects:
            structure = Structure.of(collected)
            known = self._kept.structure = KnownStructure(collected.token, structure, structure.digest())
        return known.structure, known.digest

    def _fits_held_plan(self) -> bool:
        """Whether this rank has nothing to say that keeps the ranks from going on with the plan it holds."""
        held, request = self._kept.held, self._request
        is_plain = request.base is None and not request.check_replicas
        return is_plain and held is not None and held.digest == self._digest

    def _take(self, part: bytes | None) -> None:
        """Takes a new `part` of the plan or the one held from before, and makes the snapshot."""
        with nullcontext() if self.is_ahead else no_garbage_collection():  # training's garbage is not ours
            if part is not None:
                prepared = prepare_shard(self._structure, RankPlan.decode(part))
                self._kept.held = HeldPlan(self._attempt.id, prepared, self._digest)
            assert self._kept.held is not None
            self._snapshot = Snapshot(
                self._capture,
                self._kept.held.shard.plan,
                self._kept.staging,
                self._kept.toucher,
                self._rendezvous.deadline,
                self.progress,
            )
        if self._given_up is not None:
            self._snapshot.give_up(self._given_up)

    def _secure(self) -> int:
        """Returns when no memory is read any more that training may write to; the bytes copied for that."""
        patience = 2 * self._rendezvous.deadline
        if not wait_while_moving(self._agreed, self.progress, patience):
            self.give_up(
                StorageError(
                    f"the ranks have not agreed for {patience:.0f} s while training waited for it: the save "
                    "is given up, and training goes on. Look at the storage"
                )
            )
        if self._snapshot is None:
            return 0
        before = self._snapshot.staged_bytes
        self._snapshot.secure(fenced=True)
        return self._snapshot.staged_bytes - before

    def _hash_replicas(self, rendezvous: Rendezvous, phase: events.Phase) -> None:
        held = self._kept.held
        assert held is not None
        shared = held.shard.plan.shared
        if held.slices is None:
            held.slices = shared.slices(self._structure)
        turn = None if self._request.check_replicas == "all" else self._turn
        rows = chosen_slices(held.slices, shared.turns, turn)
        total = int(held.slices.byte_count[rows].sum())

        def moved(done: int) -> None:
            self.progress.moved()
            rendezvous.progress(done, total)
            phase.progress(done, total)

        self._replicas = hash_replicas(self._capture.pieces, held.slices, rows, self._kept.staging, moved)

    def _write(self, rendezvous: Rendezvous, phase: events.Phase) -> bytes:
        """Writes this rank's shard file, if it has one."""
        if self._problem is not None:
            raise self._problem
        self._check_given_up()
        rendezvous.arrive()
        assert self._kept.held is not None and self._snapshot is not None
        begun, shard = time.monotonic(), self._kept.held.shard
        keys = tuple(self._capture.objects)
        digests = b"".join([xxhash.xxh3_128_digest(value) for value in self._capture.objects.values()])
        if self._request.base is not None:
            self._digests = np.zeros((0, 2), np.uint64)
        if not shard.is_written:
            return msgspec.msgpack.encode(Written(0, 0, "", b"", {}, keys, digests, replicas=self._replicas))
        owned = {key: self._capture.objects[key] for key in shard.plan.objects}
        total = shard.data_bytes

        def create() -> Sink:
            return self._storage.create(shard_name(rendezvous.rank, self._attempt.id))

        def header(entries: Entries, size: int) -> bytes:
            return shard.header(self._attempt, rendezvous.rank, owned, entries, size=size)

        def moved(done: int) -> None:
            self._check_given_up()
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
        self._check_given_up()
        self._kept.pool = pool
        self._snapshot.check_unchanged()
        if self._request.base is not None:
            self._digests = file.digests
        phase.note(staged=self._snapshot.staged_bytes, waited=self._snapshot.waited)
        of_file = file.size, file.data_start, file.digest, file.digests.tobytes()
        rows = b"" if file.written.all() else pack_rows(file.written)
        seconds = time.monotonic() - begun
        return msgspec.msgpack.encode(Written(*of_file, owned, keys, digests, rows, self._replicas, seconds))

    def _check_given_up(self) -> None:
        """What was read after the caller went on with an error may be torn."""
        if self._given_up is not None:
            raise self._given_up

    def _unbounded(self, decide: Callable[[Sequence[bytes]], bytes]) -> Callable[[Sequence[bytes]], bytes]:
        """Coordinator: the storage may hang in this decision, so whoever waits is to look whether it moves."""

        def decided(posts: Sequence[bytes]) -> bytes:
            self.progress.is_bounded = False
            try:
                return decide(posts)
            finally:
                self.progress.is_bounded = True

        return decided

    def _warn(self, done: SaveResult) -> None:
        """Says where replicas differ, on rank 0 and on the ranks at fault."""
        rank = self._rendezvous.rank
        concerns = [one for one in done.diverged if rank == 0 or rank in one.ranks]
        if concerns:
            said = "; ".join(map(str, concerns[:_SHOWN]))
            _log.warning(
                "%s: replicas differ in %d places: %s%s",
                self._storage.location,
                done.diverged_count,
                said,
                "; ..." if len(concerns) > _SHOWN else "",
            )


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


def _checked_mode(check: Any) -> str:
    if check not in (None, *get_args(CheckReplicas)):
        raise StructureError(f"check_replicas is 'sample', 'all' or None, not {check!r}")
    return check or ""


def _outcome(work: Callable[[], bytes], phase: events.Phase) -> bytes | BaseException:
    """What `work` gives or raises, to be told at the meeting."""
    try:
        return work()
    except BaseException as error:
        phase.fail(error)
        return error


def _told(outcome: bytes | BaseException) -> bytes:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
