"""The index: the chunk table of a checkpoint as columns of a safetensors file."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.format.digests import bytes_digest
from shardproof.engine.format.header import parse_header
from shardproof.engine.format.manifest import FORMAT_VERSION, Manifest, TensorRecord
from shardproof.engine.format.shards import encode_entries, shard_header
from shardproof.engine.geometry import row_pointers
from shardproof.engine.planning import ChunkTable
from shardproof.errors import FormatError

_COLUMNS = {
    "tensor": "I64",
    "file": "I64",
    "byte_start": "I64",
    "byte_count": "I64",
    "digest_hi": "U64",
    "digest_lo": "U64",
    "box_start": "I64",
    "box_offsets": "I64",
    "box_sizes": "I64",
}
_DTYPE = {"I64": np.dtype("<i8"), "U64": np.dtype("<u8")}


def encode_index(table: ChunkTable) -> bytes:
    """The bytes of the index. The manifest records their number and their `bytes_digest`."""
    columns = {name: getattr(table, name) for name in _COLUMNS if not name.startswith("digest")}
    columns |= {"digest_hi": table.digest[:, 0], "digest_lo": table.digest[:, 1]}
    data = [np.ascontiguousarray(columns[name], _DTYPE[code]) for name, code in _COLUMNS.items()]
    counts = np.array([column.nbytes for column in data], np.int64)
    entries = encode_entries(
        list(_COLUMNS),
        list(_COLUMNS.values()),
        [column.shape for column in data],
        row_pointers(counts)[:-1],
        counts,
    )
    head = shard_header(entries, {"shardproof": json.dumps({"version": FORMAT_VERSION, "index": len(table)})})
    return b"".join([head, *(column.data for column in data)])


def index_remedy(manifest: Manifest) -> str:
    """What to do about a lost or damaged index, as a sentence."""
    if manifest.referenced_files:
        return (
            "It cannot be written again, because only it records the chunks in files of other steps: put a "
            "copy back, or restore another step."
        )
    return "If all shard files of the save are there, `shardproof repair` writes it again."


def decode_index(data: bytes, manifest: Manifest, file: str) -> ChunkTable:
    """Decodes the chunk table and checks it against the manifest.

    In a checked table

    - the tensor and the file of every chunk exist;
    - every box lies inside its tensor;
    - the bytes of every chunk lie inside the data of its file, and are as many as its box needs;
    - the chunks of a tensor have as many bytes as the tensor, so that a load takes no memory for a tensor
      that is not stored.

    `planning.prove_chunks` proves that boxes cover their tensors exactly once.

    Raises:
        FormatError: the index is damaged, or breaks a rule of the format.
    """
    if len(data) != manifest.index.size:
        raise FormatError(
            f"{file}: expected {manifest.index.size} bytes, it has {len(data)}. It was cut short or "
            f"belongs to another checkpoint. {index_remedy(manifest)}",
            file=file,
        )
    found = bytes_digest(data)
    if found != manifest.index.digest:
        raise FormatError(
            f"{file}: its bytes hash to {found}, expected {manifest.index.digest}. It is "
            f"damaged or belongs to another checkpoint. {index_remedy(manifest)}",
            file=file,
        )
    columns = _columns(data, file)
    fault = _length_fault(columns)
    if fault is None:
        digest = np.stack([columns.pop("digest_hi"), columns.pop("digest_lo")], axis=1)
        table = ChunkTable(digest=digest, **columns)
        fault = _range_fault(table, manifest) or _box_fault(table, manifest)
    if fault is not None:
        raise FormatError(f"{file}: {fault}.", file=file)
    return table


def _columns(data: bytes, file: str) -> dict[str, NDArray[Any]]:
    header = parse_header(data, len(data), file)
    columns: dict[str, NDArray[Any]] = {}
    for name, code, shape, start, _ in header.entries:
        if _COLUMNS.get(name) != code or len(shape) != 1:
            raise FormatError(
                f"{file}: {name!r} of type {code} and shape {list(shape)} is not a column.", file=file
            )
        columns[name] = np.frombuffer(data, _DTYPE[code], shape[0], start)
    if columns.keys() != _COLUMNS.keys():
        raise FormatError(
            f"{file}: the columns {sorted(_COLUMNS.keys() - columns.keys())} are missing.", file=file
        )
    return columns


def _length_fault(columns: dict[str, NDArray[Any]]) -> str | None:
    lengths = {name: len(column) for name, column in columns.items()}
    offsets, sizes = lengths.pop("box_offsets"), lengths.pop("box_sizes")
    lengths["box_start"] -= 1
    if len(set(lengths.values())) > 1:
        return "its columns differ in length"
    if offsets != sizes:
        return "its boxes have different numbers of offsets and sizes"
    return None


def _range_fault(table: ChunkTable, manifest: Manifest) -> str | None:
    tensor, file = table.tensor, table.file
    if not _within(tensor, len(manifest.tensors)):
        return "a chunk is of a tensor that the manifest does not have"
    if len(tensor) and (np.diff(tensor) < 0).any():
        return "its chunks are not sorted by tensor"
    if not _within(file, len(manifest.files)):
        return "a chunk is in a file that the manifest does not have"
    sizes = np.array([record.size for record in manifest.files], np.int64)
    starts = np.array([record.data_start for record in manifest.files], np.int64)
    if len(file):
        room = sizes[file] - table.byte_start  # overflows only for byte_start < 0, which the next line finds
        bad = (table.byte_start < starts[file]) | (table.byte_count < 0) | (table.byte_count > room)
        if bad.any():
            row = int(bad.argmax())
            return (
                f"chunk {row} has the bytes {table.byte_start[row]} to "
                f"{int(table.byte_start[row]) + int(table.byte_count[row])} of "
                f"{manifest.files[file[row]].name}, whose data are the bytes "
                f"{starts[file[row]]} to {sizes[file[row]]}"
            )
        order = np.lexsort((table.byte_count, table.byte_start, file))  # an empty chunk before its neighbour
        begin, end = table.byte_start[order], (table.byte_start + table.byte_count)[order]
        shared = (begin[1:] < end[:-1]) & (file[order][1:] == file[order][:-1])
        if shared.any():
            one, two = order[int(shared.argmax())], order[int(shared.argmax()) + 1]
            return f"the chunks {one} and {two} share bytes of {manifest.files[file[one]].name}"
    return None


def _within(column: NDArray[np.int64], count: int) -> bool:
    return not len(column) or (int(column.min()) >= 0 and int(column.max()) < count)


def _box_fault(table: ChunkTable, manifest: Manifest) -> str | None:
    pointers, tensors = table.box_start, manifest.tensors
    ndim_of = np.array([len(record.shape) for record in tensors], np.int64)
    ndim = ndim_of[table.tensor] if len(table) else np.empty(0, np.int64)
    if (
        pointers[0] != 0
        or pointers[-1] != len(table.box_sizes)
        or (pointers[1:] - pointers[:-1] != ndim).any()
    ):
        return "the boxes do not have the dimensions of their tensors"
    itemsize = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    itemsize_of = np.array([itemsize[record.dtype] for record in tensors], np.int64)
    nbytes_of = itemsize_of.copy()
    for dims in np.unique(ndim_of).tolist():
        rows, alike = np.flatnonzero(ndim == dims), np.flatnonzero(ndim_of == dims)
        at = pointers[rows][:, None] + np.arange(dims)
        offsets, sizes = table.box_offsets[at], table.box_sizes[at]
        extents = np.fromiter(chain.from_iterable([tensors[row].shape for row in alike.tolist()]), np.int64)
        of_tensors = extents.reshape(len(alike), dims)
        nbytes_of[alike] *= of_tensors.prod(axis=1)
        shapes = of_tensors[np.searchsorted(alike, table.tensor[rows])]
        outside = ((offsets < 0) | (sizes < 0) | (offsets > shapes) | (sizes > shapes - offsets)).any(axis=1)
        if outside.any():
            row = int(outside.argmax())
            return (
                f"chunk {rows[row]} of {tensors[table.tensor[rows[row]]].key!r} has the box at "
                f"{offsets[row].tolist()} of sizes {sizes[row].tolist()}, outside of {shapes[row].tolist()}"
            )
        nbytes = sizes.prod(axis=1, dtype=np.int64) * itemsize_of[table.tensor[rows]]
        if (nbytes != table.byte_count[rows]).any():
            row = int((nbytes != table.byte_count[rows]).argmax())
            return (
                f"chunk {rows[row]} of {tensors[table.tensor[rows[row]]].key!r} has {nbytes[row]} bytes, "
                f"but its entry says {table.byte_count[rows[row]]}"
            )
    return _sum_fault(table, tensors, nbytes_of)


def _sum_fault(
    table: ChunkTable, tensors: tuple[TensorRecord, ...], nbytes_of: NDArray[np.int64]
) -> str | None:
    """The fault of a tensor whose chunks have too many or too few bytes. Sums of byte counts may overflow."""
    ends = row_pointers(table.byte_count)
    if (ends[1:] < ends[:-1]).any():
        return "its chunks have 2^63 bytes or more together"
    found = np.diff(ends[np.searchsorted(table.tensor, np.arange(len(tensors) + 1))])
    if (found != nbytes_of).any():
        row = int((found != nbytes_of).argmax())
        record = tensors[row]
        return (
            f"the chunks of {record.key!r} have {found[row]} bytes together, but {record.dtype} of shape "
            f"{list(record.shape)} has {nbytes_of[row]}"
        )
    return None
