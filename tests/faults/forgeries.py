"""Hostile manifests, indices, plain values and shard files, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.forging import Forgery

__all__ = ["CASES", "SHARDS", "VALUES", "Forge", "a_large_tensor", "cut_along_all", "with_value"]

Forge = Callable[[Forgery], object]
CASES: dict[str, Forge] = {}
"""Forgeries that no reader of manifest and index may accept."""
VALUES: dict[str, Any] = {}
"""Plain values that `shardproof.state` never writes."""
SHARDS: dict[str, Forge] = {}
"""Forgeries of a shard file, for readers of its header."""


def _set(*path: Any, to: Any) -> Forge:
    """Puts a value somewhere into the manifest."""

    def forge(forgery: Forgery) -> None:
        at: Any = forgery.manifest
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return forge


def _text(pattern: str, replacement: str) -> Forge:
    return lambda forgery: forgery.replace_in_manifest(pattern, replacement)


def _column(name: str, row: int, value: int) -> Forge:
    def forge(forgery: Forgery) -> None:
        forgery.columns[name][row] = value

    return forge


for number, name in enumerate(
    [
        "../x",
        "/etc/passwd",
        "shards/../../x",
        "",
        ".",
        "a//b",
        "a/./b",
        "nul\0",
        "\ud800",
        "..",
        "x/../../y",
        "a/",
    ]
):
    CASES[f"file name {number}"] = _set("files", 0, 0, to=name)
    CASES[f"index name {number}"] = _set("index", 0, to=name)
for size in (-1, 2**63, 2**64, 10**30, 1.5, "9", None, True, [], 2**62, 0):
    CASES[f"file size {size}"] = _set("files", 0, 1, to=size)
for start in (-1, 2**63, 2**62, 1.0, None):
    CASES[f"data start {start}"] = _set("files", 0, 3, to=start)
for shape in (
    [2**40],
    [2**62, 4],
    [2**62, 2**62],
    [-1],
    [2**63],
    [1.5],
    [True],
    ["6"],
    [6],
    6,
    None,
    [1] * 100,
    [0, 2**62, 2**62],
):
    CASES[f"shape {shape!s:.30}"] = _set("tensors", 2, 2, to=shape)
for dtype in ("object", "load", "", None, 3, "float32 ", "float64", "nn"):
    CASES[f"dtype {dtype}"] = _set("tensors", 2, 1, to=dtype)
for field, values in {
    "format": ["other", None, 1],
    "version": [0, 2, -1, 2**70, "1", True],
    "attempt": ["", "../x", "a/b", "x" * 200, 3],
    "step": [-1, 2**63, 1.5, "1"],
    "time": ["now", None],
    "world_size": [0, -1, 2**31, 2**70, "1"],
    "metadata": [[], None, "x"],
    "tensors": [{}, None, [[]], [["a"]], [["w", "float32", [6, 4], 1]], [None]],
    "aliases": [
        [],
        {"a": 1},
        {"a": "nothing"},
        {"a": "a"},
        {"a": "c", "c": "a"},
        {"w": "b"},
        {"a": "c", "c": "w"},
    ],
    "objects": [[], None],
    "files": [{}, [None], [[]], [["x", 1]], []],
    "index": [None, [], ["x"], {}],
}.items():
    for value in values:
        CASES[f"{field} {value!s:.30}"] = _set(field, to=value)
CASES |= {
    "an alias that is an object": _set("aliases", to={"plain.a": "w"}),
    "an object that is a tensor": _set("objects", "w", to=1),
    "a member too many": _set("surprise", to=1),
    "a member missing": lambda forgery: forgery.manifest.pop("objects"),
    "a file twice": lambda forgery: forgery.manifest["files"].append(list(forgery.manifest["files"][0])),
    "a rank beyond the world": _set("files", 0, 4, to=1),
    "a tensor twice": lambda forgery: forgery.manifest["tensors"].append(forgery.manifest["tensors"][-1]),
    "tensors out of order": lambda forgery: forgery.manifest["tensors"].reverse(),
    "a member twice": _text(r'"objects":\{', '"objects":{},"objects":{'),
    "an object twice": _text(r'"objects":\{', '"objects":{"plain.a":2,'),
    "an object twice, escaped": _text(
        r'"objects":\{', '"objects":{"pl\\\\u0061in.a":2,'.replace("\\\\", "\\")
    ),
    "an alias twice": _text(r'"aliases":\{', '"aliases":{"t":"w","t":"b"'),
    "nan": _text(r'"time":[0-9.]+', '"time":NaN'),
    "infinite": _text(r'"time":[0-9.]+', '"time":1e999'),
    "nan size": _text(r'safetensors",[0-9]+', 'safetensors",NaN'),
    "a size in floats": _text(r'safetensors",[0-9]+', 'safetensors",4e3'),
    "a number of a million digits": _text(r'"step":1', '"step":' + "9" * 1_000_000),
    "nested by a million": _text(
        r'"metadata":\{', '"metadata":{"x":' + "[" * 1_000_000 + "]" * 1_000_000 + ","
    ),
    "nested and never closed": _text(r'"metadata":\{', '"metadata":{"x":' + "[" * 1_000_000),
    "objects nested by a hundred thousand": _text(
        r'"metadata":\{', '"metadata":{"x":' + '{"a":' * 100_000 + "1" + "}" * 100_000 + ","
    ),
    "no json": lambda forgery: setattr(forgery, "text", lambda text: b"\x00\xff}"),
    "a list": lambda forgery: setattr(forgery, "text", lambda text: b"[[1]}"),
    "two values": lambda forgery: setattr(forgery, "text", lambda text: text[:-1] + b'} {"a":1}'),
    "not utf-8": lambda forgery: setattr(forgery, "text", lambda text: text.replace(b"run 1", b"run \xff")),
    "a lone surrogate": lambda forgery: setattr(
        forgery, "text", lambda text: text.replace(b'"blob":', b'"\\ud800":')
    ),
}


def _index_header(change: Callable[[dict[str, Any]], None]) -> Forge:
    def forge(forgery: Forgery) -> None:
        def rewrite(data: bytes) -> bytes:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            change(header)
            text = json.dumps(header).encode().ljust(length)
            return len(text).to_bytes(8, "little") + text + data[8 + length :]

        forgery.index = rewrite

    return forge


def _index_length(length: int) -> Forge:
    def forge(forgery: Forgery) -> None:
        forgery.index = lambda data: length.to_bytes(8, "little") + data[8:]

    return forge


def _entry(name: str, **more: Any) -> Forge:
    return _index_header(lambda header: header[name].update(more))


def _without_a_chunk(forgery: Forgery) -> None:
    forgery.drop_chunk(int(forgery.chunks_of("w")[1]))


def _a_chunk_elsewhere(forgery: Forgery) -> None:
    row = forgery.chunks_of("w")[1]
    at = forgery.columns["box_start"][row]
    forgery.columns["box_offsets"][at] -= 1


def _one_chunk_for_all(forgery: Forgery) -> None:
    """All chunks of a tensor refer to the bytes and the digest of its first chunk."""
    rows = forgery.chunks_of("w")
    for name in ("byte_start", "digest_hi", "digest_lo"):
        forgery.columns[name][rows] = forgery.columns[name][rows[0]]


def _no_chunks(forgery: Forgery) -> None:
    forgery.columns = {name: column[:0] for name, column in forgery.columns.items()}
    forgery.columns["box_start"] = np.zeros(1, np.int64)


def a_large_tensor(forgery: Forgery) -> None:
    """A tensor of 2^40 elements, one chunk, in a file that says it is large enough."""
    forgery.manifest["tensors"][2][2] = [2**40, 1]
    for row in reversed(forgery.chunks_of("w")[1:].tolist()):
        forgery.drop_chunk(row)
    row = forgery.chunks_of("w")[0]
    at = forgery.columns["box_start"][row]
    forgery.columns["box_offsets"][at : at + 2] = 0
    forgery.columns["box_sizes"][at : at + 2] = [2**40, 1]
    forgery.columns["byte_count"][row] = 2**42
    forgery.columns["byte_start"][row] = len(forgery.shard)
    forgery.manifest["files"][0][1] = 2**43


def cut_along_all(forgery: Forgery) -> None:
    """A tensor of 30 dimensions in 16 chunks, each cut along four of them, so that all are: 2^30 corners."""
    forgery.manifest["tensors"].append(["x", "uint8", [2] * 30])
    forgery.manifest["files"][0][1] = 2**43
    sizes = np.full((16, 30), 2)
    for row in range(16):
        sizes[row, [(4 * row + at) % 30 for at in range(4)]] = 1
    new = {
        "tensor": np.full(16, len(forgery.manifest["tensors"]) - 1),
        "file": np.zeros(16, np.int64),
        "byte_start": 2**40 + np.arange(16) * 2**26,
        "byte_count": np.full(16, 2**26),
        "digest_hi": np.zeros(16, np.uint64),
        "digest_lo": np.zeros(16, np.uint64),
        "box_start": forgery.columns["box_start"][-1] + 30 * np.arange(1, 17),
        "box_offsets": np.zeros(16 * 30, np.int64),
        "box_sizes": sizes.ravel(),
    }
    forgery.columns = {name: np.append(column, new[name]) for name, column in forgery.columns.items()}


CASES |= {
    f"index header of {length} bytes": _index_length(length)
    for length in (0, 1, 2, 2**20, 2**31, 2**60, 2**63, 2**64 - 1)
}
for column in ("tensor", "file", "byte_start", "byte_count", "box_start", "box_offsets", "box_sizes"):
    for row in (0, -1):
        for value in (-1, 2**62, 2**63 - 1, -(2**63)):
            CASES[f"{column}[{row}] is {value}"] = _column(column, row, value)
CASES |= {
    "a chunk in the header": lambda forgery: forgery.columns["byte_start"].__setitem__(0, 8),
    "a chunk behind the end": lambda forgery: forgery.columns["byte_start"].__setitem__(
        0, len(forgery.shard)
    ),
    "a hole": _without_a_chunk,
    "an overlap": _a_chunk_elsewhere,
    "no chunks": _no_chunks,
    "chunks that share bytes": _one_chunk_for_all,
    "chunks out of order": lambda forgery: forgery.columns.update(
        tensor=forgery.columns["tensor"][::-1].copy()
    ),
    "fewer high halves of digests": lambda forgery: forgery.columns.update(
        digest_hi=forgery.columns["digest_hi"][:-1]
    ),
    "no low halves of digests": lambda forgery: forgery.columns.update(
        digest_lo=forgery.columns["digest_lo"][:0]
    ),
    "a column too short": lambda forgery: forgery.columns.update(file=forgery.columns["file"][:-1]),
    "no pointers": lambda forgery: forgery.columns.update(box_start=forgery.columns["box_start"][:0]),
    "a column missing": lambda forgery: forgery.columns.pop("digest_lo"),
    "a column too many": lambda forgery: forgery.columns.update(extra=forgery.columns["file"]),
    "a column of 2^40 rows": _entry("tensor", shape=[2**40], data_offsets=[0, 2**43]),
    "a column of no bytes and 2^40 rows": _entry("tensor", shape=[2**40]),
    "a column of rows times zero": _entry("tensor", shape=[2**40, 0]),
    "a column of another type": _entry("tensor", dtype="F64"),
    "a column of an unknown type": _entry("tensor", dtype="O"),
    "a column of negative bytes": _entry("tensor", data_offsets=[8, 0]),
    "columns over each other": _entry("file", data_offsets=[0, 80]),
    "an index that is no object": lambda forgery: setattr(
        forgery,
        "index",
        lambda data: data[:8] + b"[]".ljust(int.from_bytes(data[:8], "little")) + data[4096:],
    ),
    "an index nested deeply": lambda forgery: setattr(
        forgery, "index", lambda data: (200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995 + data
    ),
    "an empty index": lambda forgery: setattr(forgery, "index", lambda data: b""),
    "a large tensor": a_large_tensor,
    "a tensor cut along 30 dimensions": cut_along_all,
}

VALUES |= {
    "a reference to nothing": {"$tensor": "nothing"},
    "a reference to itself": {"$tensor": "evil"},
    "a reference to a value": {"$tensor": "plain.a"},
    "a reference to a number": {"$tensor": 5},
    "a reference to a list": {"$tensor": []},
    "a reference of no kind": {"$tensor": "w", "kind": "code"},
    "a reference of a strange kind": {"$tensor": "w", "kind": ["x"]},
    "an unknown kind": {"$code": "print(1)"},
    "a kind with company": {"$tuple": [1], "b": 2},
    "an array of objects": {"$array": ["object", [1], "gASVCgAAAAAAAACMBnByaW50lC4="]},
    "an array of void": {"$array": ["V8", [1], "AAAAAAAAAAA="]},
    "an array of 2^40": {"$array": ["float64", [2**40], ""]},
    "an array of -1": {"$array": ["float64", [-1], "AAAAAAAAAAA="]},
    "an array without a shape": {"$array": ["float64"]},
    "an array of no base64": {"$array": ["float64", [1], "%%%"]},
    "an array of structs": {"$array": ["f8,f8", [1], ""]},
    "an array of a list": {"$array": [["f8"], [1], ""]},
    "a scalar of objects": {"$scalar": ["O", "AAAAAAAAAAA="]},
    "a scalar of nothing": {"$scalar": ["float64", ""]},
    "a tensor of odd bytes": {"$value": ["float32", [1], "AAAA"]},
    "a tensor of another shape": {"$value": ["float32", [3], "AAAAAA=="]},
    "a tensor of no dtype": {"$value": ["load", [1], "AAAAAA=="]},
    "a dtype that is a function": {"$dtype": "load"},
    "a dtype that is a module": {"$dtype": "nn"},
    "a dtype that is a number": {"$dtype": 3},
    "a device of nowhere": {"$device": "nowhere:7"},
    "a device that is a list": {"$device": [1]},
    "a size of -1": {"$size": [-1]},
    "a size of text": {"$size": "ab"},
    "a size of a number": {"$size": 5},
    "a float of text": {"$float": "1.5"},
    "a float of a list": {"$float": []},
    "an int of a number": {"$int": 5},
    "an int of text": {"$int": "0x"},
    "bytes of a number": {"$bytes": 5},
    "bytes of no base64": {"$bytes": "=="},
    "bytes beyond ascii": {"$bytes": "é"},
    "a complex of one": {"$complex": [1]},
    "a complex of text": {"$complex": ["a", "b"]},
    "a complex of a dict": {"$complex": {}},
    "a set of lists": {"$set": [[1]]},
    "a set of a number": {"$set": 5},
    "a tuple of a number": {"$tuple": 5},
    "a dict of lists": {"$dict": [[[1], 2]]},
    "a dict of triples": {"$dict": [[1, 2, 3]]},
    "a dict of a number": {"$dict": 5},
    "a defaultdict of eval": {"$defaultdict": ["eval", []]},
    "a defaultdict of a list": {"$defaultdict": [[], []]},
    "a defaultdict of nothing": {"$defaultdict": []},
    "a counter of a number": {"$counter": 5},
    "an enum of nothing": {"$enum": ["os.system", "x"]},
    "an enum of a list": {"$enum": [[], []]},
    "an enum of a number": {"$enum": 5},
    "a dataclass of nothing": {"$dataclass": ["builtins.eval", {"source": "1"}]},
    "a dataclass of a list": {"$dataclass": ["x", []]},
    "a dataclass of a number": {"$dataclass": 5},
}


def with_value(value: Any) -> Forge:
    return lambda forgery: forgery.manifest["objects"].update(evil=value)


def _shard_header(change: Callable[[dict[str, Any]], object]) -> Forge:
    return lambda forgery: forgery.change_header(change)  # type: ignore[arg-type]


def _shard_length(length: int) -> Forge:
    def forge(forgery: Forgery) -> None:
        forgery.shard = length.to_bytes(8, "little") + forgery.shard[8:]

    return forge


def _first(header: dict[str, Any]) -> str:
    return next(name for name in header if name.startswith("w["))


def _renamed(new: str) -> Forge:
    def change(header: dict[str, Any]) -> None:
        header[new] = header.pop(_first(header))

    return _shard_header(change)


def _shard_entry(**more: Any) -> Forge:
    return _shard_header(lambda header: header[_first(header)].update(more))


SHARDS |= {f"header of {length} bytes": _shard_length(length) for length in (0, 1, 2**31, 2**60, 2**64 - 1)}
SHARDS |= {
    f"a chunk called {new!r:.40}": _renamed(new)
    for new in (
        "", "w", "w[", "w[]", "w[0:2]",
        "w[0:2,0:4,0:1]", "w[-2:0,0:4]", "w[2:0,0:4]", "w[9:11,0:4]", "v[0:2,0:4]",
        f"w[{10**30}:{10**30 + 2},0:4]", "w[" + "0:1," * 70 + "0:1]", "@w[0:2,0:4]", "../w[0:2,0:4]",
    )
}  # fmt: skip
SHARDS |= {
    "a chunk of 2^40 rows": _shard_entry(shape=[2**40, 4]),
    "a chunk of another type": _shard_entry(dtype="I32"),
    "a chunk of no type": _shard_entry(dtype="O"),
    "a chunk of negative bytes": _shard_entry(data_offsets=[32, 0]),
    "a chunk of a float": _shard_entry(data_offsets=[0, 32.5]),
    "a chunk of 2^70 bytes": _shard_entry(data_offsets=[0, 2**70]),
    "no digests": _shard_header(lambda header: header.pop("@digests")),
    "no metadata": _shard_header(lambda header: header.pop("__metadata__")),
    "metadata of a list": _shard_header(lambda header: header.update(__metadata__=[])),
    "metadata of numbers": _shard_header(lambda header: header["__metadata__"].update(shardproof=1)),
    "a declaration that is no json": _shard_header(
        lambda header: header["__metadata__"].update(shardproof="{")
    ),
    "a declaration nested deeply": _shard_header(
        lambda header: header["__metadata__"].update(shardproof='{"a":' + "[" * 300 + "]" * 300 + "}")
    ),
    "a declaration with a name twice": _shard_header(
        lambda header: header["__metadata__"].update(
            shardproof=header["__metadata__"]["shardproof"].replace(
                '{"version":1', '{"version":1,"version":1', 1
            )
        )
    ),
    "an entry twice": lambda forgery: forgery.header_text(
        forgery.header_before().replace(
            b',"@digests"', b',"w[0:3,0:4]":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]},"@digests"'
        )
    ),
    "nan in an entry": lambda forgery: forgery.header_text(
        forgery.header_before().replace(b'"data_offsets":[0', b'"data_offsets":[NaN')
    ),
}
for field, values in {
    "attempt": ["../../x", "", 3, "x" * 300],
    "rank": [-1, 1, 2**70, "0"],
    "world_size": [0, -1, 2**70],
    "files": [0, 2, -1, 2**62, 1.5],
    "time": ["x", None],
    "step": [-1, "x", 2**70],
    "tensors": [
        {}, [], {"w": 1}, {"w": ["float32", [2**62, 2**62]]}, {"w": ["object", [6, 4]]},
        {"w": ["float32", [-6, 4]]},
    ],
    "aliases": [[], {"a": "a"}, {"a": "nothing"}, {"w": "b"}, {"a": 1}],
    "objects": [[], {"w": 1}, 5],
    "metadata": [[], 5],
}.items():  # fmt: skip
    for value in values:
        SHARDS[f"declared {field} {value!s:.40}"] = lambda forgery, field=field, value=value: forgery.declare(
            **{field: value}
        )
