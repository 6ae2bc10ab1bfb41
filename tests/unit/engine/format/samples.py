"""A small checkpoint's manifest, chunk table and shard file, for the tests of the format."""

from __future__ import annotations

import json

import numpy as np
import xxhash

from shardproof.dtypes import DTYPES
from shardproof.engine.format import (
    DIGESTS,
    PADDING,
    FileRecord,
    Manifest,
    TensorRecord,
    bytes_digest,
    chunk_name,
    encode_entries,
    encode_index,
    shard_header,
)
from shardproof.engine.planning.read_plan import ChunkTable


def table() -> ChunkTable:
    """Three tensors: (4, 2) float32 in two chunks, a 0-d int64, an empty one in an empty chunk."""
    return ChunkTable(
        tensor=np.array([0, 0, 1, 2]),
        file=np.array([0, 1, 0, 1]),
        byte_start=np.array([4096, 4096, 4112, 4112]),
        byte_count=np.array([16, 16, 8, 0]),
        digest=np.arange(8, dtype=np.uint64).reshape(4, 2) + np.uint64(2**64 - 9),
        box_start=np.array([0, 2, 4, 4, 6]),
        box_offsets=np.array([0, 0, 2, 0, 0, 0]),
        box_sizes=np.array([2, 2, 2, 2, 0, 3]),
    )


def manifest(index: bytes | None = None, **changes: object) -> Manifest:
    index = encode_index(table()) if index is None else index
    fields: dict[str, object] = {
        "writer": "shardproof 0.1.0",
        "attempt": "5f0c",
        "step": 1000,
        "time": 1763712000.25,
        "world_size": 2,
        "metadata": {"loss": 2.5, "note": 'a "quoted" \\ text: [{', "run": None},
        "tensors": (
            TensorRecord("a.weight", "float32", (4, 2)),
            TensorRecord("step", "int64", ()),
            TensorRecord("z", "bfloat16", (0, 3)),
        ),
        "aliases": {"b.weight": "a.weight"},
        "objects": {"schedule": {"$tuple": [1, -0.0, True]}},
        "files": (
            FileRecord("shards/00000-5f0c.safetensors", 4136, 32 * "0", 4096, 0),
            FileRecord("shards/00001-5f0c.safetensors", 4128, 32 * "f", 4096, 1),
        ),
        "index": FileRecord("index-5f0c.safetensors", len(index), bytes_digest(index)),
    }
    return Manifest(**(fields | changes))  # type: ignore[arg-type]


def sealed(value: object) -> bytes:
    """Manifest text of any JSON value, with the right digest."""
    text = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    body = text[:-1]
    return body + b',"digest":"' + bytes_digest(body).encode() + b'"}\n'


def shard(names: list[str], keep: dict[str, bytes] | None = None) -> bytes:
    """A shard file as saving lays it out, with one chunk of shape (3,) for each dtype."""
    ordered = sorted(names, key=lambda name: -DTYPES[name].alignment)
    rng = np.random.default_rng(0)
    entries, data, digests, start = [], b"", [], 0
    for name in ordered:
        dtype = DTYPES[name]
        payload = (rng.integers(0, 2, 3 * dtype.itemsize, np.uint8)).tobytes()
        shape = (3,) if dtype.parts == 1 else (3, dtype.parts)
        entries.append((chunk_name(name, (0,), (3,)), dtype.code, shape, start, len(payload)))
        digests.append(xxhash.xxh3_128_intdigest(payload))
        data += payload
        start += len(payload)
        if keep is not None:
            keep[name] = payload
    if start % 8:
        entries.append((PADDING, "U8", (-start % 8,), start, -start % 8))
        data += bytes(-start % 8)
        start += -start % 8
    halves = np.array([[digest >> 64, digest & (2**64 - 1)] for digest in digests], np.uint64).reshape(-1, 2)
    entries.append((DIGESTS, "U64", halves.shape, start, halves.nbytes))
    columns = [list(column) for column in zip(*entries, strict=True)]
    text = encode_entries(*columns[:3], np.array(columns[3]), np.array(columns[4]))
    return (
        shard_header(text, {"shardproof": json.dumps({"version": 1})}) + data + halves.astype("<u8").tobytes()
    )
