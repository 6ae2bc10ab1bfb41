"""Copies a step so that the copy refers to no other step."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.engine.format import (
    MANIFEST_NAME,
    ChunkVerifier,
    FileRecord,
    Manifest,
    ShardFileWriter,
    check_sizes,
    digests_as_bytes,
    encode_index,
    header_of_chunks,
    index_name,
    locate_files,
    publish,
    read_index,
    read_manifest,
    shard_name,
    with_files,
)
from shardproof.engine.planning import ChunkTable, prove_chunks, tensor_order
from shardproof.engine.storage import FileWriter, Storage
from shardproof.errors import AlreadyCommittedError, ShardproofError, StorageError

_log = logging.getLogger("shardproof")


def make_standalone(
    source: Storage, target: Storage, *, on_progress: Callable[[int, int], None] | None = None
) -> Manifest:
    """Copies a checkpoint so that the copy refers to no other step. Verifies every chunk.

    One process makes the copy, whatever ranks saved the checkpoint. The copy has the same tensors, plain
    values, step, time, metadata and world size. The source may, but need not, refer to other steps.

    Args:
        source: storage of the checkpoint.
        target: storage of the copy. It must not hold a checkpoint.
        on_progress: called with bytes done and bytes in all.

    Returns:
        The manifest of the copy.

    Raises:
        NotCommittedError: there is no checkpoint in `source`.
        AlreadyCommittedError: there is one in `target`.
        CorruptChunkError, FormatError, TilingError: the source is damaged. The partial copy is removed.
        StorageError: a storage failed.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> run = tempfile.mkdtemp()
        >>> checkpointer = sp.Checkpointer(run, incremental=True)
        >>> [checkpointer.save(step, {"w": torch.ones(4)}).result().reused for step in (1, 2)]
        [0, 16]
        >>> copy = make_standalone(LocalStorage(f"{run}/step-00000002"), LocalStorage(f"{run}/whole"))
        >>> copy.step, len(copy.referenced_files)
        (2, 0)
    """
    copy = _planned_copy(source, target, on_progress)
    try:
        return copy.run()
    except BaseException as error:
        # A publish without an answer may still take effect, and its manifest names the files.
        if not (isinstance(error, StorageError) and error.details.get("committed", False) is None):
            copy.remove()
        raise
    finally:
        copy.close()


@dataclass(frozen=True, slots=True)
class StandalonePlan:
    """What `make_standalone` would copy."""

    step: int | None
    tensors: int
    files: int
    """Shard files of the copy."""
    bytes: int
    """Bytes of the tensors."""


def plan_standalone(source: Storage, target: Storage) -> StandalonePlan:
    """Describes the copy that `make_standalone` would make. Reads the manifest and the index; writes nothing.

    Args:
        source: storage of the checkpoint.
        target: storage of the copy. It must not hold a checkpoint.

    Raises:
        NotCommittedError: there is no checkpoint in `source`.
        AlreadyCommittedError: there is one in `target`.
        FormatError, TilingError: the source is damaged.
        StorageError: a storage failed, or a shard file is missing or has another size.
    """
    copy = _planned_copy(source, target, None)
    try:
        return copy.plan()
    finally:
        copy.close()


def _planned_copy(
    source: Storage, target: Storage, on_progress: Callable[[int, int], None] | None
) -> _CheckpointCopy:
    """The copy, after the checks that read only metadata. Arguments and errors are those of the callers."""
    manifest = read_manifest(source)
    table = read_index(source, manifest)
    if target.size(MANIFEST_NAME) is not None:
        raise AlreadyCommittedError(
            f"{target.location} holds a committed checkpoint; name a new place for the copy",
            path=target.location,
        )
    prove_chunks(manifest.tensors, table, np.arange(len(manifest.tensors)))
    return _CheckpointCopy(source, target, manifest, table, on_progress)


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """One file of the copy."""

    rows: NDArray[np.int64]
    """Rows of the source's table, in the order of the copy's file."""
    byte_start: NDArray[np.int64]
    """First byte of each row in the copy's file."""
    record: FileRecord


