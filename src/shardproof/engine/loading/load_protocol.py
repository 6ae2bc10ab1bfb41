"""A load, from the manifest to the live state.

    open, bind, plan (local) -> agree (meet) -> read, verify (local) -> agree (meet) -> finish (local) ->
    agree (meet)

The last two steps run only if some rank has values other than tensors to fill.

With an object store, rank 0 reads manifest and index in advance, and the ranks receive them in a meeting.

A load changes nothing of the target before the first meeting. By then each rank has opened the checkpoint,
matched the target and planned its reads, so most errors leave the target as it was. With `read_once`, ranks
offer shared memory to the ranks of their node at that meeting. They meet again before they read, and assign
a reader to each range that several ranks want.

The read fills tensors. All other values (plain values, new optimizer state, objects) follow when every rank
has verified all its bytes. An error after the read began says that the target is partly overwritten.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import torch

from shardproof._utils.contexts import no_garbage_collection
from shardproof.engine import events
from shardproof.engine.foreign import NATIVE, Foreign
from shardproof.engine.format import Manifest, metadata_files
from shardproof.engine.loading.checkpoint import Checkpoint, NativeCheckpoint
from shardproof.engine.loading.destinations import Destination, DestinationWriter
from shardproof.engine.loading.matching import (
    DEFAULTS,
    AgreedKeys,
    LoadOptions,
    Matched,
    MatchReport,
    agree,
    match,
)
from shardproof.engine.loading.opening import open_storage
from shardproof.engine.loading.read_executor import reading_threads
from shardproof.engine.loading.read_once.agreement import UNREADABLE, Offer, ReadOnceExchange, usable_handles
from shardproof.engine.loading.read_once.group_collectives import can_exchange
from shardproof.engine.loading.read_once.group_transfer import PeerFailed
from shardproof.engine.loading.read_once.node_memory import Handle, NodeMemory
from shardproof.engine.planning import ReadPlan, selects
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous
from shardproof.engine.state import as_bytes, open_all
from shardproof.engine.storage import Storage, choose_cache
from shardproof.errors import KeyMismatchError, ShardproofError, StructureError
from shardproof.reentrance import guarded

_SHARED_METADATA_BYTES = 4 << 20
"""Bytes of manifest and index for all ranks, at most. The store serves larger ones faster."""
_log = logging.getLogger("shardproof")


class LoadReport(msgspec.Struct, frozen=True):
    """The result of a load on one rank."""

    location: str
    step: int | None
    attempt: str
    tensors: int
    """Number of destinations that this rank filled."""
    bytes: int
    """Bytes that this rank read. Of each chunk it reads the blocks of 256 KiB from the first needed byte to
    the last. It verifies all but the gaps between chunks that share a read."""
    seconds: float
    needed: int = 0
    """Bytes of this rank's destinations, in their stored dtypes."""
    received: int = 0
    """Bytes that other ranks read, verified and sent to this rank (only with `read_once`)."""
    read_once: bool = False
    """True if one rank read each range that several ranks wanted."""
    missing: tuple[str, ...] = ()
    """Keys of the target that the checkpoint lacks (only without `strict`)."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that no rank requested (with `strict` only those of optional parts)."""
    unchanged: tuple[str, ...] = ()
    """Keys of the target that the load did not change: per-rank values if fewer ranks saved, and optional
    parts that the checkpoint lacks or that declined its value."""
    dropped: tuple[str, ...] = ()
    """Per-rank values of the checkpoint that no rank loads, as ``<key>.@rank-<rank that saved>``: fewer ranks
    load than saved, or the target of a rank lacks the key. Equal on all ranks. A warning names them too."""

    @property
    def speed(self) -> float:
        """GB (10^9 bytes) per second that this rank read or received."""
        return (self.bytes + self.received) / max(self.seconds, 1e-9) / 1e9


