"""The bits of stored tensors, box by box, as arrays of numpy.

A checkpoint of shardproof's own format is read and verified without torch. Any other is read by
`shardproof.loading`, which imports torch.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardproof.commands.report.description import Stored
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import NATIVE, Foreign
from shardproof.engine.format import (
    BLOCK_BYTES,
    BlockDigests,
    ChunkVerifier,
    Manifest,
    TensorRecord,
    block_digests,
    digest_of_blocks,
    locate_files,
)
from shardproof.engine.geometry import row_major_strides
from shardproof.engine.planning import ChunkTable, RequestedBoxes, plan_reads
from shardproof.engine.storage import Storage
from shardproof.errors import PlainDataError

Bits: TypeAlias = NDArray[np.uint8]


class StoredBits(Protocol):
    """The bits of the tensors of one checkpoint."""

    def box(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Bits:
        """Reads a box of a tensor; no size is 0.

        Returns:
            (elements, itemsize) uint8, the elements in row-major order.

        Raises:
            CorruptChunkError: stored bytes do not match their digest.
            StorageError: a file is missing, short or unreadable.
            TilingError: the chunks of the tensor do not cover it exactly once.
        """

    def inlined(self, key: str, data: Any) -> Any:
        """An encoded plain value with the bytes of its tensors inside.

        Args:
            key: of the value, for errors.
            data: as it is stored: an object with the member ``$tensor`` refers to a tensor.

        Raises:
            PlainDataError: the value is malformed, or its format cannot give it.
            CorruptChunkError, StorageError, TilingError: as `box`.
        """

    def close(self) -> None:
        """Closes the files that reading opened."""


def open_bits(place: Storage | Foreign, stored: Stored, *, trust_pickle: bool = False) -> StoredBits:
    """Opens the bits of a described checkpoint."""
    if stored.format == NATIVE:
        storage = place.storage if isinstance(place, Foreign) else place
        return _NativeBits(storage, stored.manifest, stored.table)
    return _ForeignBits(place, stored.format, trust_pickle=trust_pickle)


def _text(bits: Bits) -> str:
    return base64.b64encode(bits.tobytes()).decode()


def _floats(bits: Bits) -> list[Any]:
    values = bits.reshape(-1).view("<f8").tolist()
    return [value if math.isfinite(value) else {"$float": str(value)} for value in values]


_INLINE: dict[str, Callable[[Bits, TensorRecord], Any]] = {
    "tensor": lambda bits, record: {"$value": [record.dtype, [*record.shape], _text(bits)]},
    "array": lambda bits, record: {"$array": [record.dtype, [*record.shape], _text(bits)]},
    "bytes": lambda bits, record: {"$bytes": _text(bits)},
    "bytearray": lambda bits, record: {"$bytearray": _text(bits)},
    "str": lambda bits, record: bits.tobytes().decode(),
    "ints": lambda bits, record: bits.reshape(-1).view("<i8").tolist(),
    "floats": lambda bits, record: _floats(bits),
}
"""The encoding of a value without a reference, from its bits, by the kind of the reference."""


class _NativeBits:
    """Reads boxes of shardproof's own format; `StoredBits`."""

    def __init__(self, storage: Storage, manifest: Manifest, table: ChunkTable) -> None:
        self._storage = storage
        self._manifest = manifest
        self._table = table
        self._files = locate_files(storage, manifest)
        self._blocks = BlockDigests(self._files, manifest, table)
        rows = {record.key: row for row, record in enumerate(manifest.tensors)}
        self._rows = rows | {key: rows[target] for key, target in manifest.aliases.items()}

    def box(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Bits:
        row = self._rows[key]
        itemsize = DTYPES[self._manifest.tensors[row].dtype].itemsize
        wanted = RequestedBoxes(np.array([row]), np.array(offsets, np.int64), np.array(sizes, np.int64))
        plan = plan_reads(self._manifest.tensors, self._table, wanted)
        found = np.empty((*sizes, itemsize), np.uint8)
        parts = zip(
            plan.chunk.tolist(),
            plan.chunk_start.tolist(),
            plan.chunk_stop.tolist(),
            plan.in_requested[:, : len(sizes)].tolist(),
            plan.sizes[:, : len(sizes)].tolist(),
            strict=True,
        )
        verifier = ChunkVerifier.of_table(self._manifest, self._table, plan.chunk)
        for at, (chunk, start, stop, into, extent) in enumerate(parts):
            elements = self._range(verifier, at, chunk, start * itemsize, stop * itemsize)
            first, last = self._table.box_start[chunk : chunk + 2].tolist()
            stored_sizes = self._table.box_sizes[first:last].tolist()
            strides = [step * itemsize for step in row_major_strides(stored_sizes)]
            part = np.lib.stride_tricks.as_strided(
                elements, (*extent, itemsize), (*strides, 1), writeable=False
            )
            found[tuple(slice(low, low + size) for low, size in zip(into, extent, strict=True))] = part
        return found.reshape(-1, itemsize)

    def inlined(self, key: str, data: Any) -> Any:
        if isinstance(data, list):
            return [self.inlined(key, item) for item in data]
        if not isinstance(data, dict):
            return data
        if "$tensor" not in data:
            return {name: self.inlined(key, item) for name, item in data.items()}
        stored, kind = data["$tensor"], data.get("kind", "tensor")
        if stored not in self._rows or kind not in _INLINE:
            raise PlainDataError(f"{key}: malformed reference to a tensor: {str(data)[:200]}", path=key)
        record = self._manifest.tensors[self._rows[stored]]
        empty = np.empty((0, 1), np.uint8)
        bits = empty if 0 in record.shape else self.box(stored, [0] * len(record.shape), record.shape)
        if "position" in data:
            return {"$stream": [_text(bits), data["position"]]}
        return _INLINE[kind](bits, record)

    def close(self) -> None:
        for storage in {id(storage): storage for storage in (self._storage, *dict(self._files))}.values():
            storage.close()

    def _range(self, verifier: ChunkVerifier, position: int, chunk: int, start: int, stop: int) -> Bits:
        """Bytes [start, stop) of a chunk, verified by its position in the verifier.

        The whole blocks around the range are read, or the whole chunk if its block digests are not known.
        """
        table = self._table
        storage, name = self._files[int(table.file[chunk])]
        at, count = int(table.byte_start[chunk]), int(table.byte_count[chunk])
        known = self._blocks.of(chunk, verifier.digests[position]) if count > BLOCK_BYTES else None
        first, last = 0, count
        if known is not None:
            first, last = (
                start // BLOCK_BYTES * BLOCK_BYTES,
                min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, count),
            )
        memory = memoryview(bytearray(last - first))
        storage.read_into(name, at + first, memory)
        found = block_digests(memory)
        if known is None:
            verifier.check(position, digest_of_blocks(found))
        else:
            verifier.check_blocks(position, first, found, known[first // BLOCK_BYTES :][: len(found)])
        return np.frombuffer(memory, np.uint8)[start - first : stop - first]


class _ForeignBits:
    """Reads boxes of a checkpoint of another project; `StoredBits`."""

    def __init__(
        self,
        place: Storage | Foreign,
        format: str,  # noqa: A002 as in sp.open
        *,
        trust_pickle: bool,
    ) -> None:
        from shardproof.engine.loading import open_storage  # imports torch

        self._checkpoint = open_storage(place, format=format, trust_pickle=trust_pickle, warn=False)

    def box(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Bits:
        import torch

        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        values = self._checkpoint[key][box]
        bits: Bits = values.contiguous().reshape(-1, 1).view(torch.uint8).reshape(values.numel(), -1).numpy()
        return bits

    def inlined(self, key: str, data: Any) -> Any:
        from shardproof.engine.state import encode_plain  # imports torch

        return encode_plain(self._checkpoint.decoded(data), key)

    def close(self) -> None:
        self._checkpoint.close()
