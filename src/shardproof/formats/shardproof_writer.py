"""Writes a checkpoint of shardproof from the tensors of a conversion, without a live state.

A unit is one shard file. The name of the attempt is a digest of the plan. So processes with equal plans write
files of the same attempt, and an interrupted conversion continues with the files that it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import paths_object
from shardproof.engine.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    ShardFileWriter,
    TensorRecord,
    block_counts,
    bytes_digest,
    digests_as_bytes,
    digests_from_bytes,
    encode_index,
    encode_manifest,
    file_digest,
    header_of_chunks,
    new_manifest,
    shard_name,
    with_files,
)
from shardproof.engine.geometry import BoxTable, row_pointers
from shardproof.engine.planning import CHUNK_BYTES, chunk_table, prove_chunks, tensor_order
from shardproof.engine.state import encode_plain, hoisted_key, hoisted_tensor
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, StructureError
from shardproof.formats.writer import (
    BoxSource,
    Contents,
    FormatWriter,
    Unit,
    WriteOptions,
    box_bytes,
    check_units,
    new_file,
)

_FILE_BYTES = 512 << 20
"""Default bytes of tensors in a shard file. It gives enough files for the workers of one machine, and few
files for a model of terabytes."""
_BOX_BYTES = 64 << 20
"""Bytes of a box in a unit, at most. Each box is cut into chunks."""


class NativeWriter(FormatWriter):
    """Writes a checkpoint that `shardproof.open`, `shardproof.load` and ``shardproof verify`` accept.

    Large arrays and tensors inside plain values are stored as tensors, as a save stores them.
    ``max_file_bytes`` bounds the tensors of a shard file.

    Raises:
        StructureError: the format cannot hold a key, a dtype, a shape or the metadata.
        PlainDataError: a value is not plain data.
    """

    name = "shardproof"
    last_file = MANIFEST_NAME

    def __init__(self, contents: Contents, options: WriteOptions) -> None:
        self._piece_bytes = options.piece_bytes
        self._hoisted = hoisted = _Hoisted(contents)
        recorded = paths_object(contents.paths)
        values = dict(contents.objects) | ({} if recorded is None else dict([recorded]))
        objects = {key: hoisted.encoded(key, value) for key, value in sorted(values.items())}
        kinds = {**contents.tensors, **hoisted.kinds()}
        for key, (dtype, _) in kinds.items():
            if dtype not in DTYPES:
                raise StructureError(f"{key!r}: shardproof cannot store tensors of dtype {dtype}", key=key)
        tensors = tuple(TensorRecord(key, *kinds[key]) for key in sorted(kinds))
        file_bytes = options.max_file_bytes or _FILE_BYTES
        planned = _manifest(contents, tensors, objects, file_bytes)
        self._chunks = _plan_chunks(tensors, file_bytes)
        count = self._chunks.files or (1 if tensors or objects else 0)
        self._manifest = msgspec.structs.replace(planned, world_size=max(count, 1))
        self.units = [self._unit(rank) for rank in range(count)]
        self._ranks = {unit.name: rank for rank, unit in enumerate(self.units)}

    def write(self, unit: Unit, source: BoxSource, target: Storage) -> dict[str, Any]:
        """Writes a shard file and flushes it; see `FormatWriter.write`."""
        rank = self._ranks[unit.name]
        name = shard_name(rank, self._manifest.attempt)
        header, padding = self._header(rank)
        dtypes = {record.key: record.dtype for record in self._manifest.tensors}
        hoisted, own = self._hoisted.tensors, _HoistedSource(self._hoisted, source)
        pieces = (
            box_bytes(own if key in hoisted else source, key, dtypes[key], offsets, sizes, self._piece_bytes)
            for key, offsets, sizes in unit.boxes
        )
        with new_file(target, name) as file:
            shard = ShardFileWriter(file, header, padding)
            counts = self._chunks.byte_count[self._chunks.rows(rank)].tolist()
            shard.put_chunks(chain.from_iterable(pieces), counts)
            record = shard.finish(name, rank)
        digests = b"".join(digests_as_bytes(shard.digests)).hex()
        return {"size": record.size, "digest": record.digest, "digests": digests}

    def commit(self, records: Mapping[str, dict[str, Any]], target: Storage) -> None:
        """Checks that all planned files were written, then writes index and manifest.

        Raises:
            StructureError: a unit was not written, or not as planned.
            StorageError: a file is missing or has another size, or the storage failed.
        """
        written = {
            unit.name: self._checked(unit, records[unit.name]) for unit in self.units if unit.name in records
        }
        sizes = {name: [(record.name, record.size)] for name, (record, _) in written.items()}
        check_units(target, self.units, records, lambda name, _: sizes[name])
        files = [record for record, _ in written.values()]
        digests = [np.zeros((0, 2), np.uint64), *(columns for _, columns in written.values())]
        chunks = self._chunks
        data_start = np.array([record.data_start for record in files], np.int64)
        table = chunk_table(
            chunks.tensor,
            chunks.file,
            data_start[chunks.file] + chunks.byte_start,
            chunks.byte_count,
            np.concatenate(digests),
            chunks.boxes.start,
            chunks.boxes.offsets,
            chunks.boxes.sizes,
        )
        tensors = self._manifest.tensors
        prove_chunks(tensors, table, np.arange(len(tensors)))
        index = encode_index(table)
        manifest = with_files(self._manifest, files, index)
        target.publish(manifest.index.name, index, replace=True)
        target.publish(MANIFEST_NAME, encode_manifest(manifest), replace=True)

    def _unit(self, rank: int) -> Unit:
        chunks, tensors = self._chunks, self._manifest.tensors
        if not chunks.files:
            return Unit(f"{rank:05d}-{self._manifest.attempt}", [], 0)
        first, stop = chunks.box_start[rank : rank + 2].tolist()
        boxes = [
            (tensors[row].key, *chunks.whole.pair(at))
            for at, row in zip(range(first, stop), chunks.whole_tensor[first:stop].tolist(), strict=True)
        ]
        nbytes = int(chunks.byte_count[chunks.rows(rank)].sum())
        return Unit(f"{rank:05d}-{self._manifest.attempt}", boxes, nbytes)

    def _header(self, rank: int) -> tuple[bytes, int]:
        """The header of a file, and the bytes of padding after its chunks."""
        manifest, rows = self._manifest, self._chunks.rows(rank)
        records = [manifest.tensors[row] for row in self._chunks.tensor[rows].tolist()]
        return header_of_chunks(
            manifest,
            records,
            map(self._chunks.boxes.pair, range(rows.start, rows.stop)),
            self._chunks.byte_count[rows],
            list(manifest.objects)[rank :: len(self.units) or 1],
            rank=rank,
            files=manifest.world_size,
            is_first=rank == 0,
        )

    def _checked(self, unit: Unit, written: dict[str, Any]) -> tuple[FileRecord, NDArray[np.uint64]]:
        """The file of a unit, and the digests of its chunks. Raises if the file does not match the plan."""
        rank = self._ranks[unit.name]
        header, padding = self._header(rank)
        counts = self._chunks.byte_count[self._chunks.rows(rank)]
        columns = digests_from_bytes([bytes.fromhex(written["digests"])])
        size = len(header) + unit.nbytes + padding + 16 * (int(block_counts(counts).sum()) + len(counts))
        planned = len(counts), size, file_digest(header, columns)
        if (len(columns), written["size"], written["digest"]) != planned:
            raise StructureError(
                f"the unit {unit.name} was not written as planned: {len(columns)} chunks in "
                f"{written['size']} bytes, expected {len(counts)} in {size}. Remove its record and write it "
                "again; nothing is committed"
            )
        name = shard_name(rank, self._manifest.attempt)
        return FileRecord(name, size, written["digest"], len(header), rank), columns


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkRows:
    """The chunks of all files, a row each. Rows are ordered by file, then by position in the file."""

    files: int
    tensor: NDArray[np.int64]
    """(n,) row of the tensor."""
    file: NDArray[np.int64]
    """(n,) number of the file, which is its rank."""
    byte_start: NDArray[np.int64]
    """(n,) first byte, counted from the first data byte of the file."""
    byte_count: NDArray[np.int64]
    boxes: BoxTable
    """n boxes."""
    whole: BoxTable
    """The boxes that the chunks are cut from, in the same order."""
    whole_tensor: NDArray[np.int64]
    """Row of the tensor of each box in `whole`."""
    box_start: NDArray[np.int64]
    """(files + 1,) row pointers into `whole`: the boxes of each file."""

    def rows(self, rank: int) -> slice:
        """The chunks of a file."""
        first, stop = np.searchsorted(self.file, [rank, rank + 1]).tolist()
        return slice(first, stop)


def _plan_chunks(tensors: Sequence[TensorRecord], file_bytes: int) -> _ChunkRows:
    """Cuts tensors into boxes, fills files with boxes by key, and cuts the boxes into chunks."""
    itemsize = np.array([DTYPES[record.dtype].itemsize for record in tensors], np.int64)
    stored = np.array([row for row, record in enumerate(tensors) if 0 not in record.shape], np.int64)
    sizes = np.array([size for row in stored.tolist() for size in tensors[row].shape], np.int64)
    table = BoxTable.of([len(tensors[row].shape) for row in stored.tolist()], np.zeros_like(sizes), sizes)
    limit = np.maximum(min(_BOX_BYTES, file_bytes) // itemsize[stored], 1)
    whole, of, _ = table.cut(limit)
    tensor = stored[of]
    file = _fill((whole.volumes() * itemsize[tensor]).tolist(), file_bytes)
    files = int(file[-1]) + 1 if len(file) else 0
    parts, box, _ = whole.cut(CHUNK_BYTES // itemsize[tensor])
    byte_count = parts.volumes() * itemsize[tensor[box]]
    place = tensor_order([record.dtype for record in tensors], tensor[box], byte_count)
    in_file = np.lexsort((place[tensor], file))
    order = np.lexsort((place[tensor[box]], file[box]))
    byte_count, file_of = byte_count[order], file[box][order]
    before = row_pointers(byte_count)[:-1]
    first = before[np.searchsorted(file_of, file_of)] if len(before) else before
    return _ChunkRows(
        files,
        tensor[box][order],
        file_of,
        before - first,
        byte_count,
        parts.take(order),
        whole.take(in_file),
        tensor[in_file],
        np.searchsorted(file[in_file], np.arange(files + 1)),
    )


def _fill(nbytes: Sequence[int], limit: int) -> NDArray[np.int64]:
    """The number of the file that gets each box, when boxes fill files one after the other.

    >>> _fill([4, 4, 4, 9, 1], 8).tolist()
    [0, 0, 1, 2, 3]
    """
    file, filled = 0, 0
    numbers = []
    for count in nbytes:
        if filled and filled + count > limit:
            file, filled = file + 1, 0
        filled += count
        numbers.append(file)
    return np.array(numbers, np.int64)


def _manifest(
    contents: Contents, tensors: tuple[TensorRecord, ...], objects: dict[str, Any], file_bytes: int
) -> Manifest:
    """The manifest without its files. Raises `StructureError` if the format cannot hold the contents."""
    metadata = encode_plain(dict(contents.metadata), "metadata")
    aliases = dict(contents.aliases)
    described = [tensors, aliases, objects, metadata, contents.step, contents.time, file_bytes]
    manifest = new_manifest(
        attempt="unnamed",
        step=contents.step,
        time=contents.time,
        world_size=1,
        metadata=metadata,
        tensors=tensors,
        aliases=aliases,
        objects=objects,
    )
    manifest = msgspec.structs.replace(manifest, provenance=dict(contents.provenance))
    try:
        encode_manifest(manifest)
        attempt = bytes_digest(msgspec.json.encode(described))
    except FormatError as error:
        raise StructureError(f"shardproof cannot store the checkpoint: {error.message}") from error
    return msgspec.structs.replace(manifest, attempt=attempt)


class _Hoisted:
    """The tensors and large arrays inside plain values, which are stored as tensors."""

    def __init__(self, contents: Contents) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """The added tensors by key."""
        self._taken = {*contents.tensors, *contents.aliases, *contents.objects}

    def encoded(self, key: str, value: Any) -> Any:
        """A plain value as JSON."""
        used: set[str] = set()

        def hoist(path: str, kind: str, tensor: Any) -> str:
            inner = hoisted_key(key, path, used)
            while inner in self._taken:
                inner += "@"
            used.add(inner)
            self._taken.add(inner)
            self.tensors[inner] = hoisted_tensor(kind, tensor).detach()
            return inner

        return encode_plain(value, key, hoist)

    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each of `tensors`."""
        return {
            key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for key, tensor in self.tensors.items()
        }


@dataclass(frozen=True, slots=True)
class _HoistedSource:
    """Gives the boxes of hoisted tensors. It notes each in the source of the others, which verifies it."""

    hoisted: _Hoisted
    others: BoxSource

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        values = self.hoisted.tensors[key][box].contiguous()
        self.note(key, offsets, sizes, values)
        return values

    def note(self, key: str, offsets: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        self.others.note(key, offsets, sizes, values)