@guarded("load")
def load_from(
    source: Storage | Foreign,
    state: Any,
    rendezvous: Rendezvous,
    options: LoadOptions = DEFAULTS,
    *,
    check: Callable[[Manifest], None] | None = None,
) -> LoadReport:
    """Fills a state tree from a checkpoint. Called by every rank.

    Args:
        source: the folder of the checkpoint, or another path that may hold one of a foreign format.
        state: the tree to fill.
        rendezvous: rendezvous of all ranks.
        options: see `shardproof.load`, which also lists the errors.
        check: raises FormatError if the manifest is not the expected one.
    """
    begun = time.monotonic()
    loader = _Loader(source, rendezvous, options)
    location = source.location
    meetings = MeetingSequence(rendezvous, loader.operation)
    try:
        with loader.phase("match"):
            loader.share_metadata(meetings)
            agreed, handles = meetings.exchange(
                "match",
                lambda: loader.match(state, check),
                lambda posts: (
                    agree(location, [post.report for post in posts], loader.stored),
                    usable_handles([post.offer for post in posts]),
                ),
                _MatchPost,
                tuple[AgreedKeys, tuple[Handle, ...]],
            )
            loader.share(meetings, handles)
        try:
            with loader.phase("read") as phase:
                more = meetings.exchange("read", lambda: loader.read(phase), _all_read, _ReadReport, bool)
            if more:
                with loader.phase("apply"):
                    check_applied = partial(_check_applied, location, agreed.only_adapted)
                    meetings.exchange("apply", loader.finish, check_applied, _HookReport, NoneType)
        except BaseException as error:
            raise _overwritten(error, location, loader.untouched(agreed.missing)) from error.__cause__
    finally:
        loader.close()
    if agreed.dropped and rendezvous.rank == 0:
        _log.warning(
            "%s: no rank loads %d per-rank values of the checkpoint: %s. "
            "sp.PerRank(fewer='gather') gives every rank the values of saved ranks that do not load",
            location,
            len(agreed.dropped),
            ", ".join(agreed.dropped[:10]) + (", ..." if len(agreed.dropped) > 10 else ""),
        )
    return loader.report(begun, agreed)


