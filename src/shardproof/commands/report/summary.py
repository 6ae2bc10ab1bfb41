"""The contents of one checkpoint: folded rows of tensors, bytes by part of the tree and by writer.

Note: folding
    ``layers.0.wq``, ``layers.1.wq``, ... become ``layers.{0..31}.wq`` if dtype and shape are the same. A row
    stands for exactly the keys that its pattern spells. Index sets join only where the rest is equal: two
    numbered levels (``layers.{0..3}.experts.{0..7}``) fold to one row only if every combination is there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import NATIVE, tensors_in_values
from shardproof.engine.format import Manifest, TensorRecord
from shardproof.engine.format import tensor_bytes as tensor_bytes
from shardproof.engine.planning import ChunkTable

Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Folded(Generic[Label]):
    """A row that stands for `count` keys of equal label."""

    pattern: str
    count: int
    label: Label
    first: str
    """The first of the keys, in the order they were given."""


def fold(items: Iterable[tuple[str, Label]]) -> list[Folded[Label]]:
    """Folds keys by the numbers in them, where everything else, and the label, is equal.

    Rows are in the order of the first key of each.

    >>> rows = fold([("a.0.w", "f32"), ("a.1.w", "f32"), ("a.2.w", "f32"), ("a.3.w", "f64"), ("b", "f32")])
    >>> [(row.pattern, row.count) for row in rows]
    [('a.{0..2}.w', 3), ('a.3.w', 1), ('b', 1)]
    """
    items = list(items)
    order = {key: place for place, (key, _) in enumerate(items)}
    rows: dict[tuple[tuple[str | None, ...], Label], list[_Row]] = {}
    for key, label in items:
        words = key.split(".")
        numbers = tuple(frozenset((int(word),)) for word in words if _is_index(word))
        template = tuple(None if _is_index(word) else word for word in words)
        rows.setdefault((template, label), []).append(_Row(numbers, 1, key))
    folded = []
    for (template, label), group in rows.items():
        # The last level first: experts of a layer are joined before the layers are.
        for level in reversed(range(template.count(None))):
            group = _join(group, level, order)
        folded += [Folded(_pattern(template, row.numbers), row.count, label, row.first) for row in group]
    return sorted(folded, key=lambda row: order[row.first])


def index_ranges(numbers: Iterable[int]) -> str:
    """A set of numbers as ranges.

    >>> index_ranges({0, 1, 2, 3, 7, 9, 10})
    '0..3,7,9,10'
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(
        f"{first}..{last}" if last - first > 1 else ",".join(map(str, range(first, last + 1)))
        for first, last in spans
    )


@dataclass(frozen=True, slots=True)
class _Row:
    numbers: tuple[frozenset[int], ...]
    count: int
    first: str


