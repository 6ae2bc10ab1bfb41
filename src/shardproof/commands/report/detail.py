"""One key of a checkpoint: the chunks of a tensor, or a plain value."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardproof.commands.report.summary import tensor_bytes
from shardproof.engine.format import Manifest
from shardproof.engine.planning import ChunkTable


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One stored box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    """Its name, with the folder in front if another step's save wrote it."""
    rank: int
    byte_start: int
    """First byte in the file."""
    byte_stop: int
    """One past the last."""
    digest: str
    """Of the chunk, 32 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class TensorDetail:
    """A tensor as it is stored."""

    key: str
    stored_as: str
    """The key that this one is tied to, or the same key."""
    tied: tuple[str, ...]
    """The other keys that are tied to it."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    chunks: tuple[ChunkRow, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"kind": "tensor", **asdict(self)}


@dataclass(frozen=True, slots=True)
class ObjectDetail:
    """A plain value as it is stored."""

    key: str
    value: Any
    """JSON, with tags for other types, for example ``{"$tuple": [1, 2]}``."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"kind": "object", **asdict(self)}


def detail(manifest: Manifest, table: ChunkTable, key: str) -> TensorDetail | ObjectDetail | None:
    """The tensor or plain value under exactly this key; None if there is none."""
    if key in manifest.objects:
        return ObjectDetail(key, manifest.objects[key])
    stored = manifest.aliases.get(key, key)
    row = next((row for row, record in enumerate(manifest.tensors) if record.key == stored), None)
    if row is None:
        return None
    record = manifest.tensors[row]
    same = {stored, *(alias for alias, target in manifest.aliases.items() if target == stored)}
    return TensorDetail(
        key=key,
        stored_as=stored,
        tied=tuple(sorted(same - {key})),
        dtype=record.dtype,
        shape=tuple(record.shape),
        bytes=tensor_bytes(record),
        chunks=_chunk_rows(manifest, table, row),
    )


def rows_of(table: ChunkTable, tensor: int) -> slice:
    """The rows of the chunk table that belong to one tensor."""
    return slice(*np.searchsorted(table.tensor, [tensor, tensor + 1]).tolist())


def _chunk_rows(manifest: Manifest, table: ChunkTable, tensor: int) -> tuple[ChunkRow, ...]:
    chosen, boxes = rows_of(table, tensor), table.boxes
    rows = []
    for row in range(chosen.start, chosen.stop):
        record = manifest.files[int(table.file[row])]
        start = int(table.byte_start[row])
        high, low = (int(half) for half in table.digest[row])
        rows.append(
            ChunkRow(
                *boxes.pair(row),
                record.place,
                record.rank,
                start,
                start + int(table.byte_count[row]),
                f"{high:016x}{low:016x}",
            )
        )
    return tuple(sorted(rows, key=lambda chunk: chunk.offsets))


_KINDS = {"ints": "long list of int", "floats": "long list of float", "str": "long text"}
"""Names of the kinds of values that are stored as tensors, where they are not those of Python."""


def spelled(value: Any) -> str:
    """A stored plain value in Python's spelling; unknown tags stay as they are.

    >>> spelled({"lr": 0.1, "betas": {"$tuple": [0.9, {"$float": "inf"}]}, "amsgrad": None})
    "{'lr': 0.1, 'betas': (0.9, inf), 'amsgrad': None}"
    """
    if isinstance(value, list):
        return f"[{', '.join(map(spelled, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag in ("$float", "$int") and isinstance(inner, str):
            return inner
        if tag == "$tuple" and isinstance(inner, list):
            return f"({', '.join(map(spelled, inner))}{',' if len(inner) == 1 else ''})"
    if "$tensor" in value:
        kind = value.get("kind", "tensor")
        return (
            f"<tensor {json.dumps(value['$tensor'])}>" if kind == "tensor" else f"<{_KINDS.get(kind, kind)}>"
        )
    return f"{{{', '.join(f'{key!r}: {spelled(entry)}' for key, entry in value.items())}}}"