class _Loader:
    """One rank's part of a load."""

    def __init__(self, source: Storage | Foreign, rendezvous: Rendezvous, options: LoadOptions) -> None:
        self.operation = f"load {source.location}"
        self._source = source
        self._rendezvous = rendezvous
        self._options = options
        self._read = self._received = self._needed = 0
        self._opened = ExitStack()
        self._checkpoint: Checkpoint
        self._matched: Matched
        self._memory: NodeMemory | None = None
        self._exchange: ReadOnceExchange | None = None

    def close(self) -> None:
        """Closes the files and the memory that the load opened."""
        self._opened.close()

    def phase(self, name: str) -> events.Phase:
        """A phase of this load, for the listeners of events."""
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        return events.phase(self.operation, name, rank=rank, world_size=world_size)

    def share_metadata(self, meetings: MeetingSequence) -> None:
        """Rank 0 reads manifest and index of a remote storage, and sends small ones to all ranks.

        If rank 0 cannot read them, each rank reads them itself and reports its error in the next meeting. If
        the storage did not answer rank 0, the load fails, because the other ranks would wait as long again.
        """
        source = self._source
        if isinstance(source, Foreign) and source.file is not None:
            return
        storage = source.storage if isinstance(source, Foreign) else source
        if self._rendezvous.world_size == 1 or not storage.is_remote:
            return
        files: dict[str, bytes] = {}
        silence: ShardproofError | None = None
        if self._rendezvous.rank == 0:
            try:
                files = metadata_files(storage)
            except UNREADABLE as error:
                silence = error if error.details.get("unanswered") else None
        is_small = sum(map(len, files.values())) <= _SHARED_METADATA_BYTES

        def decide(posts: list[dict[str, bytes]]) -> dict[str, bytes]:
            if silence is not None:
                raise silence
            return posts[0]

        small, kind = files if is_small else {}, dict[str, bytes]
        answer = meetings.exchange("metadata", lambda: small, decide, kind, kind)
        files = files or answer
        if files:
            self._source = storage.with_contents(files)

    def match(self, state: Any, check: Callable[[Manifest], None] | None) -> _MatchPost | ShardproofError:
        """Opens the checkpoint and matches the target to it. Returns an error of the checkpoint."""
        options = self._options
        try:
            with no_garbage_collection():
                checkpoint = self._checkpoint = open_storage(
                    self._source,
                    format=NATIVE if check is not None else options.format,
                    trust_pickle=options.trust_pickle,
                    warn=self._rendezvous.rank == 0,
                )
                self._opened.callback(checkpoint.close)
                self._check_kind(checkpoint, check)
                rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
                ranks = getattr(self._rendezvous, "global_ranks", None)
                matched = self._matched = match(checkpoint, state, options, rank, world_size, ranks)
                if matched.plan is not None:
                    checkpoint.open_files(np.unique(matched.plan.chunk))
                    self._writer = DestinationWriter(
                        checkpoint.tensors, checkpoint.table, matched.plan, matched.destinations
                    )
            if matched.binding.refused:
                return matched.binding.refused[0]
            return _MatchPost(matched.report, self._offer())
        except UNREADABLE as error:
            return error

    def _check_kind(self, checkpoint: Checkpoint, check: Callable[[Manifest], None] | None) -> None:
        """Checks that the checkpoint is one that this load can read."""
        if isinstance(checkpoint, NativeCheckpoint):
            if check is not None:
                check(checkpoint.manifest)
        elif check is not None or self._options.read_once:
            needs = "restore" if check is not None else "read_once"
            raise StructureError(
                f"{checkpoint.location}: {needs} needs a checkpoint of shardproof's own format. `shardproof "
                "convert` makes one. sp.load without read_once reads this one"
            )

    def _offer(self) -> Offer | None:
        """Shared memory for the ranks of this node; None if no rank sends tensors to another."""
        options = self._options
        if options.read_once and self._rendezvous.world_size > 1 and can_exchange(options.group):
            self._memory = NodeMemory.made()
        if self._memory is None:
            return None
        self._opened.callback(self._memory.close)
        return Offer(socket.gethostname(), self._memory.handle)

    def share(self, meetings: MeetingSequence, handles: Sequence[Handle]) -> None:
        """With `read_once`: agrees which rank reads each range that several ranks want."""
        checkpoint, matched = self._checkpoint, self._matched
        assert matched.plan is not None
        self._needed = int(self._writer.part_bytes.sum())
        is_shared = self._options.read_once and self._rendezvous.world_size > 1
        if is_shared and isinstance(checkpoint, NativeCheckpoint):
            exchange = ReadOnceExchange(
                checkpoint, matched.plan, self._writer, self._rendezvous, self._options, self._memory, handles
            )
            self._opened.callback(exchange.close)
            exchange.agree(meetings)
            if exchange.is_active:
                self._exchange = exchange

    def read(self, phase: events.Phase) -> _ReadReport | ShardproofError:
        """Fills the destinations. Returns an error of the checkpoint."""
        checkpoint, matched = self._checkpoint, self._matched
        assert matched.plan is not None
        try:
            self._read_all(matched.plan, phase)
            check_shared_memory(checkpoint, matched.plan, matched.destinations, self._writer.overlapping)
            phase.note(read=self._read, received=self._received, needed=self._needed)
            return _ReadReport(bool(matched.binding.finish))
        except PeerFailed:
            return _ReadReport(False, left=True)
        except UNREADABLE as error:
            return error
        finally:
            matched.binding.increment_versions()

    def _read_all(self, plan: ReadPlan, phase: events.Phase) -> None:
        """Reads shared ranges first, because other ranks wait for them, then the ranges of only this rank."""
        exchange = self._exchange
        try:
            open_all()
            progress = _ByteProgress(self._rendezvous, phase)
            self._choose_cache(phase)
            rows = np.unique(plan.chunk)
            if exchange is not None:  # it moves these
                rows = np.setdiff1d(rows, exchange.shared_chunks())
            with no_garbage_collection():
                reads = self._checkpoint.reads(self._writer, rows)
            progress.total = reads.nbytes + (exchange.total_bytes if exchange is not None else 0)
        except BaseException:
            if exchange is not None:
                exchange.abandon()
            raise
        if exchange is not None:
            self._read, self._received = exchange.run(reading_threads(), progress)
        self._read += reads.run(threads=None, on_bytes=progress)

    def _choose_cache(self, phase: events.Phase) -> None:
        """Decides whether this rank reads past the page cache."""
        checkpoint = self._checkpoint
        if not isinstance(checkpoint, NativeCheckpoint):
            return
        local = next((storage for storage, _ in checkpoint.files if storage.path is not None), None)
        if local is not None:
            whole = int(checkpoint.table.byte_count.sum())
            choice = choose_cache(self._needed, most=whole, direct=local.direct)
            phase.note(cache=str(choice))
            if not choice.through:
                checkpoint.bypass_cache()

    def finish(self) -> _HookReport:
        """Sets plain values, attaches new optimizer state and gives objects their state."""
        binding = self._matched.binding
        for step in binding.finish:
            step()
        used = binding.adapted - binding.leftover
        return _HookReport(tuple(sorted(binding.leftover)), tuple(sorted(used)))

    def stored(self) -> Iterator[str]:
        """Selected keys of the checkpoint, under the names of the target."""
        catalogue = self._matched.binding.catalogue
        return filter(
            selects(self._options.include, self._options.exclude), (*catalogue.tensors, *catalogue.objects)
        )

    def untouched(self, missing: tuple[str, ...]) -> list[str]:
        """Keys of this rank's target that the checkpoint does not fill."""
        return sorted({*missing, *self._matched.binding.unchanged})

    def report(self, begun: float, agreed: AgreedKeys) -> LoadReport:
        """The report of this rank."""
        checkpoint = self._checkpoint
        return LoadReport(
            checkpoint.location,
            checkpoint.step,
            checkpoint.attempt,
            len(self._matched.destinations),
            self._read,
            time.monotonic() - begun,
            self._needed,
            self._received,
            self._exchange is not None,
            agreed.missing,
            agreed.unexpected,
            tuple(self._matched.binding.unchanged),
            agreed.dropped,
        )


