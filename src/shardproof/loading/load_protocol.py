"""A load, from the manifest to the live state.

    open, bind, plan (local) -> agree (meet) -> read, verify (local) -> agree (meet) -> finish (local) ->
    agree (meet)

The last two only if some rank has more to fill than tensors.

Until the first meeting nothing of the target is touched: all that can be known is known by then, on all
ranks. Ranks that asked to read once offer memory there to those of their node (`offering`), and meet again
before they read, to share out what several of them want.
Tensors are filled between agreeing to read and having read; everything else (plain values, new optimizer
state, objects) after that, when every byte on every rank is verified. An error after the reading began says
that the target is partly overwritten.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof import events
from shardproof._utils.gc_pause import no_garbage_collection
from shardproof.errors import ShardproofError
from shardproof.format import Manifest
from shardproof.loading.checkpoint import Checkpoint
from shardproof.loading.chunk_reader import Chunks
from shardproof.loading.cold_reads import Cold, Sketch
from shardproof.loading.destinations import Placing
from shardproof.loading.matching import DEFAULTS, Asked, Matched, Options, from_rank, match
from shardproof.loading.read_executor import read_chunks
from shardproof.loading.read_once import offers
from shardproof.loading.read_once.agreement import UNREADABLE, Sharing
from shardproof.loading.read_once.group_collectives import can_exchange
from shardproof.loading.read_once.group_transfer import PeerFailed
from shardproof.loading.read_once.shared_memory import Handle, NodeMemory
from shardproof.loading.selection import selects
from shardproof.loading.shared_destinations import check_shared_memory
from shardproof.loading.threads import reading_threads
from shardproof.planning import ReadPlan
from shardproof.reentrance import guarded
from shardproof.rendezvous import MeetingSequence, Rendezvous
from shardproof.state import open_all
from shardproof.storage import Storage

__all__ = ["UNREADABLE", "LoadReport", "load_from"]

_log = logging.getLogger("shardproof")


class LoadReport(msgspec.Struct, frozen=True):
    """What a load did."""

    location: str
    step: int | None
    attempt: str
    tensors: int
    """Destinations filled on this rank."""
    bytes: int
    """Read on this rank, and verified but for what lies between the chunks of one read. Of a chunk the blocks
    of 256 KiB from the first needed byte to the last are read."""
    seconds: float
    needed: int = 0
    """Bytes that this rank's destinations take, as they are stored."""
    received: int = 0
    """Bytes that other ranks read, verified and handed on to this one (only with `read_once`)."""
    read_once: bool = False
    """Whether what several ranks wanted was read by one of them."""
    missing: tuple[str, ...] = ()
    """Keys of the target that the checkpoint does not have (only without `strict`)."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that no rank asked for (with `strict` only those of optional parts)."""
    kept: tuple[str, ...] = ()
    """What stays as it is: per-rank values, since fewer ranks saved, and parts that the checkpoint lacks, or
    that declined what it has."""
    dropped: tuple[str, ...] = ()
    """Per-rank values of the checkpoint that no rank takes, as ``<key>.@rank-<rank that saved>``: fewer ranks
    load than saved, or the target of a rank lacks them. The same on all ranks. A warning names them too."""

    @property
    def speed(self) -> float:
        """GB (10^9 bytes) a second that were read or received on this rank."""
        return (self.bytes + self.received) / max(self.seconds, 1e-9) / 1e9


@guarded("load")
def load_from(
    storage: Storage,
    state: Any,
    rendezvous: Rendezvous,
    options: Options = DEFAULTS,
    *,
    check: Callable[[Manifest], None] | None = None,
) -> LoadReport:
    """Fills a state tree from a checkpoint. Called by every rank.

    Args:
        storage: of the checkpoint.
        state: the tree to fill.
        rendezvous: where the ranks meet.
        options: see `shardproof.load`; so are the errors.
        check: raises FormatError where the manifest is not the one that was meant.
    """
    begun = time.monotonic()
    loader = _Loader(storage, rendezvous, options)
    meetings = MeetingSequence(rendezvous, loader.operation)
    try:
        with loader.phase("match"):
            agreed = msgspec.msgpack.decode(
                meetings.meet(
                    "match",
                    lambda: loader.match(state, check),
                    lambda posts: offers.answer(storage.location, posts, loader.stored),
                ),
                type=offers.Answer,
            )
            loader.cold = Cold.THROUGH_CACHE if agreed.reads_twice else Cold.PAST_CACHE
            loader.share(meetings, agreed.handles)
        try:
            with loader.phase("read") as phase:
                more = meetings.meet("read", lambda: loader.read(phase), _all_read)
            if more:
                with loader.phase("apply"):
                    meetings.meet("apply", loader.finish, lambda posts: b"")
        except BaseException as error:
            raise _overwritten(error, storage.location, loader.untouched(agreed.missing)) from error.__cause__
    finally:
        loader.close()
    if agreed.dropped and rendezvous.rank == 0:
        _log.warning(
            "%s: no rank takes %d values that ranks had saved as their own: %s. "
            "sp.PerRank(fewer='gather') gives those of ranks that do not load to the ranks that do",
            storage.location,
            len(agreed.dropped),
            ", ".join(agreed.dropped[:10]) + (", ..." if len(agreed.dropped) > 10 else ""),
        )
    return loader.report(begun, agreed)


