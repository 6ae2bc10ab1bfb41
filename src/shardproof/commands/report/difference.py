"""The difference of two checkpoints: structure, plain values, and the bits of tensors.

Where both checkpoints cut a tensor into the same boxes and have digests, `diff` compares digests and reads no
chunk. Otherwise both are read, box by box. Both compare bits: a NaN equals itself, and 0.0 is not -0.0.

Plain values are compared after decoding: an array is equal if it is stored as a tensor in one checkpoint and
inside of a value in the other.

Only the state counts. Step, time, metadata and layout are not differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof._utils.arguments import check_mapping, check_texts
from shardproof._utils.mappings import objects_with
from shardproof.commands.report.description import Stored, check_files, describe
from shardproof.commands.report.detail import rows_of
from shardproof.commands.report.divided_reads import Readers, boxes_of, read_boxes
from shardproof.commands.report.measures import MOST_NUMBERS, MeasuredDifference, numbers
from shardproof.commands.report.stored_bits import Bits, StoredBits, open_bits
from shardproof.commands.report.summary import tensor_bytes
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import Foreign, keeps_tensors_of_values, tensors_in_values
from shardproof.engine.format import TensorRecord
from shardproof.engine.planning import (
    ChunkTable,
    Patterns,
    check_patterns,
    rename_keys,
    selects,
    stored_name,
)
from shardproof.engine.storage import Storage
from shardproof.errors import PlainDataError, StructureError
from shardproof.workers import Job, Where

_JOB = Job("the comparison", "run it again")
_LONGEST_TEXT = 2000
"""Characters of a plain value in a `Change`, at most."""
BOX_BYTES = 32 << 20
"""Bytes of the boxes that are read, at most, unless a single row is larger. Two of them are in memory."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose two sides differ, with both sides as texts."""

    key: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Uncompared:
    """A plain value that one of the two checkpoints cannot give."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A tensor of the same dtype and shape whose bits differ."""

    key: str
    how: str
    """"digest": `different` of `total` chunks differ. "read": `different` of `total` elements do."""
    different: int
    total: int
    measured: MeasuredDifference | None = None
    """By how much the numbers differ, if that was asked."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of `diff`. All key lists are sorted."""

    a: str
    b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[Change, ...]
    """Differences of kind, dtype, shape or tied tensor."""
    objects: tuple[Change, ...]
    """Plain values."""
    values: tuple[ValueDifference, ...]
    same_tensors: int
    """Tensors equal to the bit."""
    by_digest: int
    """Tensors compared only by digests."""
    by_reading: int
    """Tensors that were read, because their layouts differ or one format has no digests."""
    bytes_read: int
    """Bytes of tensors that were read, in both checkpoints."""
    uncompared: tuple[Uncompared, ...] = ()
    """Plain values that cannot be read. They may differ."""
    sides: tuple[Stored, ...] = field(default=(), repr=False, compare=False)
    """The descriptions of both, from which `diff` made it."""

    @property
    def differs(self) -> bool:
        """True if a difference was found."""
        return bool(self.only_a or self.only_b or self.changed or self.objects or self.values)

    @property
    def same(self) -> bool:
        """True if both have the same state, and all of it was compared."""
        return not self.differs and not self.uncompared

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        values = [
            {
                "key": value.key,
                "how": value.how,
                "different": value.different,
                "total": value.total,
                "measured": value.measured and value.measured.to_json(),
            }
            for value in self.values
        ]
        rest = asdict(replace(self, values=(), sides=()))
        del rest["sides"]
        return {"same": self.same, **rest, "values": values}


def most_changed_first(values: Sequence[ValueDifference]) -> list[ValueDifference]:
    """The tensors that are finite in one of the two alone, then the others by the relative difference."""
    return sorted(
        values,
        key=lambda value: (
            (not value.measured.one_finite, -value.measured.relative) if value.measured else (True, 0.0)
        ),
    )


