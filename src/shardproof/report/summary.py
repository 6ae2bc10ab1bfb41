"""What one checkpoint holds: its tensors folded, its bytes by part of the tree and by writer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardproof.dtypes import DTYPES
from shardproof.format import Manifest, TensorRecord
from shardproof.planning import ChunkTable
from shardproof.report.folding import fold

__all__ = ["PartRow", "Summary", "TensorRow", "WriterRow", "is_below", "summarise", "tensor_bytes"]


def tensor_bytes(record: TensorRecord) -> int:
    """Bytes of a stored tensor's elements."""
    return math.prod(record.shape) * DTYPES[record.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Stored tensors of one folded key, dtype and shape."""

    key: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Of all of them."""


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part of the tree and all below it."""

    part: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class WriterRow:
    """What one rank wrote into one file."""

    rank: int
    file: str
    """Its name, after the folder where it is another step's."""
    tensors: int
    """Tensors that it wrote a part of."""
    chunks: int
    bytes: int
    """Of the chunks; the file is a little larger."""
    borrowed: bool
    """Whether another save wrote the file: an earlier step, which this one refers to."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What one checkpoint, or a part of its tree, holds."""

    location: str
    prefix: str | None
    """The part of the tree that is summarised; None for all."""
    step: int | None
    time: float
    writer: str
    attempt: str
    repaired: bool
    world_size: int
    metadata: dict[str, Any]
    tensors: int
    bytes: int
    borrowed: int
    """Of these, bytes that lie in files of other steps."""
    chunks: int
    rows: tuple[TensorRow, ...]
    parts: tuple[PartRow, ...]
    writers: tuple[WriterRow, ...]
    aliases: dict[str, str]
    """Tied tensors: key to the key it is stored under."""
    objects: tuple[str, ...]
    """Keys of plain values."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def is_below(key: str, prefix: str | None) -> bool:
    """Whether a key is a part of the tree, or lies in it.

    >>> is_below("model.w", "model"), is_below("model2.w", "model"), is_below("x", None)
    (True, False, True)
    """
    return prefix is None or key == prefix or key.startswith(f"{prefix}.")


def summarise(
    location: str, manifest: Manifest, table: ChunkTable, *, prefix: str | None = None, depth: int = 2
) -> Summary:
    """The summary of a checkpoint, or of the part of its tree below `prefix`.

    Args:
        location: where the checkpoint is.
        manifest: its manifest.
        table: its chunk table.
        prefix: of the keys to summarise, in whole words; None for all.
        depth: how many words of a key name a part of the tree, counted below `prefix`.
    """
    chosen = [row for row, record in enumerate(manifest.tensors) if is_below(record.key, prefix)]
    records = [manifest.tensors[row] for row in chosen]
    among = np.zeros(len(manifest.tensors), bool)
    among[chosen] = True
    chunks = np.flatnonzero(among[table.tensor])
    base = 0 if prefix is None else prefix.count(".") + 1
    return Summary(
        location=location,
        prefix=prefix,
        step=manifest.step,
        time=manifest.time,
        writer=manifest.writer,
        attempt=manifest.attempt,
        repaired=manifest.repaired,
        world_size=manifest.world_size,
        metadata=dict(manifest.metadata),
        tensors=len(records),
        bytes=sum(map(tensor_bytes, records)),
        borrowed=_borrowed_bytes(manifest, table, chunks),
        chunks=len(chunks),
        rows=_tensor_rows(records),
        parts=_part_rows(records, base + depth),
        writers=_writer_rows(manifest, table, chunks, everything=prefix is None),
        aliases={key: target for key, target in manifest.aliases.items() if is_below(key, prefix)},
        objects=tuple(key for key in manifest.objects if is_below(key, prefix)),
    )


def _borrowed_bytes(manifest: Manifest, table: ChunkTable, chunks: np.ndarray[Any, Any]) -> int:
    elsewhere = np.array([bool(record.folder) for record in manifest.files], bool)
    rows = chunks[elsewhere[table.file[chunks]]] if len(elsewhere) else chunks
    return int(table.byte_count[rows].sum())


def _tensor_rows(records: Sequence[TensorRecord]) -> tuple[TensorRow, ...]:
    rows = []
    for row in fold((record.key, (record.dtype, tuple(record.shape))) for record in records):
        dtype, shape = row.label
        size = row.count * math.prod(shape) * DTYPES[dtype].itemsize
        rows.append(TensorRow(row.pattern, row.count, dtype, shape, size))
    return tuple(rows)


def _part_rows(records: Sequence[TensorRecord], depth: int) -> tuple[PartRow, ...]:
    totals: dict[str, list[int]] = {}
    for record in records:
        # The last word names the tensor itself, so a part is never a single leaf of a deeper tree.
        words = record.key.split(".")
        part = ".".join(words[: max(min(depth, len(words) - 1), 1)])
        total = totals.setdefault(part, [0, 0])
        total[0] += 1
        total[1] += tensor_bytes(record)
    return tuple(PartRow(part, count, size) for part, (count, size) in totals.items())


def _writer_rows(
    manifest: Manifest, table: ChunkTable, chunks: np.ndarray[Any, Any], *, everything: bool
) -> tuple[WriterRow, ...]:
    count = len(manifest.files)
    file, tensor = table.file[chunks], table.tensor[chunks]
    sizes = np.zeros(count, np.int64)
    np.add.at(sizes, file, table.byte_count[chunks])
    chunk_counts = np.bincount(file, minlength=count)
    tensor_counts = np.bincount(
        np.unique(file * max(len(manifest.tensors), 1) + tensor) // max(len(manifest.tensors), 1),
        minlength=count,
    )
    return tuple(
        WriterRow(
            record.rank,
            record.place,
            int(tensor_counts[row]),
            int(chunk_counts[row]),
            int(sizes[row]),
            bool(record.folder),
        )
        for row, record in enumerate(manifest.files)
        if everything or chunk_counts[row]
    )
