"""A reader of the format that shares no code with the package: written from docs/format.md alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

BLOCK = 262_144
_DTYPE = {"I64": "<i8", "U64": "<u8"}


def read(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds: members of the manifest, the digest of each tensor's bytes, and its chunks.

    A chunk is a list: offsets and sizes of its box, the row of its file in `files`, its first byte in the
    file and the byte after its last, its digest. The digests of manifest, index and chunks are compared.
    """
    text = (folder / "manifest.json").read_bytes()
    manifest = json.loads(text)
    seal = len(b',"digest":"') + 32 + len(b'"}\n')
    assert manifest.pop("digest") == xxhash.xxh3_128_hexdigest(text[:-seal])
    files = [(*record, "") if len(record) == 5 else tuple(record) for record in manifest["files"]]
    places = [f"{file[5]}/{file[0]}" if file[5] else file[0] for file in files]
    table = _index(folder / manifest["index"][0], manifest["index"])
    tensors = {
        key: {"dtype": dtype, "shape": shape, "digest": "", "chunks": []}
        for key, dtype, shape in manifest["tensors"]
    }
    arrays = {key: _blank(entry) for key, entry in tensors.items()}
    keys = list(tensors)
    for row, at in enumerate(table["tensor"].tolist()):
        key, file = keys[at], files[int(table["file"][row])]
        first, after = table["box_start"][row : row + 2].tolist()
        offsets, sizes = (table[name][first:after].tolist() for name in ("box_offsets", "box_sizes"))
        start = int(table["byte_start"][row])
        stop = start + int(table["byte_count"][row])
        data = (folder.parent / (file[5] or folder.name) / file[0]).read_bytes()
        assert len(data) == file[1] and start >= file[3]
        hashed = f"{int(table['digest_hi'][row]):016x}{int(table['digest_lo'][row]):016x}"
        assert hashed == _digest(data[start:stop])
        tensors[key]["chunks"].append([offsets, sizes, int(table["file"][row]), start, stop, hashed])
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        arrays[key][box] = np.frombuffer(data[start:stop], np.uint8).reshape(*sizes, -1)
    for key, entry in tensors.items():
        entry["digest"] = xxhash.xxh3_128_hexdigest(arrays[key].tobytes())
    return {
        **{name: manifest[name] for name in ("version", "step", "world_size", "repaired", "attempt")},
        "files": [[place, *file[1:5]] for place, file in zip(places, files, strict=True)],
        "tensors": tensors,
        "aliases": manifest["aliases"],
        "objects": manifest["objects"],
        "metadata": manifest["metadata"],
    }


def _digest(data: bytes) -> str:
    """The digest of a chunk: that of its bytes, or of its blocks' digests."""
    if len(data) <= BLOCK:
        return xxhash.xxh3_128_hexdigest(data)
    parts = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    return xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, parts)))


def _blank(entry: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.full((*entry["shape"], ITEMSIZE[entry["dtype"]]), 0xEE, np.uint8)


def _index(path: Path, record: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    data = path.read_bytes()
    assert len(data) == record[1] and xxhash.xxh3_128_hexdigest(data) == record[2]
    after = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:after])
    header.pop("__metadata__")
    return {
        name: np.frombuffer(data[after:], np.uint8)[slice(*entry["data_offsets"])].view(
            _DTYPE[entry["dtype"]]
        )
        for name, entry in header.items()
    }


ITEMSIZE = dict.fromkeys(("bool", "uint8", "int8", "float4_e2m1fn_x2"), 1)
ITEMSIZE |= dict.fromkeys(
    (f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e8m0fnu", "e4m3fnuz", "e5m2fnuz")), 1
)
ITEMSIZE |= dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2)
ITEMSIZE |= dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4)
ITEMSIZE |= dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8)
ITEMSIZE["complex128"] = 16
"""Bytes of an element of each dtype."""
