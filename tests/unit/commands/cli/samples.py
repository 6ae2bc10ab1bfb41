"""Checkpoints for tests, written with the format layer alone: no torch, no processes, any layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardproof.dtypes import DTYPES
from shardproof.engine.format import (
    BLOCKS,
    DIGESTS,
    MANIFEST_NAME,
    PADDING,
    ChunkHasher,
    FileRecord,
    Manifest,
    TensorRecord,
    bytes_digest,
    chunk_name,
    digests_from_bytes,
    encode_entries,
    encode_index,
    encode_manifest,
    file_digest,
    index_name,
    shard_header,
    shard_name,
)
from shardproof.engine.geometry import row_pointers
from shardproof.engine.planning.read_plan import ChunkTable
from shardproof.storage import LocalStorage, Storage

Box = tuple[tuple[int, ...], tuple[int, ...]]
SECONDS = 60


@dataclass
class Sample:
    """A state: arrays of bits with torch's name of their dtype, and how they are cut over ranks."""

    tensors: Mapping[str, np.ndarray[Any, Any]]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of keys whose dtype is not that of the array."""
    cuts: Mapping[str, Sequence[tuple[int, Box]]] = field(default_factory=dict)
    """Key to (rank, box) of each chunk; rank 0 holds tensors that are not listed."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    step: int | None = None
    attempt: str = "a1"
    time: float = 1_700_000_000.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def dtype(self, key: str) -> str:
        return self.dtypes.get(key, self.tensors[key].dtype.name)

    def cut(self, key: str) -> Sequence[tuple[int, Box]]:
        array = self.tensors[key]
        return self.cuts.get(key, [(0, ((0,) * array.ndim, array.shape))] if array.size else [])