class _Side:
    """The keys of one checkpoint as its user sees them, under the names that are compared."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.objects = dict.fromkeys(stored.manifest.objects)
        """Keys of plain values."""
        self._parts: dict[str, Any] = {}
        """Encoded data of the plain values that are parts of a stored one."""
        rows = {record.key: row for row, record in enumerate(stored.manifest.tensors)}
        inner = tensors_in_values(stored.format, stored.manifest.objects, rows)
        self.tensors: dict[str, int] = {key: row for key, row in rows.items() if key not in inner}
        """Row of every tensor. A tied tensor has the row of the key it is stored under."""
        self.tensors |= {key: rows[target] for key, target in stored.manifest.aliases.items()}
        self._names = {key: key for key in (*self.tensors, *self.objects)}
        self._stored_keys = dict(self._names)
        self._references: dict[str, set[str]] = {}
        """Keys of the tensors that a plain value refers to, by its key."""

    def take(self, names: Mapping[str, str]) -> None:
        """Takes the keys in `names`, under these names, and forgets all others."""
        self._names = dict(names)
        self._stored_keys = {name: key for key, name in names.items()}
        self.objects = dict.fromkeys(names[key] for key in self.objects if key in names)
        self.tensors = {names[key]: row for key, row in self.tensors.items() if key in names}

    def split(self, other: _Side) -> None:
        """Splits the dicts that the other checkpoint stores as separate values.

        The dict of an object's state is one plain value in some formats, and a value for each of its keys in
        others.
        """
        pending = [key for key in self.objects if key not in other.objects and key not in other.tensors]
        heads = {
            ".".join(words[:count])
            for words in (key.split(".") for key in (*other.objects, *other.tensors) if pending)
            for count in range(1, len(words))
        }
        while pending:
            key = pending.pop()
            if key not in heads or key in other.objects or self._unreadable(key) is not None:
                continue
            data = self.encoded(key)
            if not isinstance(data, dict) or not data or any(name.startswith("$") for name in data):
                continue
            del self.objects[key]
            for name, item in data.items():
                below = f"{key}.{name}"
                tensor = item.get("$tensor", "") if isinstance(item, dict) else ""
                if not (self._names.get(tensor) == below and below in self.tensors):
                    self.objects[below] = None
                    self._parts[below] = item
                    pending.append(below)

    def forget_parts(self, other: _Side) -> None:
        """Forgets the tensors inside plain values that the other checkpoint stores in the same value.

        The comparison of the values includes them.
        """
        for key in [key for key in self.tensors if key not in other.tensors and key not in other.objects]:
            above = key
            while "." in above:
                above = above.rpartition(".")[0]
                if above in self.objects and above in other.objects and self._refers(above, key):
                    del self.tensors[key]
                    break

    def _refers(self, value: str, key: str) -> bool:
        if not keeps_tensors_of_values(self.stored.format):
            return False
        if value not in self._references:
            parts = objects_with(self.encoded(value), "$tensor")
            self._references[value] = {self._names.get(part["$tensor"], "") for part in parts}
        return key in self._references[value]

    def encoded(self, key: str) -> Any:
        """The encoded data of a plain value. Raises `PlainDataError` if it cannot be read."""
        if key in self._parts:
            return self._parts[key]
        return self.stored.manifest.objects[self._stored_keys[key]]

    def _unreadable(self, key: str) -> str | None:
        return None if key in self._parts else self.stored.unreadable.get(self._stored_keys[key])

    def described(self) -> dict[str, str]:
        """Each key with its structure as a text."""
        manifest = self.stored.manifest
        kinds = {key: manifest.tensors[row] for key, row in self.tensors.items()}
        tensors = {key: f"{record.dtype} {list(record.shape)}" for key, record in kinds.items()}
        for key, target in manifest.aliases.items():
            if key in self._names and target in self._names:
                tensors[self._names[key]] += f", tied to {self._names[target]}"
        return tensors | {key: self._unreadable(key) or "plain value" for key in self.objects}


def _choose_keys(a: _Side, b: _Side, include: Patterns, exclude: Patterns, rename: Mapping[str, str]) -> None:
    """Leaves the keys to compare, those of `a` under their new names; see `diff`."""
    keys_a = dict.fromkeys((*a.tensors, *a.objects))
    keys_b = {key: stored_name(key, rename, keys_a.keys()) for key in (*b.tensors, *b.objects)}
    for option, patterns in (("include", include), ("exclude", exclude)):
        check_patterns(option, patterns, [*keys_a, *keys_b.values()])
    selected = selects(include, exclude)
    names = rename_keys(filter(selected, keys_a), rename, stored_first=True)
    renamed = set(names.values())
    a.take(names)
    b.take({key: key for key, stored in keys_b.items() if key in renamed or selected(stored)})
    if not names:
        raise StructureError(f"include and exclude leave no key of {a.stored.location}: nothing to compare")


def _structure_changes(a: _Side, b: _Side) -> tuple[list[str], list[str], list[Change]]:
    """Keys that only `a` has, keys that only `b` has, and keys that differ in more than their values."""
    left, right = a.described(), b.described()
    changed = [
        Change(key, left[key], right[key])
        for key in sorted(left.keys() & right.keys())
        if left[key] != right[key]
    ]
    return sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys()), changed


def diff(
    a: Storage | Foreign,
    b: Storage | Foreign,
    *,
    format: str | None = None,  # noqa: A002 as in sp.open
    other_format: str | None = None,
    trust_pickle: bool = False,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Mapping[str, str] | None = None,
    measure: bool = False,
    workers: int = 1,
    on: Where = "processes",
    deadline: float = 300.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Difference:
    """Compares the states in two checkpoints of any formats.

    `diff` trusts the digests; `verify` checks them against the bytes. `diff` checks that the files with the
    bytes are there, have their recorded sizes and can be opened.

    Args:
        a: one checkpoint.
        b: the other.
        format: name of the format of `a`; None to find it.
        other_format: name of the format of `b`; None to find it.
        trust_pickle: True to unpickle values of other formats that are no plain data.
        include: patterns (`fnmatch`, over the whole key or the keys above it) of the keys to compare, as `a`
            has them; None for all. A key of `b` counts under the name that it would have in `a`.
        exclude: patterns of the keys to leave out, of the same names.
        rename: key of `a` to key of `b`, for a key and all keys below it, as in a conversion of `a` to `b`.
            The longest key of `a` that applies decides. An empty key of `b` removes the prefix.
        measure: True to read the tensors whose digests differ, and to measure by how much numbers differ.
        workers: processes that read tensors. One on "processes" is this process. The result does not depend
            on the workers. Several processes import the main module: a script calls `diff` below
            ``if __name__ == "__main__":``.
        on: "processes" for processes of this machine, "ray" for a Ray cluster. All nodes need the file
            systems of both checkpoints.
        deadline: seconds that the workers may go without progress.
        on_progress: called with the bytes read so far and in all.

    Raises:
        TypeError, ValueError: an argument does not fit.
        NotCommittedError, FormatError, StorageError: one of them cannot be read, or one of its files is
            missing or has another size.
        CorruptChunkError: a chunk that had to be read does not match its digest.
        TilingError: the chunks of a tensor that had to be read do not cover it.
        StructureError: a pattern or a rename fits no key, the patterns leave no key of `a`, two keys get one
            name; or there are several workers, and a storage has options, or no path or URL names it.
        ShardproofError: Ray is not installed, or a worker ended or made no progress.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> from shardproof.report import diff
        >>> from shardproof.storage import LocalStorage
        >>> run = tempfile.mkdtemp()
        >>> _ = sp.save(f"{run}/a", {"model": {"w": torch.ones(2)}, "epoch": 3})
        >>> _ = sp.save(f"{run}/b", {"w": torch.ones(2)})
        >>> a, b = LocalStorage(f"{run}/a"), LocalStorage(f"{run}/b")
        >>> diff(a, b, include="model", rename={"model": ""}).same
        True
    """
    for option, patterns in (("include", include), ("exclude", exclude)):
        check_texts(option, patterns, "a pattern, a list of patterns or None")
    check_mapping("rename", rename, "a dict of key to key, or None", texts=True)
    readers = Readers(workers, on, deadline)
    one, other = (
        describe(place, format=name, trust_pickle=trust_pickle)
        for place, name in ((a, format), (b, other_format))
    )
    for place, stored in ((a, one), (b, other)):
        check_files(place, stored)
    side_a, side_b = _Side(one), _Side(other)
    if include is not None or exclude is not None or rename:
        _choose_keys(side_a, side_b, include, exclude, rename or {})
    side_a.split(side_b)
    side_b.split(side_a)
    side_a.forget_parts(side_b)
    side_b.forget_parts(side_a)
    only_a, only_b, changed = _structure_changes(side_a, side_b)
    pairs = list(_comparable(side_a, side_b))
    values, unlike = _compare_digests(one, other, pairs, measure)
    objects, uncompared = _object_changes((a, side_a), (b, side_b), trust_pickle=trust_pickle)
    if unlike:
        values += _read_differences(((a, one), (b, other)), unlike, measure, readers, on_progress)
    return Difference(
        one.location,
        other.location,
        tuple(only_a),
        tuple(only_b),
        tuple(changed),
        tuple(objects),
        tuple(sorted(values, key=lambda value: value.key)),
        len(pairs) - len(values),
        len(pairs) - len(unlike),
        len(unlike),
        2 * sum(tensor_bytes(pair.tensor) for pair in unlike),
        tuple(uncompared),
        (one, other),
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor that both have with the same dtype and shape."""

    key: str
    tensor: TensorRecord
    """As A has it."""
    other_key: str
    """Its key in B."""