class _Loader:
    """One rank's part of a load."""

    def __init__(self, storage: Storage, rendezvous: Rendezvous, options: Options) -> None:
        self.operation = f"load {storage.location}"
        self.cold = Cold.THROUGH_CACHE
        """How it reads what the page cache does not have."""
        self._storage = storage
        self._rendezvous = rendezvous
        self._options = options
        self._read = self._received = self._needed = 0
        self._opened: list[Callable[[], None]] = [storage.close]
        self._checkpoint: Checkpoint
        self._matched: Matched
        self._memory: NodeMemory | None = None
        self._sharing: Sharing | None = None

    def close(self) -> None:
        """Closes what reading opened."""
        for close in self._opened:
            close()

    def phase(self, name: str) -> events.Phase:
        """A phase of this load, for whoever listens."""
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        return events.phase(self.operation, name, rank=rank, world_size=world_size)

    def match(self, state: Any, check: Callable[[Manifest], None] | None) -> bytes:
        """Opens the checkpoint and matches; an error of the checkpoint is data, so that it keeps its type."""
        options = self._options
        try:
            with no_garbage_collection():
                checkpoint = self._checkpoint = Checkpoint(self._storage)
                self._opened = [checkpoint.close]
                if check is not None:
                    check(checkpoint.manifest)
                if self._rendezvous.rank == 0:
                    checkpoint.check_sizes(range(len(checkpoint.manifest.files)))
                matched = self._matched = match(
                    checkpoint, state, options, self._rendezvous.rank, self._rendezvous.world_size
                )
                if matched.plan is not None:
                    self._placing = Placing(
                        checkpoint.manifest, checkpoint.table, matched.plan, matched.destinations
                    )
            return offers.post(self._matched.asked, self._offer(), self._sketch())
        except UNREADABLE as error:
            return offers.post(Asked("", options.strict, options.read_once, error=error.to_wire()))

    def _offer(self) -> offers.Offer | None:
        """Memory to share with the ranks of this node, where tensors may be handed on."""
        options = self._options
        if options.read_once and self._rendezvous.world_size > 1 and can_exchange(options.group):
            self._memory = NodeMemory.made()
        if self._memory is None:
            return None
        self._opened.append(self._memory.close)
        return offers.Offer(socket.gethostname(), self._memory.handle)

    def _sketch(self) -> Sketch | None:
        """Samples of what this rank reads, where others of its node may read the same."""
        plan = self._matched.plan
        if plan is None or self._rendezvous.world_size == 1:
            return None
        checkpoint, rows = self._checkpoint, np.unique(plan.chunk)
        begin, end = checkpoint.blocks.covering(rows, self._placing.wanted(rows))
        return Sketch.of(rows, end - begin, checkpoint.table.byte_count[rows])

    def share(self, meetings: MeetingSequence, handles: Sequence[Handle]) -> None:
        """Agrees on who reads what several ranks want, where that was asked for."""
        checkpoint, matched = self._checkpoint, self._matched
        assert matched.plan is not None
        self._needed = int(self._placing.part_bytes.sum())
        if self._options.read_once and self._rendezvous.world_size > 1:
            sharing = Sharing(
                checkpoint,
                matched.plan,
                self._placing,
                self._rendezvous,
                self._options,
                self._memory,
                handles,
            )
            self._opened.append(sharing.close)
            sharing.agree(meetings)
            if sharing.happens:  # no two ranks read much of the same then
                self._sharing, self.cold = sharing, Cold.PAST_CACHE

    def read(self, phase: events.Phase) -> bytes:
        """Fills the destinations; an error of the checkpoint is data here too. A `_HasRead`, as bytes."""
        checkpoint, matched = self._checkpoint, self._matched
        assert matched.plan is not None
        said = _HasRead(bool(matched.binding.finish))
        try:
            self._read_all(matched.plan, phase)
            check_shared_memory(checkpoint, matched.plan, matched.destinations, self._placing.overlapping)
            phase.note(read=self._read, received=self._received, needed=self._needed)
        except PeerFailed:
            said = _HasRead(False, left=True)
        except UNREADABLE as error:
            said = _HasRead(False, error=error.to_wire())
        finally:
            matched.binding.say_changed()
        return msgspec.msgpack.encode(said)

    def _read_all(self, plan: ReadPlan, phase: events.Phase) -> None:
        """First what is handed on, since others wait for it, then what is this rank's alone."""
        sharing = self._sharing
        try:
            open_all()
            threads, moved = reading_threads(), _Moved(self._rendezvous, phase)
            chunks = self._own_chunks(np.unique(plan.chunk))
            moved.total = chunks.nbytes + (sharing.moved if sharing is not None else 0)
        except BaseException:
            if sharing is not None:
                sharing.abandon()
            raise
        if sharing is not None:
            self._read, self._received = sharing.hand_on(threads, moved)
        self._read += read_chunks(chunks, self._placing, threads=threads, moved=moved, cold=self.cold)

    def _own_chunks(self, rows: NDArray[np.int64]) -> Chunks:
        """Of the rows of the chunk table that this rank wants, what is not handed on."""
        if self._sharing is not None:
            rows = np.setdiff1d(rows, self._sharing.shared_chunks())
        checkpoint = self._checkpoint
        with no_garbage_collection():
            chunks = Chunks(checkpoint.files, checkpoint.manifest, checkpoint.table, rows)
            chunks.narrow(self._placing.wanted, checkpoint.blocks)
            return chunks

    def finish(self) -> bytes:
        """Sets plain values, attaches new optimizer state, hands objects their state."""
        for step in self._matched.binding.finish:
            step()
        return b""

    def stored(self) -> Iterator[str]:
        """Keys of the checkpoint that are selected, under the target's names."""
        catalogue = self._matched.catalogue
        return filter(
            selects(self._options.include, self._options.exclude), (*catalogue.tensors, *catalogue.objects)
        )

    def untouched(self, missing: tuple[str, ...]) -> list[str]:
        """Keys that nothing of this checkpoint goes into, on this rank."""
        return sorted({*missing, *self._matched.binding.kept})

    def report(self, begun: float, agreed: offers.Answer) -> LoadReport:
        """What was done on this rank."""
        manifest = self._checkpoint.manifest
        return LoadReport(
            self._storage.location,
            manifest.step,
            manifest.attempt,
            len(self._matched.destinations),
            self._read,
            time.monotonic() - begun,
            self._needed,
            self._received,
            self._sharing is not None,
            agreed.missing,
            agreed.unexpected,
            tuple(self._matched.binding.kept),
            agreed.dropped,
        )


