"""One verifier compares stored bytes with their digests; one check compares a file's size with its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.engine.format import (
    BLOCK_BYTES,
    ChunkHasher,
    ChunkVerifier,
    FileRecord,
    block_digests,
    check_size,
    digest_of_blocks,
    read_pieces,
    size_error,
)
from shardproof.errors import CorruptChunkError, StorageError
from shardproof.storage import LocalStorage

LARGE = bytes(range(256)) * (BLOCK_BYTES // 256) * 2 + b"the rest"
SMALL = (b"abc", b"", b"defgh")


def verifier(*chunks: bytes, gap: int = 0) -> ChunkVerifier:
    """Chunks of one file that begin at byte 100, `gap` bytes apart."""
    starts = [100 + sum(map(len, chunks[:at])) + gap * at for at in range(len(chunks))]
    digests = [ChunkHasher(chunk).digest() for chunk in chunks]
    keys = [f"key{at}" for at in range(len(chunks))]
    return ChunkVerifier(["f"] * len(chunks), keys, starts, list(map(len, chunks)), digests, advice="Go on")


def test_neighbours_are_verified_across_gaps() -> None:
    data = memoryview(b"--".join(SMALL))
    chunks = verifier(*SMALL, gap=2)
    chunks.check_data(range(3), data)
    chunks.check_data(range(1, 3), data[5:])
    damaged = bytearray(data)
    damaged[3] ^= 1  # in a gap: no chunk has it
    chunks.check_data(range(3), memoryview(damaged))
    damaged[8] ^= 1
    with pytest.raises(CorruptChunkError, match=r"f: bytes 107 to 112 of tensor 'key2' .* Go on$") as caught:
        chunks.check_data(range(3), memoryview(damaged))
    assert caught.value.details == {"file": "f", "key": "key2", "byte_start": 107, "byte_count": 5}


@pytest.mark.parametrize("size", [1000, BLOCK_BYTES, len(LARGE)])
def test_a_chunk_is_verified_piece_by_piece(size: int) -> None:
    pieces = [memoryview(LARGE)[at : at + size] for at in range(0, len(LARGE), size)]
    chunks = verifier(b"before", LARGE)
    assert chunks.check_pieces(1, pieces) == block_digests(memoryview(LARGE))
    with pytest.raises(CorruptChunkError, match=f"bytes 106 to {106 + len(LARGE)} of tensor 'key1'"):
        chunks.check_pieces(1, [*pieces[:-1], memoryview(bytes(len(pieces[-1])))])


def test_a_chunk_of_one_block_has_no_digests_of_blocks() -> None:
    assert verifier(b"abc").check_pieces(0, [memoryview(b"ab"), memoryview(b"c")]) == []
    assert verifier(b"").check_pieces(0, []) == []


def test_the_error_names_the_damaged_block() -> None:
    expected = block_digests(memoryview(LARGE))
    damaged = bytearray(LARGE)
    damaged[-1] ^= 1
    found = block_digests(memoryview(damaged))
    chunks = verifier(LARGE)
    chunks.check_blocks(0, BLOCK_BYTES, found[1:2], expected[1:2])
    with pytest.raises(CorruptChunkError) as caught:
        chunks.check_blocks(0, BLOCK_BYTES, found[1:], expected[1:])
    assert (caught.value.details["byte_start"], caught.value.details["byte_count"]) == (
        100 + 2 * BLOCK_BYTES,
        len(b"the rest"),
    )
    chunks.check(0, digest_of_blocks(expected))
    with pytest.raises(CorruptChunkError):
        chunks.check(0, digest_of_blocks(found))


def test_pieces_of_a_file_fill_one_buffer(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(LARGE)
    buffer = memoryview(bytearray(1000))
    pieces = [bytes(piece) for piece in read_pieces(LocalStorage(tmp_path), "f", 5, 2500, buffer)]
    assert b"".join(pieces) == LARGE[5:2505]
    assert list(map(len, pieces)) == [1000, 1000, 500]
    assert list(read_pieces(LocalStorage(tmp_path), "f", 5, 0, buffer[:0])) == []
    with pytest.raises(StorageError):
        list(read_pieces(LocalStorage(tmp_path), "f", len(LARGE) - 5, 10, buffer))


def test_a_file_must_have_its_recorded_size(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    record = FileRecord("f", 3, 32 * "0", folder="step-00000001")
    (tmp_path / "f").write_bytes(b"abc")
    check_size(storage, record)
    assert size_error(storage, record) is None
    (tmp_path / "f").write_bytes(b"ab")
    with pytest.raises(StorageError, match=r"^step-00000001/f: expected 3 bytes, it has 2$") as caught:
        check_size(storage, record)
    assert caught.value.details["missing"] is False
    (tmp_path / "f").unlink()
    error = size_error(storage, record, path="/x/f", advice="Go on")
    assert error is not None and error.message == "/x/f: expected 3 bytes, it is missing. Go on"
    assert error.details == {"file": "step-00000001/f", "missing": True}