def _compare_digests(
    one: Stored, other: Stored, pairs: Iterable[tuple[str, int, int]], measure: bool
) -> tuple[list[ValueDifference], list[_Pair]]:
    """Compares tensors by the digests of their chunks.

    Args:
        one: the description of one checkpoint.
        other: that of the other.
        pairs: key and rows of each tensor.
        measure: as of `diff`.

    Returns:
        The tensors whose chunks differ, and those to read.
    """
    values, unlike = list[ValueDifference](), list[_Pair]()
    for key, row_a, row_b in pairs:
        different = None
        record = one.manifest.tensors[row_a]
        if one.has_digests and other.has_digests:
            different = _different_chunks(one.table, row_a, other.table, row_b, len(record.shape))
        if different is None or (measure and different.any()):
            unlike.append(_Pair(key, record, other.manifest.tensors[row_b].key))
        elif different.any():
            values.append(ValueDifference(key, "digest", int(different.sum()), len(different)))
    return values, unlike


def _read_differences(
    sides: Sequence[tuple[Storage | Foreign, Stored]],
    pairs: Sequence[_Pair],
    measure: bool,
    readers: Readers,
    on_progress: Callable[[int, int], None] | None,
) -> list[ValueDifference]:
    """Reads tensors in both checkpoints and compares them, box by box.

    The counts and measures of the boxes of a tensor are joined in the order of the boxes.

    Args:
        sides: both checkpoints, with their descriptions.
        pairs: the tensors to read.
        measure: as of `diff`.
        readers: who reads.
        on_progress: as of `diff`.
    """
    boxes = []
    for pair in pairs:
        most = max(BOX_BYTES // DTYPES[pair.tensor.dtype].itemsize, 1)
        keys = pair.tensor.key, pair.other_key
        boxes.append(boxes_of(pair.tensor, keys, min(most, MOST_NUMBERS) if measure else most))
    every = [box for group in boxes for box in group]
    compared = read_boxes(_JOB, sides, every, partial(_compare_box, measure=measure), readers, on_progress)
    values = []
    for pair, group in zip(pairs, boxes, strict=True):
        different, measured = 0, MeasuredDifference() if measure else None
        for found in islice(compared, len(group)):
            different += found.different
            if measured is not None and found.measured is not None:
                measured.join(found.measured)
        if different:
            elements = sum(box.elements for box in group)
            values.append(ValueDifference(pair.key, "read", different, elements, measured))
    return values


def _comparable(a: _Side, b: _Side) -> Iterable[tuple[str, int, int]]:
    """Key and rows of each pair of tensors that both have with the same dtype and shape, once a pair."""
    seen = set()
    for key, row_a in a.tensors.items():
        row_b = b.tensors.get(key)
        if row_b is None or (row_a, row_b) in seen:
            continue
        seen.add((row_a, row_b))
        one, other = a.stored.manifest.tensors[row_a], b.stored.manifest.tensors[row_b]
        if one.dtype == other.dtype and one.shape == other.shape:
            yield key, row_a, row_b


def _different_chunks(
    a: ChunkTable, row_a: int, b: ChunkTable, row_b: int, ndim: int
) -> NDArray[np.bool_] | None:
    """A mask of the chunks that differ; None if the two have different boxes."""
    rows_a, rows_b = rows_of(a, row_a), rows_of(b, row_b)
    if rows_a.stop - rows_a.start != rows_b.stop - rows_b.start:
        return None
    boxes_a, order_a = _boxes_in_order(a, rows_a, ndim)
    boxes_b, order_b = _boxes_in_order(b, rows_b, ndim)
    if not np.array_equal(boxes_a, boxes_b):
        return None
    different: NDArray[np.bool_] = (a.digest[rows_a][order_a] != b.digest[rows_b][order_b]).any(axis=1)
    return different


def _boxes_in_order(table: ChunkTable, rows: slice, ndim: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets and sizes of a tensor's chunks, (n, 2d), sorted; and the order that sorts them."""
    boxes = table.boxes.boxes(np.arange(rows.start, rows.stop), ndim)
    columns = np.concatenate([boxes.offsets, boxes.sizes], axis=1)
    order = np.lexsort(columns.T[::-1]) if ndim else np.arange(len(columns))
    return columns[order], order


def _object_changes(
    a: tuple[Storage | Foreign, _Side], b: tuple[Storage | Foreign, _Side], *, trust_pickle: bool
) -> tuple[list[Change], list[Uncompared]]:
    """Plain values under a key of both that differ, and those that cannot be read.

    Values are compared as JSON text: 1, 1.0 and true are three values. Values with different texts that refer
    to tensors are compared with the bytes of their tensors inside.
    """
    (_, one), (_, other) = a, b
    changes, uncompared = [], []
    with ExitStack() as opened:
        bits: list[StoredBits] = []
        """Those of both checkpoints, once a value needs them."""
        for key in sorted(one.objects.keys() & other.objects.keys()):
            try:
                left, right = one.encoded(key), other.encoded(key)
                if _text(left) != _text(right) and (_has_tensors(left) or _has_tensors(right)):
                    for place, side in () if bits else (a, b):
                        opening = open_bits(place, side.stored, trust_pickle=trust_pickle)
                        bits.append(opened.enter_context(closing(opening)))
                    left, right = bits[0].inlined(key, left), bits[1].inlined(key, right)
            except PlainDataError as error:
                uncompared.append(Uncompared(key, error.message))
                continue
            if _text(left) != _text(right):
                changes.append(Change(key, _cut(_text(left)), _cut(_text(right))))
    return changes, uncompared


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... ({len(text)} characters)"


def _has_tensors(data: Any) -> bool:
    return any(True for _ in objects_with(data, "$tensor"))


@dataclass(frozen=True, slots=True)
class _ComparedBox:
    """The comparison of a box of both checkpoints."""

    different: int
    """Elements that differ in a bit."""
    measured: MeasuredDifference | None


def _compare_box(sides: Sequence[Bits], dtype: str, *, measure: bool) -> _ComparedBox:
    """Compares a box of both checkpoints."""
    left, right = sides
    different = 0 if np.array_equal(left, right) else int((left != right).any(axis=1).sum())
    measured = MeasuredDifference.of(numbers(left, dtype), numbers(right, dtype)) if measure else None
    return _ComparedBox(different, measured)
