"""`ShardFileWriter`: the bytes of a shard file, however its chunks come."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import shardproof as sp
from shardproof.engine.format import (
    BLOCK_BYTES,
    FileRecord,
    ShardFileWriter,
    chunk_entries,
    digests_as_bytes,
    digests_from_bytes,
    file_digest,
    new_manifest,
    read_chunk_digests,
    read_shard_header,
    shard_header,
    with_files,
)
from shardproof.engine.format.digests import ChunkHasher

COUNTS = [3, 2 * BLOCK_BYTES + 1, 5]
DATA = np.random.default_rng(1).bytes(sum(COUNTS))
ENTRIES = chunk_entries([(str(count), "uint8", (0,), (count,)) for count in COUNTS], np.array(COUNTS))
HEADER = shard_header(ENTRIES.encoded, {})


class InMemory:
    """A file that only collects its bytes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, data: bytes | memoryview) -> None:
        self.data += data

    def finish(self) -> int:
        return len(self.data)


def hashed() -> list[ChunkHasher]:
    hashers, done = [], 0
    for count in COUNTS:
        hashers.append(ChunkHasher())
        hashers[-1].update(memoryview(DATA)[done : done + count])
        done += count
    return hashers


@given(st.lists(st.integers(0, len(DATA)), max_size=4))
def test_the_bytes_do_not_depend_on_the_pieces(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(DATA)]
    file = InMemory()
    shard = ShardFileWriter(file, HEADER, ENTRIES.padding)
    pieces = (memoryview(DATA)[a:b] for a, b in itertools.pairwise(bounds))
    shard.put_chunks(pieces, COUNTS)
    record = shard.finish("a", rank=2)
    assert hashlib.sha256(file.data).digest() == hashlib.sha256(by_the_caller().data).digest()
    digests = digests_from_bytes([one.digest() for one in hashed()])
    assert record == FileRecord("a", len(file.data), file_digest(HEADER, digests), len(HEADER), 2)


def by_the_caller() -> InMemory:
    """The same file, whose chunks the caller appends and hashes."""
    file = InMemory()
    shard = ShardFileWriter(file, HEADER, ENTRIES.padding)
    file.put(DATA)
    for one in hashed():
        shard.note_chunks([one.digest()], one.blocks())
    shard.finish("a", rank=2)
    return file


def test_a_reader_finds_the_digests(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(by_the_caller().data)
    storage = sp.storage.LocalStorage(tmp_path)
    found = read_chunk_digests(storage, "a", read_shard_header(storage, "a"))
    assert list(digests_as_bytes(found)) == [one.digest() for one in hashed()]


def test_the_bytes_are_those_of_version_1() -> None:
    assert hashlib.sha256(by_the_caller().data).hexdigest()[:16] == "a1ce20a13520d5e5"


def test_a_manifest_with_files_of_other_steps_has_version_2() -> None:
    planned = new_manifest(attempt="b", step=3, time=1.5, world_size=1, tensors=(), objects={"b": 1, "a": 2})
    own = FileRecord("shards/00000-b.safetensors", 8, 32 * "0", 8, 0)
    other = FileRecord("shards/00000-a.safetensors", 8, 32 * "0", 8, 0, "step-00000001")
    assert list(planned.objects) == ["a", "b"]
    assert [with_files(planned, files, b"index").version for files in ([own], [own, other])] == [1, 2]
    assert with_files(planned, [own], b"index").index.size == 5