def _is_index(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 9 and (word == "0" or word[0] != "0")


def _join(rows: list[_Row], level: int, order: dict[str, int]) -> list[_Row]:
    """Joins rows that differ in one level only."""
    groups: dict[tuple[frozenset[int], ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.numbers[:level] + row.numbers[level + 1 :], []).append(row)
    joined = []
    for others, group in groups.items():
        numbers = frozenset[int]().union(*(row.numbers[level] for row in group))
        first = min((row.first for row in group), key=order.__getitem__)
        count = sum(row.count for row in group)
        joined.append(_Row((*others[:level], numbers, *others[level:]), count, first))
    return joined


def _pattern(template: tuple[str | None, ...], numbers: tuple[frozenset[int], ...]) -> str:
    levels = iter(numbers)
    words = []
    for word in template:
        if word is None:
            level = next(levels)
            word = f"{{{index_ranges(level)}}}" if len(level) > 1 else str(next(iter(level)))
        words.append(word)
    return ".".join(words)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """The stored tensors of one folded key, dtype and shape."""

    key: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Bytes of all these tensors."""


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part of the tree and all below it."""

    part: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class WriterRow:
    """The chunks that one rank wrote into one file."""

    rank: int
    """The rank; -1 if the format does not record it."""
    file: str
    """Its name; with the folder, if the save of another step wrote it."""
    tensors: int
    """Number of tensors with a part in the file."""
    chunks: int
    bytes: int
    """Bytes of the chunks; the file is a little larger."""
    referenced: bool
    """True if the save of an earlier step wrote the file, and this step refers to it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of one checkpoint, or of a part of its tree."""

    location: str
    format: str
    prefix: str | None
    """The part of the tree that is summarised; None for all."""
    step: int | None
    time: float | None
    writer: str
    attempt: str
    repaired: bool
    world_size: int
    metadata: dict[str, Any]
    provenance: dict[str, Any]
    """The origin of the save; empty if it is not recorded."""
    tensors: int
    bytes: int
    referenced_bytes: int
    """The part of `bytes` that is in files of other steps."""
    chunks: int
    rows: tuple[TensorRow, ...]
    parts: tuple[PartRow, ...]
    writers: tuple[WriterRow, ...]
    aliases: dict[str, str]
    """Tied tensors: key to the key it is stored under."""
    objects: tuple[str, ...]
    """Keys of plain values."""
    notes: tuple[str, ...] = ()
    """What the format cannot prove or lost, a sentence each."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Values that cannot be read: key to a description."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def is_below(key: str, prefix: str | None) -> bool:
    """True if `key` is `prefix` or below it, or if `prefix` is None.

    >>> is_below("model.w", "model"), is_below("model2.w", "model"), is_below("x", None)
    (True, False, True)
    """
    return prefix is None or key == prefix or key.startswith(f"{prefix}.")


def summarise(
    location: str,
    manifest: Manifest,
    table: ChunkTable,
    *,
    prefix: str | None = None,
    depth: int = 2,
    format: str = NATIVE,  # noqa: A002 as in sp.open
    notes: Sequence[str] = (),
    unreadable: Mapping[str, str] = MappingProxyType({}),
) -> Summary:
    """The summary of a checkpoint, or of the part of its tree below `prefix`.

    Args:
        location: where the checkpoint is.
        manifest: its manifest.
        table: its chunk table.
        prefix: of the keys to summarise, in whole words; None for all.
        depth: how many words of a key name a part of the tree, counted below `prefix`.
        format: name of the format.
        notes: what the format cannot prove or lost.
        unreadable: values of the manifest that cannot be read, with descriptions.
    """
    chosen = [row for row, record in enumerate(manifest.tensors) if is_below(record.key, prefix)]
    stored = [manifest.tensors[row] for row in chosen]
    inner = tensors_in_values(format, manifest.objects, [record.key for record in stored])
    records = [record for record in stored if record.key not in inner]
    among = np.zeros(len(manifest.tensors), bool)
    among[chosen] = True
    chunks = np.flatnonzero(among[table.tensor])
    elsewhere = np.array([bool(record.folder) for record in manifest.files], bool)
    referenced = chunks[elsewhere[table.file[chunks]]] if len(elsewhere) else chunks
    base = 0 if prefix is None else prefix.count(".") + 1
    return Summary(
        location=location,
        format=format,
        notes=tuple(notes),
        prefix=prefix,
        step=manifest.step,
        time=manifest.time if format == "shardproof" else None,
        writer=manifest.writer,
        attempt=manifest.attempt,
        repaired=manifest.repaired,
        world_size=manifest.world_size,
        metadata=dict(manifest.metadata),
        provenance=dict(manifest.provenance),
        tensors=len(records),
        bytes=sum(map(tensor_bytes, stored)),
        referenced_bytes=int(table.byte_count[referenced].sum()),
        chunks=len(chunks),
        rows=_tensor_rows(records),
        parts=_part_rows(stored, base + depth, inner),
        writers=_writer_rows(manifest, table, chunks, everything=prefix is None),
        aliases={key: target for key, target in manifest.aliases.items() if is_below(key, prefix)},
        objects=tuple(key for key in manifest.objects if is_below(key, prefix) and key not in unreadable),
        unreadable={key: kind for key, kind in unreadable.items() if is_below(key, prefix)},
    )


def _tensor_rows(records: Sequence[TensorRecord]) -> tuple[TensorRow, ...]:
    rows = []
    for row in fold((record.key, (record.dtype, tuple(record.shape))) for record in records):
        dtype, shape = row.label
        size = row.count * math.prod(shape) * DTYPES[dtype].itemsize
        rows.append(TensorRow(row.pattern, row.count, dtype, shape, size))
    return tuple(rows)


def _part_rows(records: Sequence[TensorRecord], depth: int, inner: Set[str]) -> tuple[PartRow, ...]:
    totals: dict[str, list[int]] = {}
    for record in records:
        # The last word names the tensor itself, so a part is never a single leaf of a deeper tree.
        words = record.key.split(".")
        part = ".".join(words[: max(min(depth, len(words) - 1), 1)])
        total = totals.setdefault(part, [0, 0])
        total[0] += record.key not in inner
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