def rows_cut(shape: tuple[int, ...], parts: int, dim: int = 0) -> list[tuple[int, Box]]:
    """A box for each of `parts` ranks, cut along `dim`."""
    borders = [shape[dim] * part // parts for part in range(parts + 1)]
    boxes: list[tuple[int, Box]] = []
    for rank in range(parts):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = borders[rank], borders[rank + 1] - borders[rank]
        if sizes[dim]:
            boxes.append((rank, (tuple(offsets), tuple(sizes))))
    return boxes


def write(folder: str | Path | Storage, sample: Sample, *, commit: bool = True) -> Manifest:
    """Writes a checkpoint as a save does; without `commit` all but the manifest."""
    storage = LocalStorage(folder) if isinstance(folder, str | Path) else folder
    keys = sorted(sample.tensors)
    files, rows = [], []
    for rank in range(sample.world_size):
        record, chunks = _write_shard(storage, sample, rank, keys)
        rows += [(keys.index(key), len(files), *chunk) for key, *chunk in chunks]
        files.append(record)
    rows.sort(key=lambda row: row[0])
    index = encode_index(_table(rows))
    name = index_name(sample.attempt)
    _put(storage, name, index)
    manifest = Manifest(
        writer="shardproof test",
        attempt=sample.attempt,
        step=sample.step,
        time=sample.time,
        world_size=sample.world_size,
        metadata=dict(sample.metadata),
        provenance=dict(sample.provenance),
        tensors=tuple(TensorRecord(key, sample.dtype(key), sample.tensors[key].shape) for key in keys),
        aliases=dict(sample.aliases),
        objects=dict(sample.objects),
        files=tuple(files),
        index=FileRecord(name, len(index), bytes_digest(index)),
    )
    if commit:
        storage.publish(MANIFEST_NAME, encode_manifest(manifest), replace=True)
    return manifest


def cut(folder: Path, attempt: str = "") -> None:
    """Cuts a shard file of an attempt, as a save does that dies while it writes."""
    shard = min((folder / "shards").glob(f"*-{attempt}*"))
    os.truncate(shard, shard.stat().st_size - 1)


def _write_shard(
    storage: Storage, sample: Sample, rank: int, keys: Sequence[str]
) -> tuple[FileRecord, list[Any]]:
    parts = [
        (key, box, np.ascontiguousarray(sample.tensors[key][_slices(box)]).tobytes())
        for key in keys
        for owner, box in sample.cut(key)
        if owner == rank
    ]
    parts.sort(key=lambda part: -DTYPES[sample.dtype(part[0])].alignment)
    names, codes, shapes, counts = [], [], [], []
    hashers = [ChunkHasher(data) for _, _, data in parts]
    digests = digests_from_bytes([hasher.digest() for hasher in hashers])
    blocks = digests_from_bytes([block for hasher in hashers for block in hasher.blocks()])
    for key, (offsets, sizes), data in parts:
        dtype = DTYPES[sample.dtype(key)]
        names.append(chunk_name(key, offsets, sizes))
        codes.append(dtype.code)
        shapes.append((*sizes, 2) if dtype.parts == 2 else sizes)
        counts.append(len(data))
    padding = -sum(counts) % 8
    if padding:
        names, codes, shapes, counts = (
            [*names, PADDING],
            [*codes, "U8"],
            [*shapes, (padding,)],
            [*counts, padding],
        )
    for name, table in ((BLOCKS, blocks), (DIGESTS, digests)):
        if len(table) or name == DIGESTS:
            names, codes, shapes, counts = (
                [*names, name],
                [*codes, "U64"],
                [*shapes, table.shape],
                [*counts, table.nbytes],
            )
    starts = np.cumsum(counts) - counts
    about = {
        "version": 1,
        "attempt": sample.attempt,
        "step": sample.step,
        "time": sample.time,
        "rank": rank,
        "world_size": sample.world_size,
        "files": sample.world_size,
        "tensors": {key: [sample.dtype(key), list(sample.tensors[key].shape)] for key in keys},
        "aliases": dict(sample.aliases),
        "objects": dict(sample.objects) if rank == 0 else {},
        "metadata": dict(sample.metadata),
    }
    entries, text = encode_entries(names, codes, shapes, starts, np.array(counts)), json.dumps(about)
    header = shard_header(entries, {"shardproof": text, "digest": bytes_digest(text.encode() + entries)})
    tail = [bytes(padding), *(table.astype("<u8").tobytes() for table in (blocks, digests))]
    data = b"".join([header, *(part[2] for part in parts), *tail])
    name = shard_name(rank, sample.attempt)
    _put(storage, name, data)
    chunks = [
        (key, len(header) + int(starts[row]), len(raw), digests[row], box)
        for row, (key, box, raw) in enumerate(parts)
    ]
    return FileRecord(name, len(data), file_digest(header, digests), len(header), rank), chunks


def _table(rows: Sequence[Any]) -> ChunkTable:
    def column(at: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([row[at] for row in rows], np.int64)

    boxes = [row[5] for row in rows]
    return ChunkTable(
        tensor=column(0),
        file=column(1),
        byte_start=column(2),
        byte_count=column(3),
        digest=np.array([row[4] for row in rows], np.uint64).reshape(-1, 2),
        box_start=row_pointers([len(box[0]) for box in boxes]),
        box_offsets=np.array([offset for box in boxes for offset in box[0]], np.int64),
        box_sizes=np.array([size for box in boxes for size in box[1]], np.int64),
    )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(*box, strict=True))


def _put(storage: Storage, name: str, data: bytes) -> None:
    sink = storage.create(name)
    sink.write_at(0, memoryview(data))
    sink.finish(len(data))


def model(layers: int = 3, *, seed: int = 0, dim: int = 8) -> dict[str, np.ndarray[Any, Any]]:
    """A small model and its optimizer state."""
    random = np.random.default_rng(seed)
    state: dict[str, np.ndarray[Any, Any]] = {"model.embed.weight": random.random((2 * dim, dim), np.float32)}
    for layer in range(layers):
        for name in ("wq", "wo"):
            state[f"model.layers.{layer}.{name}"] = random.random((dim, dim), np.float32)
    for key in list(state):
        state[f"optimizer.{key.removeprefix('model.')}.exp_avg"] = random.random(state[key].shape, np.float32)
    return state


def shardproof(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, with a time limit."""
    return subprocess.run(
        [sys.executable, "-m", "shardproof", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        **options,
    )