class _CheckpointCopy:
    def __init__(
        self,
        source: Storage,
        target: Storage,
        manifest: Manifest,
        table: ChunkTable,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._target = target
        self._manifest = msgspec.structs.replace(manifest, attempt=secrets.token_hex(8))
        """Of the copy. Its files are those of the source until `run` has written them."""
        self._table = table
        self._files = locate_files(source, manifest)
        self._verifier = ChunkVerifier.of_table(
            manifest,
            table,
            np.arange(len(table.file)),
            advice="The copy was given up: copy another step (`shardproof verify` lists all damage)",
        )
        self._on_progress = on_progress
        self._done = 0
        self._total = int(table.byte_count.sum())

    def plan(self) -> StandalonePlan:
        """Checks the sizes of the source's files, and describes the copy."""
        manifest = self._manifest
        folders = (folder for folder, _ in self._files)
        check_sizes(list(zip(folders, manifest.files, strict=True)))
        return StandalonePlan(manifest.step, len(manifest.tensors), len(self._ranks()), self._total)

    def run(self) -> Manifest:
        """Writes all shard files, then index and manifest."""
        manifest = self._manifest
        shards = list(self._shards())
        file, byte_start = np.zeros(len(self._table), np.int64), np.zeros(len(self._table), np.int64)
        for at, shard in enumerate(shards):
            file[shard.rows], byte_start[shard.rows] = at, shard.byte_start
        index = encode_index(replace(self._table, file=file, byte_start=byte_start))
        copied = with_files(manifest, [shard.record for shard in shards], index)
        publish(self._target, copied, index, overwrite=False)
        return copied

    def remove(self) -> None:
        """Removes the files of a copy that is not committed."""
        try:
            if self._target.size(MANIFEST_NAME) is None:
                names = [shard_name(rank, self._manifest.attempt) for rank in self._ranks()]
                for name in (*names, index_name(self._manifest.attempt)):
                    self._target.delete(name)
        except ShardproofError as error:
            _log.warning("%s: the partial copy could not be removed (%s)", self._target.location, error)

    def close(self) -> None:
        """Closes the files that reading opened."""
        for storage, _ in self._files:
            storage.close()
        self._target.close()

    def _rank_of_row(self) -> NDArray[np.int64]:
        """The rank whose file gets each chunk: its writer, modulo the world size of the checkpoint."""
        ranks = np.array([record.rank for record in self._manifest.files], np.int64)
        of_row: NDArray[np.int64] = ranks[self._table.file] if len(ranks) else np.zeros(0, np.int64)
        return of_row % self._manifest.world_size

    def _ranks(self) -> list[int]:
        """Ranks of the files. Without chunks, rank 0 has a file for the plain values."""
        found: list[int] = np.unique(self._rank_of_row()).tolist()
        return found or ([0] if self._manifest.objects or self._manifest.tensors else [])

    def _shards(self) -> Iterator[_Shard]:
        """Writes the files one after another."""
        manifest, table = self._manifest, self._table
        dtypes = [record.dtype for record in manifest.tensors]
        place = tensor_order(dtypes, table.tensor, table.byte_count)
        of_row, ranks = self._rank_of_row(), self._ranks()
        for at, rank in enumerate(ranks):
            rows = np.flatnonzero(of_row == rank)
            rows = rows[np.argsort(place[table.tensor[rows]], kind="stable")]
            keys = list(manifest.objects)[at :: len(ranks)]
            yield self._write(rank, rows, keys, len(ranks), is_first=at == 0)

    def _write(
        self, rank: int, rows: NDArray[np.int64], objects: list[str], files: int, *, is_first: bool
    ) -> _Shard:
        table, manifest = self._table, self._manifest
        byte_count = table.byte_count[rows]
        header, padding = header_of_chunks(
            manifest,
            [manifest.tensors[row] for row in table.tensor[rows].tolist()],
            map(table.boxes.pair, rows.tolist()),
            byte_count,
            objects,
            rank=rank,
            files=files,
            is_first=is_first,
        )
        name = shard_name(rank, manifest.attempt)
        with FileWriter(self._target.create(name)) as file:
            shard = ShardFileWriter(file, header, padding)
            for row, digest in zip(rows.tolist(), digests_as_bytes(table.digest[rows]), strict=True):
                shard.note_chunks([digest], self._copy_chunk(row, file))
            record = shard.finish(name, rank)
        return _Shard(rows, len(header) + np.cumsum(byte_count) - byte_count, record)

    def _copy_chunk(self, row: int, file: FileWriter) -> list[bytes]:
        """Copies and verifies a chunk. Returns the digests of its blocks, if it has several."""
        table = self._table
        columns = table.file, table.byte_start, table.byte_count
        number, start, count = (int(column[row]) for column in columns)
        storage, name = self._files[number]

        def pieces() -> Iterator[memoryview]:
            done = 0
            while done < count:
                piece = file.room()[: count - done]
                storage.read_into(name, start + done, piece)
                yield piece
                file.advance(len(piece))
                done += len(piece)
                self._done += len(piece)
                if self._on_progress is not None:
                    self._on_progress(self._done, self._total)

        return self._verifier.check_pieces(row, pieces())