class _Moved:
    """Adds up the bytes that threads move, for the other ranks and for whoever listens."""

    def __init__(self, rendezvous: Rendezvous, phase: events.Phase) -> None:
        self.total = 0
        self._done = 0
        self._rendezvous = rendezvous
        self._phase = phase
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            done = min(self._done, self.total)
        self._rendezvous.progress(done, self.total)
        self._phase.progress(done, self.total)


class _HasRead(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of its reading."""

    more: bool
    """Whether it has more to fill than tensors."""
    left: bool = False
    """Whether it left the exchange because another rank failed."""
    error: dict[str, Any] | None = None


def _all_read(posts: Sequence[bytes]) -> bytes:
    """Coordinator: whether a rank has more to fill; empty if none has.

    Raises:
        ShardproofError: that of the first rank that has one of its own.
    """
    said = [msgspec.msgpack.decode(post, type=_HasRead) for post in posts]
    for rank, one in enumerate(said):
        if one.error is not None:
            raise from_rank(rank, len(said), one.error)
    left = [rank for rank, one in enumerate(said) if one.left]
    if left:
        raise ShardproofError(
            f"ranks {left} left the exchange for a failure that no rank owned up to", ranks=left
        )
    return b"more" if any(one.more for one in said) else b""


def _overwritten(error: BaseException, location: str, untouched: list[str]) -> BaseException:
    """The error, saying what has become of the target, and which keys were not to be overwritten."""
    text = f"The target is partly overwritten from {location}: load again, or another, before using it."
    if isinstance(error, ShardproofError):
        details = {**error.details, "overwritten": True, "untouched": untouched}
        return type(error)(f"{error.message}\n{text}", **details)
    error.add_note(text)
    return error
