"""A load, from the manifest to the live state.

    open, bind, plan (local) -> agree (meet) -> read, verify (local) -> agree (meet) -> finish (local) ->
    agree (meet)

Until the first meeting nothing of the target is touched: all that can be known is known by then, on all
ranks. Tensors
are filled between the first and the second; everything else (plain values, new optimizer state, objects)
after the second, when every byte on every rank is verified.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shardproof.errors import (
    CorruptChunkError,
    FormatError,
    KeyMismatchError,
    NotCommittedError,
    ShardproofError,
    StorageError,
    TilingError,
)
from shardproof.garbage import no_garbage_collection
from shardproof.loading.checkpoint import Checkpoint
from shardproof.loading.place import Destination, read_planned
from shardproof.loading.selection import Cast, Patterns, casts, renamed, selects
from shardproof.planning import ReadPlan, Wanted, plan_reads
from shardproof.rendezvous import Meetings, Rendezvous
from shardproof.state import Binding, TensorEntry, bind
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


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """What one rank found when it matched its target with the checkpoint."""

    attempt: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, str, str], ...]
    error: dict[str, Any] | None = None


def load_from(
    storage: Storage,
    state: Any,
    rendezvous: Rendezvous,
    *,
    strict: bool = True,
    include: Patterns = None,
    exclude: Patterns = None,
    cast: Cast = False,
    rename: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Fills a state tree from a checkpoint. Called by every rank; see `shardproof.load` for the arguments."""
    begun = time.monotonic()
    loader = _Loader(storage, rendezvous, progress)
    meeting = Meetings(rendezvous, f"load {storage.location}")

    def match() -> bytes:
        asked = loader.match(state, strict, selects(include, exclude), casts(cast), rename)
        return msgspec.msgpack.encode(asked)

    try:
        answer = meeting.meet("match", match, lambda posts: _agree(storage.location, posts, strict))
        missing, unexpected = msgspec.msgpack.decode(answer, type=tuple[tuple[str, ...], tuple[str, ...]])
        meeting.meet("read", loader.read, lambda posts: _all_read(storage.location, posts))
        meeting.meet("apply", loader.finish, lambda posts: b"")
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
        self._binding: Binding
        self._destinations: list[Destination] = []
        self._plan: ReadPlan

    def match(
        self,
        state: Any,
        strict: bool,
        selected: Callable[[str], bool],
        may_cast: Callable[[str], bool],
        rename: Mapping[str, str] | None,
    ) -> _Asked:
        """Opens the checkpoint, binds the state to it and plans the reading, without touching the state."""
        try:
            self._checkpoint = Checkpoint(self._storage)
            if self._rendezvous.rank == 0:
                self._checkpoint.check_sizes(range(len(self._checkpoint.manifest.files)))
            with no_garbage_collection():
                return self._match(state, strict, selected, may_cast, rename)
        except UNREADABLE as error:
            return _Asked("", (), (), (), error.to_wire())

    def _match(
        self,
        state: Any,
        strict: bool,
        selected: Callable[[str], bool],
        may_cast: Callable[[str], bool],
        rename: Mapping[str, str] | None,
    ) -> _Asked:
        checkpoint = self._checkpoint
        catalogue, stored_of = renamed(checkpoint.catalogue(), rename)
        binding = bind(
            state,
            catalogue,
            rank=self._rendezvous.rank,
            world_size=self._rendezvous.world_size,
            selected=selected,
            strict=strict,
        )
        self._binding = binding
        mismatched = [(item.key, item.expected, item.found) for item in binding.mismatched]
        fitting: list[TensorEntry] = []
        for entry in binding.tensors:
            dtype, shape = catalogue.tensors[entry.key]
            if tuple(entry.shape) != tuple(shape):
                mismatched.append((entry.key, f"shape {list(entry.shape)}", f"shape {list(shape)}"))
            elif entry.dtype != dtype and not may_cast(entry.key):
                mismatched.append((entry.key, entry.dtype, f"{dtype} (cast=True converts)"))
            else:
                fitting.append(entry)
        rows = {entry.key: checkpoint.row(stored_of.get(entry.key, entry.key)) for entry in fitting}
        entries = [entry for entry in fitting if not self._is_tied_duplicate(entry, rows, mismatched)]
        asked = _Asked(
            checkpoint.manifest.attempt,
            tuple(binding.missing),
            tuple(sorted(self._unexpected(catalogue.tensors, catalogue.objects, selected))),
            tuple(mismatched),
        )
        if not mismatched and not (strict and binding.missing):
            self._plan_reads(entries, rows)
        return asked

    def _is_tied_duplicate(
        self, entry: TensorEntry, rows: Mapping[str, int], mismatched: list[tuple[str, str, str]]
    ) -> bool:
        """Whether the entry's memory is filled under another key already, with the same values."""
        other = entry.alias_of
        if other is None or other not in rows:
            return False
        if not self._same_values(rows[entry.key], rows[other]):
            found = "two tensors with different values in the checkpoint (exclude one of them)"
            mismatched.append((entry.key, f"one tensor with {other!r}", found))
        return True

    def _same_values(self, row: int, other: int) -> bool:
        """Whether two stored tensors have equal chunks."""
        if row == other:
            return True
        table = self._checkpoint.table
        a, b = (np.flatnonzero(table.tensor == tensor) for tensor in (row, other))

        def boxes(rows: Any) -> list[Any]:
            spans = [slice(table.box_start[at], table.box_start[at + 1]) for at in rows]
            return [(table.box_offsets[span].tolist(), table.box_sizes[span].tolist()) for span in spans]

        def described(rows: Any) -> list[Any]:
            return sorted(zip(boxes(rows), table.digest[rows].tolist(), strict=True))

        return described(a) == described(b)

    def _unexpected(
        self, tensors: Mapping[str, Any], objects: Mapping[str, Any], selected: Callable[[str], bool]
    ) -> list[str]:
        """Keys of the checkpoint that this rank does not ask for, other ranks' own values aside."""
        used = self._binding.used
        return [
            key for key in (*tensors, *objects) if key not in used and selected(key) and "@rank-" not in key
        ]

    def _plan_reads(self, entries: Sequence[TensorEntry], rows: Mapping[str, int]) -> None:
        tensor: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        for entry in entries:
            row = rows[entry.key]
            for piece in entry.pieces:
                if piece.view.numel():
                    self._destinations.append(Destination(entry.key, piece.view))
                    tensor.append(row)
                    offsets.extend(piece.offsets)
                    sizes.extend(piece.view.shape)
        manifest = self._checkpoint.manifest
        self._plan = plan_reads(
            [record.key for record in manifest.tensors],
            [record.shape for record in manifest.tensors],
            self._checkpoint.table,
            Wanted(np.array(tensor, np.int64), np.array(offsets, np.int64), np.array(sizes, np.int64)),
        )

    def read(self) -> bytes:
        """Fills the destinations; an error of the checkpoint is posted as data, so that it keeps its type."""
        checkpoint = self._checkpoint

        def moved(done: int, total: int) -> None:
            self._rendezvous.progress(done, total)
            if self._progress is not None:
                self._progress(done, total)

        try:
            self._bytes = read_planned(
                checkpoint.storage,
                checkpoint.manifest,
                checkpoint.table,
                self._plan,
                self._destinations,
                threads=_threads(),
                progress=moved,
            )
        except UNREADABLE as error:
            return msgspec.msgpack.encode(error.to_wire())
        return b""

    def finish(self) -> bytes:
        """Sets plain values, attaches new optimizer state, hands objects their state."""
        for step in self._binding.finish:
            step()
        return b""

    def report(self, begun: float, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> LoadReport:
        """What was done on this rank."""
        manifest = self._checkpoint.manifest
        return LoadReport(
            self._storage.location,
            manifest.step,
            manifest.attempt,
            len(self._destinations),
            self._bytes,
            time.monotonic() - begun,
            missing,
            unexpected,
            tuple(self._binding.kept),
        )


def _agree(location: str, posts: Sequence[bytes], strict: bool) -> bytes:
    """Leader: all ranks see one checkpoint, and what they ask for together is what it holds."""
    said = [msgspec.msgpack.decode(post, type=_Asked) for post in posts]
    for rank, asked in enumerate(said):
        if asked.error is not None:
            raise _from_rank(rank, len(said), asked.error)
    attempts = {asked.attempt: rank for rank, asked in reversed(list(enumerate(said)))}
    if len(attempts) > 1:
        seen = ", ".join(f"rank {rank} sees attempt {attempt}" for attempt, rank in sorted(attempts.items()))
        raise StorageError(
            f"{location}: ranks see different checkpoints at this place: {seen}", file=location
        )
    missing = sorted({key for asked in said for key in asked.missing})
    mismatched = sorted({item for asked in said for item in asked.mismatched})
    unexpected = sorted(set.intersection(*(set(asked.unexpected) for asked in said)))
    if mismatched or (strict and (missing or unexpected)):
        raise _mismatch(location, missing if strict else [], unexpected if strict else [], mismatched)
    return msgspec.msgpack.encode((missing, unexpected))


def _all_read(location: str, posts: Sequence[bytes]) -> bytes:
    for rank, post in enumerate(posts):
        if post:
            error = _from_rank(rank, len(posts), msgspec.msgpack.decode(post))
            raise type(error)(
                f"{error.message}. Tensors of the target were partly overwritten from {location}: load "
                f"another "
                "checkpoint before using them; plain values and objects are as they were",
                **error.details,
            )
    return b""


def _from_rank(rank: int, world_size: int, wire: dict[str, Any]) -> ShardproofError:
    error = ShardproofError.from_wire(wire)
    if world_size == 1:
        return error
    return type(error)(f"rank {rank}: {error.message}", **error.details, rank=rank)


def _mismatch(
    location: str, missing: list[str], unexpected: list[str], mismatched: list[tuple[str, str, str]]
) -> KeyMismatchError:
    """Everything that does not fit, at once."""
    lines = [f"{location} does not fit the state it is loaded into; nothing was changed."]
    for title, keys, advice in (
        ("missing in the checkpoint", missing, "strict=False leaves them as they are"),
        ("in the checkpoint, not asked for", unexpected, "strict=False or exclude= ignores them"),
        (
            "different",
            [f"{key}: expected {want}, found {got}" for key, want, got in mismatched],
            "exclude= skips them",
        ),
    ):
        if keys:
            lines.append(f"  {title} ({len(keys)}; {advice}):")
            lines.extend(f"    {key}" for key in keys[:20])
            if len(keys) > 20:
                lines.append(f"    ... and {len(keys) - 20} more")
    return KeyMismatchError(
        "\n".join(lines),
        missing=missing,
        unexpected=unexpected,
        mismatched=[list(item) for item in mismatched],
    )


def _threads() -> int:
    """Reads in flight: this rank's share of the processors, between 1 and 8."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, (os.cpu_count() or 1) // max(ranks_here, 1)))
