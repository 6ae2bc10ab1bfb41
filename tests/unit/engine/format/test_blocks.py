"""Blocks: the digest of a chunk is that of its blocks' digests, for every way to compute it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import shardproof as sp
from shardproof.engine.format import (
    BLOCK_BYTES,
    ChunkHasher,
    block_counts,
    digest_of_blocks,
    encode_entries,
    read_chunk_digests,
    read_shard_header,
    shard_header,
)
from shardproof.errors import FormatError
from shardproof.storage import LocalStorage
from tests.small_blocks import blocks_of


def documented_digests(data: bytes, size: int) -> tuple[bytes, list[bytes]]:
    """Digest of a chunk, and those of its blocks if it has several, as docs/format.md describes them."""
    blocks = [xxhash.xxh3_128_digest(data[at : at + size]) for at in range(0, len(data), size)]
    if len(data) <= size:
        return xxhash.xxh3_128_digest(data), []
    return xxhash.xxh3_128_digest(b"".join(blocks)), blocks


@given(st.integers(1, 9), st.lists(st.binary(max_size=30), max_size=6))
def test_a_chunk_may_be_hashed_in_any_spans(size: int, spans: list[bytes]) -> None:
    data = b"".join(spans)
    with blocks_of(size):
        hasher = ChunkHasher(spans[0] if spans else b"")
        for span in spans[1:]:
            hasher.update(memoryview(span))
        expected, blocks = documented_digests(data, size)
        assert hasher.digest() == expected == ChunkHasher(data).digest()
        assert hasher.blocks() == blocks
        assert int(block_counts(np.array([len(data)]))[0]) == len(blocks)
        if blocks:
            assert digest_of_blocks(blocks) == expected


def test_a_reader_made_from_the_documentation_agrees(tmp_path: Path) -> None:
    """The reader uses safetensors, JSON and xxhash alone. Chunks have several blocks, one or none."""
    state = {
        "large": torch.randn(9 * BLOCK_BYTES + 7),
        "exact": torch.arange(2 * BLOCK_BYTES // 8),
        "one": torch.zeros(BLOCK_BYTES, dtype=torch.uint8),
        "nothing": torch.zeros(0),
    }
    sp.save(tmp_path, state)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    index = safetensors.numpy.load_file(tmp_path / manifest["index"][0])
    ((name, _, _, data_start, _),) = manifest["files"]
    raw = (tmp_path / name).read_bytes()
    with safetensors.safe_open(tmp_path / name, framework="numpy") as opened:
        carried, digests = (
            opened.get_tensor(entry).astype(">u8").tobytes() for entry in ("@blocks", "@digests")
        )
    order = np.argsort(index["byte_start"], kind="stable")
    blocks = []
    for row, at in zip(order.tolist(), range(0, len(digests), 16), strict=True):
        start, count = int(index["byte_start"][row]), int(index["byte_count"][row])
        digest, of_chunk = documented_digests(raw[start : start + count], 256 * 1024)
        assert digest.hex() == f"{index['digest_hi'][row]:016x}{index['digest_lo'][row]:016x}"
        assert digest == digests[at : at + 16]
        assert manifest["tensors"][int(index["tensor"][row])][0] in state and start >= data_start
        blocks += of_chunk
    assert len(blocks) == 37 + 2 and carried == b"".join(blocks)


@pytest.mark.parametrize("fault", ["missing", "too few", "of another type"])
def test_a_shard_file_without_its_blocks_is_refused(tmp_path: Path, fault: str) -> None:
    names, codes, counts = ["w[0:20]", "@blocks", "@digests"], ["U8", "U64", "U64"], [20, 32, 16]
    if fault == "missing":
        names, codes, counts = names[::2], codes[::2], counts[::2]
    elif fault == "too few":
        counts[1] = 16
    else:
        codes[1] = "I64"
    shapes = [
        (20,) if name[0] == "w" else (count // 16, 2) for name, count in zip(names, counts, strict=True)
    ]
    entries = encode_entries(names, codes, shapes, np.cumsum(counts) - counts, np.array(counts))
    storage = LocalStorage(tmp_path)
    storage.publish("s", shard_header(entries, {}) + bytes(sum(counts)))
    with blocks_of(10), pytest.raises(FormatError, match="@blocks"):
        read_chunk_digests(storage, "s", read_shard_header(storage, "s"))