class _ByteProgress:
    """Sums the bytes of several threads, and reports them to other ranks and to the listeners of events."""

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


class _MatchPost(msgspec.Struct, frozen=True, array_like=True):
    """The post of a rank when it has matched its target: its report, and shared memory for `read_once`."""

    report: MatchReport
    offer: Offer | None = None


class _ReadReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of a rank after its read."""

    more: bool
    """True if the rank has values other than tensors to fill."""
    left: bool = False
    """True if the rank left the exchange because another rank failed."""


def _all_read(reports: Sequence[_ReadReport]) -> bool:
    """Coordinator: True if a rank has more to fill.

    Raises:
        ShardproofError: a rank left the exchange, and no rank reported an error.
    """
    left = [rank for rank, report in enumerate(reports) if report.left]
    if left:
        raise ShardproofError(
            f"ranks {left} left the exchange because of a failure, but no rank reported one", ranks=left
        )
    return any(report.more for report in reports)


def _check_applied(location: str, only_adapted: Sequence[str], reports: Sequence[_HookReport]) -> None:
    """Coordinator: checks that each stored key belongs to a target, or that the hooks of a rank used it.

    `only_adapted` are the keys that belong to no target.

    Raises:
        KeyMismatchError: keys are left.
    """
    used = {key for report in reports for key in report.used}
    leftover = {key for report in reports for key in report.leftover}.intersection(only_adapted) - used
    if leftover:
        keys = sorted(leftover)
        raise KeyMismatchError(
            f"{location}: the checkpoint does not fit the state after the load hooks of its modules.\n"
            f"  unexpected ({len(keys)}): {', '.join(keys[:20])}\nstrict=False ignores these keys.",
            missing=[],
            unexpected=keys,
            mismatched=[],
        )


def _overwritten(error: BaseException, location: str, untouched: list[str]) -> BaseException:
    """The error, with the state of the target and the keys that the load did not overwrite."""
    text = f"The target is partly overwritten from {location}: load again, or another, before using it."
    if isinstance(error, ShardproofError):
        details = {**error.details, "overwritten": True, "untouched": untouched, "reason": error.message}
        return type(error)(f"{error.message}\n{text}", **details)
    error.add_note(text)
    return error


class _HookReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of one rank, after its load hooks have run."""

    leftover: tuple[str, ...] = ()
    """Keys of the checkpoint that the hooks got and did not use."""
    used: tuple[str, ...] = ()
    """Keys that they got and used."""


def check_shared_memory(
    checkpoint: Checkpoint, plan: ReadPlan, destinations: Sequence[Destination], rows: Sequence[int]
) -> None:
    """Reads the values of destinations that share memory again, and compares them with the memory.

    A state may contain a tensor and a view of it. The checkpoint stores both, and the load fills both. If the
    stored values differ, the result depends on the order of the writes. Overlapping extents are rare, so a
    second read is cheaper than a comparison of strides.

    Raises:
        StructureError: the checkpoint has different values for the same memory.
    """
    if not rows:
        return
    place = {row: at for at, row in enumerate(rows)}
    part = plan.take(np.isin(plan.requested, rows))
    again = [
        Destination.of(there.key, there.dtype, torch.empty_like(there.view))
        for there in (destinations[row] for row in rows)
    ]
    wanted = np.array([place[row] for row in part.requested.tolist()], np.int64)
    checkpoint.fill(replace(part, requested=wanted), again)
    for row, copy in zip(rows, again, strict=True):
        if not torch.equal(as_bytes(destinations[row].view), as_bytes(copy.view)):
            raise StructureError(
                f"{copy.key!r} shares memory with another key of the target, and the checkpoint has "
                "different values for the two: exclude one of them, or give each key its own memory",
                key=copy.key,
            )
