"""A load, from the manifest to the live state.

    open, bind, plan (local) -> agree (meet) -> read, verify (local) -> agree (meet) -> finish (local) ->
    agree (meet)

Until the first meeting nothing of the target is touched: all that can be known is known by then, on all
ranks.
Tensors are filled between the first and the second; everything else (plain values, new optimizer state,
objects)
after the second, when every byte on every rank is verified. An error after the first says that the target is
partly overwritten.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shardproof.errors import (
    CorruptChunkError,
    FormatError,
    NotCommittedError,
    ShardproofError,
    StorageError,
    TilingError,
)
from shardproof.format import Manifest
from shardproof.garbage import no_garbage_collection
from shardproof.loading.checkpoint import Checkpoint
from shardproof.loading.matching import DEFAULTS, Asked, Matched, Options, agree, from_rank, match
from shardproof.loading.place import read_planned
from shardproof.loading.shared import check_shared_memory
from shardproof.rendezvous import Meetings, Rendezvous
from shardproof.storage import Storage

__all__ = ["UNREADABLE", "LoadReport", "load_from"]

UNREADABLE = (CorruptChunkError, FormatError, NotCommittedError, StorageError, TilingError)
"""Errors that speak of the checkpoint, not of the state that it is loaded into."""


class LoadReport(msgspec.Struct, frozen=True):
    """What a load did."""

    location: str
    step: int | None
    attempt: str
    tensors: int
    """Destinations filled on this rank."""
    bytes: int
    """Read and verified on this rank."""
    seconds: float
    missing: tuple[str, ...] = ()
    """Keys of the target that the checkpoint does not have (only without `strict`)."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that no rank asked for (only without `strict`)."""
    kept: tuple[str, ...] = ()
    """Per-rank values that stay as they are, since fewer ranks saved."""

    @property
    def speed(self) -> float:
        """Verified GB (10^9 bytes) a second on this rank."""
        return self.bytes / max(self.seconds, 1e-9) / 1e9


def load_from(
    storage: Storage,
    state: Any,
    rendezvous: Rendezvous,
    options: Options = DEFAULTS,
    *,
    check: Callable[[Manifest], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Fills a state tree from a checkpoint. Called by every rank.

    Args:
        storage: of the checkpoint.
        state: the tree to fill.
        rendezvous: where the ranks meet.
        options: see `shardproof.load`; so are the errors.
        check: raises FormatError where the manifest is not the one that was meant.
        progress: called with bytes done and bytes in all.
    """
    begun = time.monotonic()
    loader = _Loader(storage, rendezvous, progress)
    meeting = Meetings(rendezvous, f"load {storage.location}")
    try:
        answer = meeting.meet(
            "match", lambda: loader.match(state, options, check), lambda posts: agree(storage.location, posts)
        )
        missing, unexpected = msgspec.msgpack.decode(answer, type=tuple[tuple[str, ...], tuple[str, ...]])
        try:
            meeting.meet("read", loader.read, _all_read)
            meeting.meet("apply", loader.finish, lambda posts: b"")
        except BaseException as error:
            raise _overwritten(error, storage.location) from error.__cause__
    finally:
        storage.close()
    return loader.report(begun, missing, unexpected)


class _Loader:
    """One rank's part of a load."""

    def __init__(
        self, storage: Storage, rendezvous: Rendezvous, progress: Callable[[int, int], None] | None
    ) -> None:
        self._storage = storage
        self._rendezvous = rendezvous
        self._progress = progress
        self._bytes = 0
        self._checkpoint: Checkpoint
        self._matched: Matched

    def match(self, state: Any, options: Options, check: Callable[[Manifest], None] | None) -> bytes:
        """Opens the checkpoint and matches; an error of the checkpoint is data, so that it keeps its type."""
        try:
            self._checkpoint = Checkpoint(self._storage)
            if check is not None:
                check(self._checkpoint.manifest)
            if self._rendezvous.rank == 0:
                self._checkpoint.check_sizes(range(len(self._checkpoint.manifest.files)))
            with no_garbage_collection():
                self._matched = match(
                    self._checkpoint, state, options, self._rendezvous.rank, self._rendezvous.world_size
                )
            return msgspec.msgpack.encode(self._matched.asked)
        except UNREADABLE as error:
            return msgspec.msgpack.encode(Asked("", options.strict, error=error.to_wire()))

    def read(self) -> bytes:
        """Fills the destinations; an error of the checkpoint is data here too."""
        checkpoint, matched = self._checkpoint, self._matched
        assert matched.plan is not None

        def moved(done: int, total: int) -> None:
            self._rendezvous.progress(done, total)
            if self._progress is not None:
                self._progress(done, total)

        try:
            self._bytes = read_planned(
                checkpoint.storage,
                checkpoint.manifest,
                checkpoint.table,
                matched.plan,
                matched.destinations,
                threads=_threads(),
                progress=moved,
            )
            check_shared_memory(checkpoint, matched.plan, matched.destinations)
        except UNREADABLE as error:
            return msgspec.msgpack.encode(error.to_wire())
        return b""

    def finish(self) -> bytes:
        """Sets plain values, attaches new optimizer state, hands objects their state."""
        for step in self._matched.binding.finish:
            step()
        return b""

    def report(self, begun: float, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> LoadReport:
        """What was done on this rank."""
        manifest = self._checkpoint.manifest
        return LoadReport(
            self._storage.location,
            manifest.step,
            manifest.attempt,
            len(self._matched.destinations),
            self._bytes,
            time.monotonic() - begun,
            missing,
            unexpected,
            tuple(self._matched.binding.kept),
        )


def _all_read(posts: Sequence[bytes]) -> bytes:
    for rank, post in enumerate(posts):
        if post:
            raise from_rank(rank, len(posts), msgspec.msgpack.decode(post))
    return b""


def _overwritten(error: BaseException, location: str) -> BaseException:
    """The error, saying what has become of the target."""
    text = f"The target is partly overwritten from {location}: load again, or another, before using it."
    if isinstance(error, ShardproofError):
        return type(error)(f"{error.message}\n{text}", **{**error.details, "overwritten": True})
    error.add_note(text)
    return error


def _threads() -> int:
    """Reads in flight: this rank's share of the processors, between 1 and 8."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, (os.cpu_count() or 1) // max(ranks_here, 1)))
