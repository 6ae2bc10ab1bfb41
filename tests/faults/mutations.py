"""Random changes to a checkpoint's parts that keep every digest right, so that no digest hides them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from shardproof.engine.format import (
    ChunkHasher,
    bytes_digest,
    digests_as_table,
    digests_from_bytes,
    encode_entries,
    parse_header,
    shard_header,
)
from tests.faults.forging import Forgery

__all__ = ["PARTS", "change_json", "mutate"]

_NUMBERS = (-(2**63), -1, 0, 1, 2, 3, 7, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1)
_VALUES = (
    *_NUMBERS,
    2**63,
    2**64,
    2**70,
    1.5,
    1e300,
    True,
    None,
    "",
    "x",
    "w",
    [],
    {},
    [[]],
    [2**62, 4],
    [-1],
)
_CODES = ("I64", "U64", "F64", "C64", "I32", "U8", "BOOL", "F4", "BF16", "O")


def _cut(values: list[Any], random: Random) -> list[Any]:
    """A list that is shorter, longer, turned around, mixed, or holds an item twice."""
    at = random.randrange(len(values) + 1)
    return random.choice(
        [
            values[:at],
            values[at:],
            values + values[:at],
            values[:at] + values[at + 1 :],
            values[::-1],
            random.sample(values, len(values)),
            [],
        ]
    )


def _change_column(forgery: Forgery, random: Random) -> None:
    """Length, order or values of a column of the index."""
    name = random.choice(list(forgery.columns))
    column = forgery.columns[name]
    if random.random() < 0.4 or not len(column):
        forgery.columns[name] = np.array(_cut(column.tolist(), random), column.dtype)
        return
    rows = random.sample(range(len(column)), random.choice([1, 1, 2, len(column)]) if len(column) > 1 else 1)
    numbers = [number % 2**64 for number in _NUMBERS] if column.dtype == np.uint64 else list(_NUMBERS)
    for row in rows:
        change = random.choice(["set", "add", "copy"])
        if change == "set":
            column[row] = random.choice(numbers)
        elif change == "copy":
            column[row] = column[random.randrange(len(column))]
        elif column.dtype != np.uint64 and abs(int(column[row])) < 2**62:
            column[row] += random.choice([-8, -4, -1, 1, 4, 8])


def _change_index_header(forgery: Forgery, random: Random) -> None:
    """Type, shape or place of a column, with its bytes as they are."""

    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        name = random.choice([key for key in header if key != "__metadata__"])
        entry = header[name]
        (count,) = entry["shape"]
        forms = [[count, 1], [1, count], [count // 2, 2], [2 * count], [], [count, 0], [0], [1] * 70]
        kind = random.choice(["dtype", "shape", "both", "offsets", "swap", "drop", "metadata"])
        if kind in ("dtype", "both"):
            entry["dtype"] = random.choice(_CODES)
        if kind in ("shape", "both"):
            entry["shape"] = random.choice(forms)
        if kind == "offsets":
            entry["data_offsets"][random.randrange(2)] = random.choice(_VALUES)
        elif kind == "swap":
            other = random.choice([key for key in header if key != "__metadata__"])
            header[name], header[other] = header[other], header[name]
        elif kind == "drop":
            header.pop(random.choice(list(header)))
        elif kind == "metadata":
            header["__metadata__"] = random.choice(_VALUES)
        text = json.dumps(header).encode()
        text = text.ljust(max(length, len(text)))
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    forgery.index = change


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [path] * bool(path) + [below for key, item in inner for below in _paths(item, (*path, key))]


def change_json(value: Any, random: Random) -> None:
    """Replaces, drops or repeats something anywhere in a JSON value."""
    path = random.choice(_paths(value))
    at = value
    for key in path[:-1]:
        at = at[key]
    key, item = path[-1], at[path[-1]]
    if isinstance(item, list) and random.random() < 0.5:
        at[key] = _cut(item, random)
    elif isinstance(item, dict) and item and random.random() < 0.5:
        item[random.choice(["w", "b", "blob", "@digests", "", "x.y"])] = random.choice(
            [*_VALUES, *item.values()]
        )
    elif random.random() < 0.1 and isinstance(at, dict):
        del at[key]
    elif isinstance(item, int) and random.random() < 0.5:
        at[key] = item + random.choice([-8, -1, 1, 8])
    else:
        at[key] = random.choice(_VALUES)


def _change_manifest(forgery: Forgery, random: Random) -> None:
    change_json(forgery.manifest, random)


@dataclass
class _Entry:
    name: str
    code: str
    shape: list[Any]
    data: bytes


def _change_shard(forgery: Forgery, random: Random) -> None:
    """Entries of the shard file, its tables of digests, or its declaration of the save."""
    raw = forgery.shard
    try:
        header = parse_header(raw, len(raw), "shard")
        declared = json.loads(header.metadata["shardproof"])
    except Exception:
        return  # an earlier change broke the header
    entries = [_Entry(name, code, list(shape), raw[a:b]) for name, code, shape, a, b in header.entries]
    chunks = [entry for entry in entries if not entry.name.startswith("@")]
    part = random.choice(["declaration", "chunks", "tables"])
    if part == "declaration":
        change_json(declared, random)
    elif part == "chunks":
        chunks = _changed_chunks(chunks, random)
    tables = _tables(chunks)
    if part == "tables":
        tables = _changed_tables(tables, random)
    forgery.shard = _shard([*chunks, *tables], json.dumps(declared))
    start = 8 + int.from_bytes(forgery.shard[:8], "little")
    record = forgery.manifest["files"][0]
    forgery.columns["byte_start"] += start - record[3]
    record[1], record[3] = len(forgery.shard), start


def _changed_chunks(chunks: list[_Entry], random: Random) -> list[_Entry]:
    if not chunks or random.random() < 0.3:
        return _cut(chunks, random)
    chunk = random.choice(chunks)
    kind = random.choice(["name", "code", "shape", "data", "box"])
    if kind == "name":
        chunk.name = random.choice(
            ["", "w", "w[]", "w[0:1]", "[0:1]", "w[0:99999999999999999999,0:1]", "b[0:5]", "w[1:0,0:4]",
             f"w[0:{2**63},0:4]", f"w[{2**62}:{2**62},0:4]", "@padding", "@blocks", "none[0:1]",
             "w[0:2,0:4][0:1]"]
        )  # fmt: skip
    elif kind == "code":
        chunk.code = random.choice(_CODES)
    elif kind == "shape":
        chunk.shape = _cut(chunk.shape, random)
    elif kind == "data":
        chunk.data = random.choice([b"", chunk.data * 2, chunk.data[:4]])
    else:
        key, _, box = chunk.name.partition("[")
        numbers = [int(number) for part in box.rstrip("]").split(",") if part for number in part.split(":")]
        if numbers:
            numbers[random.randrange(len(numbers))] += random.choice([-1, 1, 2, 2**62])
        parts = [f"{a}:{b}" for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        chunk.name = f"{key}[{','.join(parts)}]"
        chunk.shape = [b - a for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        chunk.data = chunk.data[:4].ljust(max(0, 4 * int(np.prod(chunk.shape, dtype=object))) % 10_000)
    return chunks


def _tables(chunks: list[_Entry]) -> list[_Entry]:
    """Padding, digests of blocks and digests of chunks."""
    size = sum(len(chunk.data) for chunk in chunks)
    hashers = [ChunkHasher(chunk.data) for chunk in chunks]
    blocks = [block for hasher in hashers for block in hasher.blocks()]
    of_blocks, of_chunks = digests_from_bytes(blocks), digests_from_bytes([one.digest() for one in hashers])
    found = [_Entry("@padding", "U8", [-size % 8], bytes(-size % 8))] if size % 8 else []
    if blocks:
        found.append(_Entry("@blocks", "U64", [len(of_blocks), 2], digests_as_table(of_blocks)))
    return [*found, _Entry("@digests", "U64", [len(of_chunks), 2], digests_as_table(of_chunks))]


def _changed_tables(tables: list[_Entry], random: Random) -> list[_Entry]:
    if random.random() < 0.3:
        return _cut(tables, random)
    table = random.choice(tables)
    kind = random.choice(["name", "code", "shape", "rows", "data"])
    if kind == "name":
        table.name = random.choice(["@digests", "@blocks", "@padding", "w[0:2,0:4]", ""])
    elif kind == "code":
        table.code = random.choice(_CODES)
    elif kind == "shape":
        table.shape = random.choice([table.shape[::-1], [2, *table.shape], [len(table.data) // 8], []])
    elif kind == "rows":
        rows = random.choice([0, 1, 2, 5])
        table.data, table.shape = (table.data * 9)[: 16 * rows], [rows, 2]
    else:
        table.data = bytes(random.randrange(256) for _ in table.data)
    return tables


def _shard(entries: list[_Entry], declared: str) -> bytes:
    counts = np.array([len(entry.data) for entry in entries], np.int64)
    starts = np.cumsum(counts) - counts
    texts = [
        f'{json.dumps(entry.name)}:{{"dtype":{json.dumps(entry.code)},"shape":{json.dumps(entry.shape)},'
        f'"data_offsets":[{start},{start + count}]}}'
        for entry, start, count in zip(entries, starts.tolist(), counts.tolist(), strict=True)
    ]
    data = b"".join(entry.data for entry in entries)
    plain = ",".join(texts).encode()
    written = plain
    try:
        names = [entry.name for entry in entries]
        written = encode_entries(
            names, [entry.code for entry in entries], [entry.shape for entry in entries], starts, counts
        )
    except Exception:
        pass  # no writer makes such entries, so no digest of them is right
    return (
        shard_header(plain, {"shardproof": declared, "digest": bytes_digest(declared.encode() + written)})
        + data
    )


PARTS: dict[str, Callable[[Forgery, Random], None]] = {
    "columns": _change_column,
    "index header": _change_index_header,
    "manifest": _change_manifest,
    "shard": _change_shard,
}


def mutate(forgery: Forgery, part: str, random: Random) -> None:
    """Makes a few changes to a part, mostly one, and seals the files."""
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        PARTS[part](forgery, random)
    forgery.seal()
