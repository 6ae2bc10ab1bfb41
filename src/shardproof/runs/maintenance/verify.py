"""Verifies that every byte is what was saved; in other formats, as far as they can prove it."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.foreign import NATIVE, Foreign, StoredBox, ZeroRule, foreign_faults, format_of
from shardproof.engine.format import (
    ChunkVerifier,
    FileRecord,
    Manifest,
    ShardHeader,
    block_counts,
    check_size,
    digests_as_bytes,
    digests_as_table,
    digests_from_table,
    file_digest,
    locate_files,
    read_chunk_digests,
    read_index,
    read_manifest,
    read_pieces,
    read_shard_header,
)
from shardproof.engine.planning import ChunkTable, prove_chunks
from shardproof.engine.storage import Storage, UncachedStorage
from shardproof.errors import CorruptChunkError, FormatError, ShardproofError, StorageError, TilingError

if TYPE_CHECKING:
    from shardproof.engine.loading import ForeignCheckpoint

_BATCH_BYTES = 32 << 20
_DAMAGE = (CorruptChunkError, FormatError, StorageError)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`. The checkpoint is whole if there are no faults."""

    location: str
    step: int | None
    files: int
    chunks: int
    bytes: int
    """Bytes of chunks that were compared with their digests."""
    seconds: float
    faults: list[ShardproofError] = field(default_factory=list)
    unproved: int = 0
    """Bytes that were read and that the format has no checksum for (only formats of other projects)."""
    notes: list[str] = field(default_factory=list)
    """Notes on what the format cannot prove or has lost, one sentence each."""
    format: str = "shardproof"

    @property
    def ok(self) -> bool:
        """True if every byte is what was saved."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "location": self.location,
            "step": self.step,
            "ok": self.ok,
            "files": self.files,
            "chunks": self.chunks,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "faults": [fault.to_wire() for fault in self.faults],
            "format": self.format,
            "unproved": self.unproved,
            "notes": self.notes,
        }


def verify(
    storage: Storage, on_progress: Callable[[int, int], None] | None = None, *, referenced_only: bool = False
) -> VerifyReport:
    """Reads a whole checkpoint and compares every byte with what was saved.

    - Manifest, index, shard headers and chunks must match their digests.
    - The digests in a shard file must be those of the index, and its padding must be zero.
    - The chunks of each tensor must tile it.

    Files of other steps are checked in the same way, except for chunks that this checkpoint does not use.

    Args:
        storage: storage of the checkpoint. Verification closes its files.
        on_progress: called with bytes done and bytes in all.
        referenced_only: True to read only manifest, index, and the files of other steps.

    Returns:
        The report. It has all faults but a missing manifest.

    Raises:
        NotCommittedError: there is no manifest.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> _ = sp.save(folder, {"w": torch.ones(4)})
        >>> report = verify(LocalStorage(folder))
        >>> report.ok, report.chunks, report.bytes
        (True, 1, 16)
    """
    begun = time.monotonic()
    faults: list[ShardproofError] = []
    try:
        manifest = read_manifest(storage)
        table = read_index(storage, manifest)
    except (FormatError, StorageError) as error:
        return VerifyReport(storage.location, None, 0, 0, 0, time.monotonic() - begun, [error])
    try:
        prove_chunks(manifest.tensors, table, np.arange(len(manifest.tensors)))
    except (FormatError, TilingError) as error:
        faults.append(error)
    files = [row for row, record in enumerate(manifest.files) if record.folder or not referenced_only]
    checker = _Checker(storage, manifest, table, files, faults, on_progress)
    try:
        for file in files:
            checker.check_file(file)
    finally:
        storage.close()
        checker.close()
    return VerifyReport(
        storage.location,
        manifest.step,
        len(files),
        checker.chunks,
        checker.done,
        time.monotonic() - begun,
        faults,
    )


class _Checker:
    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        table: ChunkTable,
        files: Sequence[int],
        faults: list[ShardproofError],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.done = 0
        self._files = locate_files(storage, manifest)
        self._manifest = manifest
        self._table = table
        self._faults = faults
        self._on_progress = on_progress
        rows = np.isin(table.file, files)
        self.chunks = int(rows.sum())
        self._total = int(table.byte_count[rows].sum())
        self._buffer = memoryview(bytearray(min(_BATCH_BYTES, self._total)))

    def close(self) -> None:
        """Closes the files that checking opened."""
        for storage, _ in self._files:
            storage.close()

    def check_file(self, file: int) -> None:
        """Checks one shard file. A file that cannot be read is one fault."""
        record = self._manifest.files[file]
        storage, name = self._files[file]
        rows = np.flatnonzero(self._table.file == file)
        rows = rows[np.lexsort((self._table.byte_count[rows], self._table.byte_start[rows]))]
        try:
            check_size(storage, record)
            header = read_shard_header(storage, name)
            if header.data_start != record.data_start or record.digest != file_digest(
                header.raw, self._carried_digests(record, storage, header, rows)
            ):
                raise FormatError(
                    f"{record.place}: the header or the list of its chunks is not what was written (digest "
                    "differs from the manifest's)",
                    file=record.place,
                )
        except (FormatError, StorageError) as error:
            details = error.details
            if record.folder and details.get("file") == record.name:  # the file of another step
                details = {**details, "file": record.place}
                error = type(error)(error.message.replace(record.name, record.place, 1), **details)
            self._faults.append(error)
            if isinstance(error, StorageError):
                return
        blocks = self._check_chunks(file, rows)
        if not record.folder and blocks is not None:
            self._check_tail(file, rows, blocks)

    def _carried_digests(
        self, record: FileRecord, storage: Storage, header: ShardHeader, rows: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Digests of all chunks of a file: from the index, or from the file if it is another step's.

        Raises:
            FormatError: a file of another step does not list a chunk that the index has there.
        """
        if not record.folder:
            return self._table.digest[rows]
        carried = read_chunk_digests(storage, record.name, header)
        starts = np.array([entry[3] for entry in header.entries[: len(carried)]], np.int64)
        counts = np.array([entry[4] for entry in header.entries[: len(carried)]], np.int64) - starts
        at = np.searchsorted(starts, self._table.byte_start[rows], side="right") - 1
        same = at >= 0
        if len(starts):
            same &= starts[at] == self._table.byte_start[rows]
            same &= counts[at] == self._table.byte_count[rows]
            same &= (carried[at] == self._table.digest[rows]).all(axis=1)
        same |= self._table.byte_count[rows] == 0  # an empty chunk begins at the first byte of the next one
        if not same.all():
            row = int(rows[int(same.argmin())])
            key = self._manifest.tensors[int(self._table.tensor[row])].key
            raise FormatError(
                f"{record.place}: it does not list the chunk of {key!r} that this checkpoint has at byte "
                f"{int(self._table.byte_start[row])} of it",
                file=record.place,
                key=key,
            )
        return carried

    def _check_chunks(self, file: int, rows: NDArray[np.int64]) -> list[bytes | None] | None:
        """Compares chunks with their digests.

        Returns:
            Digests of the blocks of chunks with several blocks; None for each block of a damaged chunk. None
            if the file cannot be read.
        """
        storage, name = self._files[file]
        table = self._table
        verifier = ChunkVerifier.of_table(self._manifest, table, rows)
        starts, counts = table.byte_start[rows].tolist(), table.byte_count[rows].tolist()
        memory = self._buffer
        blocks: list[bytes | None] = []
        begin = 0
        while begin < len(starts):
            base = starts[begin]
            end = begin + 1
            while end < len(starts) and starts[end] + counts[end] - base <= len(memory):
                end += 1
            is_large = counts[begin] > len(memory)
            try:
                if not is_large:
                    storage.read_into(name, base, memory[: starts[end - 1] + counts[end - 1] - base])
                for at in range(begin, end):
                    if is_large:
                        pieces = read_pieces(storage, name, base, counts[at], memory)
                    else:
                        pieces = iter([memory[starts[at] - base :][: counts[at]]])
                    blocks += self._check_chunk(verifier, at, pieces, counts[at])
                    self.done += counts[at]
            except StorageError as error:
                self._faults.append(error)
                return None
            if self._on_progress is not None:
                self._on_progress(self.done, self._total)
            begin = end
        return blocks

    def _check_chunk(
        self, verifier: ChunkVerifier, at: int, pieces: Iterator[memoryview], count: int
    ) -> list[bytes | None]:
        """Digests of a chunk's blocks; all None for a damaged chunk, which is one fault."""
        try:
            return [*verifier.check_pieces(at, pieces)]
        except CorruptChunkError as fault:
            self._faults.append(fault)
            return [None] * int(block_counts(np.array([count]))[0])

    def _check_tail(self, file: int, rows: NDArray[np.int64], blocks: list[bytes | None]) -> None:
        """Checks the last bytes of a file: padding and the tables of digests."""
        record, chunks = self._manifest.files[file], self._table
        storage, name = self._files[file]
        end = record.data_start
        if len(rows):
            end = int(chunks.byte_start[rows[-1]] + chunks.byte_count[rows[-1]])
        padding, digests = bytes(-(end - record.data_start) % 8), digests_as_table(chunks.digest[rows])
        try:
            found = storage.read(name, end, record.size)
        except StorageError as error:
            self._faults.append(error)
            return
        table = found[len(padding) : len(found) - len(digests)]
        if not (found.startswith(padding) and found.endswith(digests) and len(table) == 16 * len(blocks)):
            self._faults.append(
                FormatError(
                    f"{record.name}: the last {record.size - end} bytes (padding and the file's own "
                    "digests) are not what was written; the tensors are not affected, but the file could "
                    "not be used for repair",
                    file=record.name,
                )
            )
            return
        carried = digests_as_bytes(digests_from_table(table))
        if any(block not in (None, other) for block, other in zip(blocks, carried, strict=True)):
            self._faults.append(
                FormatError(
                    f"{record.name}: its table of block digests is not what was written; the tensors are "
                    "not affected, but a reader must read some chunks whole. `shardproof "
                    "convert --standalone` makes an undamaged copy",
                    file=record.name,
                )
            )


