"""The bits of stored tensors: boxes of any layout against slices, and values that refer to tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.commands.report.stored_bits import StoredBits, open_bits
from shardproof.errors import CorruptChunkError, PlainDataError
from shardproof.report import describe
from shardproof.state import encode_plain
from shardproof.storage import LocalStorage
from tests.unit.commands.cli.samples import Sample, rows_cut, write


def bits_of(folder: Path) -> StoredBits:
    storage = LocalStorage(folder)
    return open_bits(storage, describe(storage))


@pytest.mark.parametrize(("parts", "dim"), [(1, 0), (3, 0), (4, 1), (2, 2)])
def test_boxes_are_those_of_the_array(tmp_path: Path, parts: int, dim: int) -> None:
    random = np.random.default_rng(parts)
    array = random.integers(0, 1 << 16, (7, 5, 6), np.uint16)
    write(tmp_path, Sample({"w": array}, cuts={"w": rows_cut(array.shape, parts, dim)}, world_size=parts))
    bits = bits_of(tmp_path)
    for _ in range(20):
        offsets = [int(random.integers(0, size)) for size in array.shape]
        sizes = [
            int(random.integers(1, size - at + 1)) for size, at in zip(array.shape, offsets, strict=True)
        ]
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        assert bits.box("w", offsets, sizes).view(np.uint16).reshape(sizes).tolist() == array[box].tolist()


def test_only_the_blocks_of_a_box_are_read_and_verified(tmp_path: Path) -> None:
    array = np.arange(1 << 18, dtype=np.float32).reshape(1 << 12, -1)  # four blocks
    write(tmp_path, Sample({"w": array}))
    (shard,) = (tmp_path / "shards").iterdir()
    stored = bytearray(shard.read_bytes())
    stored[stored.index(array[2000].tobytes())] ^= 1
    shard.write_bytes(stored)
    bits = bits_of(tmp_path)
    assert bits.box("w", [900, 3], [100, 4]).view(np.float32).reshape(100, 4).tolist() == (
        array[900:1000, 3:7].tolist()
    )
    with pytest.raises(CorruptChunkError, match="tensor 'w'"):
        bits.box("w", [1999, 0], [1, 4])


VALUES: dict[str, Any] = {
    "ints": list(range(2000)),
    "floats": [math.nan, math.inf, *map(float, range(2000))],
    "bytes": bytes(range(256)) * 20,
    "bytearray": bytearray(5000),
    "text": "é" * 9000,
    "array": np.arange(6000, dtype=np.int16).reshape(60, 100),
    "empty": np.zeros((3, 0)),
    "texts": np.array(["a", "bcd"] * 1500),
    "tensor": torch.arange(4000).to(torch.bfloat16),
    "nested": ({1: list(range(1500))}, None, 1 << 70),
}


def test_a_value_without_references_is_that_of_its_encoding(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"rank": sp.PerRank(VALUES), **{key: (VALUES[key], 0) for key in VALUES}})
    storage = LocalStorage(tmp_path / "c")
    stored = describe(storage)
    bits = open_bits(storage, stored)
    references = [key for key, data in stored.manifest.objects.items() if "$tensor" in str(data)]
    assert len(references) > len(VALUES)
    with sp.open(tmp_path / "c") as checkpoint:
        for key in references:
            value = checkpoint.decoded(stored.manifest.objects[key])
            assert bits.inlined(key, stored.manifest.objects[key]) == encode_plain(value, key)


@pytest.mark.parametrize("reference", [{"$tensor": "no such key"}, {"$tensor": "w", "kind": "unknown"}])
def test_a_malformed_reference_is_an_error_with_its_key(tmp_path: Path, reference: Any) -> None:
    write(tmp_path, Sample({"w": np.zeros(3, np.float32)}))
    with pytest.raises(PlainDataError, match="loader: malformed reference"):
        bits_of(tmp_path).inlined("loader", {"x": [reference]})