def verify_any(
    foreign: Foreign,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    format: str | None = None,  # noqa: A002 as in sp.open
) -> VerifyReport:
    """Verifies a checkpoint of any format; see `verify` and `verify_foreign`.

    Args:
        foreign: where it is.
        on_progress: called with bytes done and bytes in all.
        format: name of the format; None to find it.

    Raises:
        NotCommittedError: there is no checkpoint, or its save did not finish.
    """
    begun = time.monotonic()
    try:
        name = format or format_of(foreign)
        if name == NATIVE:
            storage = foreign.storage
            uncached = storage if storage.path is None else UncachedStorage(storage.path)
            return verify(uncached, on_progress)
        from shardproof.engine.loading import ForeignCheckpoint, open_storage  # imports torch

        checkpoint = open_storage(foreign, format=name, warn=False)
    except (FormatError, StorageError) as error:
        return VerifyReport(foreign.location, None, 0, 0, 0, time.monotonic() - begun, [error])
    with checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint, on_progress)


def verify_foreign(
    checkpoint: ForeignCheckpoint, on_progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Reads a whole checkpoint of another project and checks what its format lets a reader check.

    - The stored boxes of each tensor must tile it.
    - Files must exist, with their recorded sizes. What they hold must have the described dtypes and shapes.
    - Bytes must match their checksums. The report counts bytes without a checksum as unproved.
    - Zeros must not contradict another tensor, where the format has rules for that. Tensors of a rule are
      read once more.

    Args:
        checkpoint: open for reading.
        on_progress: called with bytes done and bytes in all.

    Returns:
        The report, with all faults.
    """
    begun = time.monotonic()
    faults: list[ShardproofError] = []
    rows = np.arange(len(checkpoint.tensors))
    if _tiling_fault(checkpoint, rows) is not None:  # proved tensor by tensor, to find all faults
        faults.extend(filter(None, (_tiling_fault(checkpoint, rows[at : at + 1]) for at in rows.tolist())))
    where = operator.attrgetter("file", "start", "nbytes")
    rules = checkpoint.reader.zero_rules()
    boxes = sorted(checkpoint.boxes, key=where)
    groups = [list(group) for _, group in groupby(boxes, key=where)]
    total = sum(group[0].nbytes for group in groups)
    total += sum(box.nbytes for rule in rules for box in checkpoint.reader.tensors[rule.key].boxes)
    proved = unproved = done = 0
    files = list(checkpoint.file_faults())
    cut = {fault.details["file"] for fault in files if not fault.details["missing"]}
    """Files whose one fault names all values that they lack."""

    def add(box: StoredBox) -> None:
        nonlocal done
        done += box.nbytes
        if on_progress is not None:
            on_progress(done, total)

    for group in groups:
        try:
            for extent in dict.fromkeys(box.located().extent for box in group):
                extent.verify()
                proved += extent.stored_bytes if extent.has_checksum else 0
                unproved += 0 if extent.has_checksum else extent.stored_bytes
        except _DAMAGE as error:
            if not isinstance(error, StorageError) or error.details.get("file") not in cut:
                faults.append(error)
        add(group[0])
    named = {fault.message for fault in faults}
    faults += [fault for fault in files if fault.message not in named]
    try:
        with foreign_faults(checkpoint.location):
            proved += checkpoint.reader.verify_extra()
    except _DAMAGE as error:
        if error.details.get("file") not in {fault.details["file"] for fault in files}:
            faults.append(error)
    for rule in rules:
        try:
            lost = _lost_ranges(checkpoint, rule, add)
        except ShardproofError:  # one of the faults above
            continue
        faults += [] if lost is None else [lost]
    return VerifyReport(
        checkpoint.location,
        checkpoint.step,
        len(checkpoint.reader.files()),
        len(boxes),
        proved,
        time.monotonic() - begun,
        faults,
        unproved,
        list(checkpoint.reader.notes),
        checkpoint.reader.name,
    )


def _tiling_fault(checkpoint: ForeignCheckpoint, rows: NDArray[np.int64]) -> ShardproofError | None:
    try:
        prove_chunks(checkpoint.tensors, checkpoint.table, rows, advice=checkpoint.tiling_advice)
    except (FormatError, TilingError) as error:
        return error
    return None


def _lost_ranges(
    checkpoint: ForeignCheckpoint, rule: ZeroRule, on_box: Callable[[StoredBox], None]
) -> CorruptChunkError | None:
    """Names the elements that a writer lost as zeros, by a `ZeroRule`; None without any.

    Reads both tensors of the rule, one stored box at a time, and calls `on_box` after each of the first.
    """
    count, files = 0, {}
    first: list[int] = []
    last: list[int] = []
    for box in checkpoint.reader.tensors[rule.key].boxes:
        index = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        is_zero = checkpoint[rule.key][index] == 0
        if is_zero.any():
            places = (is_zero & (checkpoint[rule.other][index].abs() > rule.bound)).nonzero()
            if len(places):
                found = [
                    [at + start for at, start in zip(place, box.offsets, strict=True)]
                    for place in (places[0].tolist(), places[-1].tolist())
                ]
                first, last = min(filter(None, (first, found[0]))), max(last, found[1])
                count += len(places)
                files[box.file] = True
        on_box(box)
    if not count:
        return None
    path = f"{checkpoint.location}/{next(iter(files))}"
    return CorruptChunkError(
        f"{path}: {rule.key} is 0 at {count} elements from {first} to {last}, where {rule.other} is not: "
        f"{rule.reason}. The save lost these ranges, in {len(files)} files. Restore another step",
        file=path,
        key=rule.key,
    )
