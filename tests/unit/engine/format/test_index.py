"""The chunk index: round trips, damage, and rows that do not fit the manifest."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given

from shardproof.dtypes import DTYPES
from shardproof.engine.format import (
    FileRecord,
    TensorRecord,
    bytes_digest,
    decode_index,
    encode_index,
    encode_manifest,
    read_index,
    read_manifest,
    shard_header,
)
from shardproof.engine.planning.read_plan import ChunkTable
from shardproof.errors import FormatError
from shardproof.storage import LocalStorage
from tests.unit.engine.format.samples import manifest, table

_COLUMNS = [field.name for field in dataclasses.fields(ChunkTable)]


def _same(one: ChunkTable, two: ChunkTable) -> bool:
    pairs = [(getattr(one, name), getattr(two, name)) for name in _COLUMNS]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def test_round_trip():
    data = encode_index(table())
    assert _same(decode_index(data, manifest(data), "index"), table())


def test_no_chunks():
    none = np.empty(0, np.int64)
    empty = ChunkTable(none, none, none, none, np.empty((0, 2), np.uint64), np.zeros(1, np.int64), none, none)
    data = encode_index(empty)
    assert _same(decode_index(data, manifest(data, tensors=(), aliases={}, files=()), "index"), empty)


def test_any_safetensors_reader_opens_the_index():
    columns = safetensors.numpy.load(encode_index(table()))
    assert sorted(columns) == sorted(
        [name for name in _COLUMNS if name != "digest"] + ["digest_hi", "digest_lo"]
    )
    assert columns["digest_hi"].dtype == np.uint64
    assert np.array_equal(columns["digest_lo"], table().digest[:, 1])


def test_every_flipped_bit_is_found():
    data = bytearray(encode_index(table()))
    expected = manifest(bytes(data))
    for at in range(len(data)):
        data[at] ^= 1 << (at % 8)
        with pytest.raises(FormatError, match="damaged"):
            decode_index(bytes(data), expected, "index")
        data[at] ^= 1 << (at % 8)


def test_every_flipped_bit_under_a_right_digest_is_refused_or_changes_one_column():
    """What decodes equals the table if the bit is in the header, and differs in one number otherwise."""
    data = bytearray(encode_index(table()))
    text_end = bytes(data).rindex(b"}", 0, 4096) + 1
    for at in (*range(text_end), *range(text_end, 4096, 97), *range(4096, len(data))):
        for bit in range(8):
            data[at] ^= 1 << bit
            try:
                found = decode_index(bytes(data), manifest(bytes(data)), "index")
            except FormatError:
                found = None
            data[at] ^= 1 << bit
            if found is not None:
                changed = sum(
                    int((getattr(found, name) != getattr(table(), name)).sum()) for name in _COLUMNS
                )
                assert changed == (at >= 4096), at


def test_every_cut_is_found():
    data = encode_index(table())
    for length in range(0, len(data), 7):
        with pytest.raises(FormatError, match="cut short"):
            decode_index(data[:length], manifest(data), "index")
        with pytest.raises(FormatError):
            decode_index(data[:length], manifest(data[:length]), "index")


BAD = {
    "no such tensor": {"tensor": [0, 0, 1, 3]},
    "a negative tensor": {"tensor": [-1, 0, 1, 2]},
    "tensors out of order": {"tensor": [0, 1, 0, 2]},
    "no such file": {"file": [0, 2, 0, 1]},
    "a negative file": {"file": [0, -1, 0, 1]},
    "bytes in the header": {"byte_start": [4095, 4096, 4112, 4112]},
    "a negative start": {"byte_start": [-(2**63), 4096, 4112, 4112]},
    "a huge start": {"byte_start": [2**63 - 1, 4096, 4112, 4112]},
    "bytes after the end": {"byte_start": [4128, 4096, 4112, 4112]},
    "too few bytes": {"byte_count": [15, 16, 8, 0]},
    "negative bytes": {"byte_count": [-16, 16, 8, 0]},
    "huge bytes": {"byte_count": [2**63 - 1, 16, 8, 0]},
    "a box outside": {"box_offsets": [3, 0, 2, 0, 0, 0]},
    "a negative offset": {"box_offsets": [-1, 0, 2, 0, 0, 0]},
    "a huge offset": {"box_offsets": [2**63 - 1, 0, 2, 0, 0, 0]},
    "the least offset": {"box_offsets": [-(2**63), 0, 2, 0, 0, 0]},
    "a negative size": {"box_sizes": [-2, -2, 2, 2, 0, 3]},
    "a huge size": {"box_sizes": [2**62, 2, 2, 2, 0, 3]},
    "a chunk that is cut": {"box_sizes": [2, 2, 1, 2, 0, 3], "byte_count": [16, 8, 8, 0]},
    "a size that is too large": {"box_sizes": [2, 2, 2, 2, 1, 3]},
    "pointers that fall": {"box_start": [0, 4, 2, 4, 6]},
    "pointers of other dimensions": {"box_start": [0, 2, 3, 4, 6]},
    "pointers that begin late": {"box_start": [1, 2, 4, 4, 6]},
    "pointers that end early": {"box_start": [0, 2, 4, 4, 5]},
    "pointers that end late": {"box_start": [0, 2, 4, 4, 8]},
    "pointers that overflow": {"box_start": [0, 2**63 - 1, -(2**63), 4, 6]},
    "too few pointers": {"box_start": [0, 2, 4, 4]},
    "no pointers": {"box_start": []},
    "too few files": {"file": [0, 1, 0]},
    "too few offsets": {"box_offsets": [0, 0, 2, 0, 0]},
    "a matrix": {"file": [[0, 1, 0, 1]]},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
def test_invalid_columns_are_refused(changes):
    arrays = {name: np.array(value, np.int64) for name, value in changes.items()}
    data = encode_index(dataclasses.replace(table(), **arrays))
    with pytest.raises(FormatError, match="^index: "):
        decode_index(data, manifest(data), "index")


def test_a_tensor_without_chunks_is_refused():
    ghost = TensorRecord("zz", "uint8", (2**37,))
    data = encode_index(table())
    with pytest.raises(FormatError, match=f"chunks of 'zz' have 0 bytes together, .* has {2**37}"):
        decode_index(data, manifest(data, tensors=(*manifest().tensors, ghost)), "index")


def test_sums_beyond_64_bits_do_not_wrap():
    many = 2**62
    chunks = ChunkTable(
        tensor=np.arange(4),
        file=np.arange(4),
        byte_start=np.full(4, 4096),
        byte_count=np.full(4, many),
        digest=np.zeros((4, 2), np.uint64),
        box_start=np.arange(5),
        box_offsets=np.zeros(4, np.int64),
        box_sizes=np.full(4, many),
    )
    data = encode_index(chunks)
    expected = manifest(
        data,
        tensors=tuple(TensorRecord(f"{row}", "uint8", (many,)) for row in range(4)),
        files=tuple(FileRecord(f"shards/{row}", 2**63 - 1, 32 * "0", 4096, row) for row in range(4)),
    )
    with pytest.raises(FormatError, match="2\\^63 bytes or more together"):
        decode_index(data, expected, "index")


@pytest.mark.parametrize(
    "header",
    [b"", b'"a":1', b'"tensor":{"dtype":"I64","shape":[0],"data_offsets":[0,0]}'],
    ids=["no columns", "no entry", "one column"],
)
def test_other_columns_are_refused(header):
    data = shard_header(header, {})
    with pytest.raises(FormatError):
        decode_index(data, manifest(data), "index")


@st.composite
def _checkpoints(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4))
    dtypes = [draw(st.sampled_from(sorted(DTYPES))) for _ in shapes]
    rows, offsets, sizes, counts, pointers = [], [], [], [], [0]
    for tensor, shape in enumerate(shapes):
        boxes = [([0] * len(shape), shape)]
        for _ in range(draw(st.integers(0, 3)) if shape else 0):
            begin, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            axis = draw(st.integers(0, len(shape) - 1))
            cut = draw(st.integers(0, extent[axis]))
            boxes.append((begin, [*extent[:axis], cut, *extent[axis + 1 :]]))
            begin = [*begin[:axis], begin[axis] + cut, *begin[axis + 1 :]]
            boxes.append((begin, [*extent[:axis], extent[axis] - cut, *extent[axis + 1 :]]))
        if 0 in shape and draw(st.booleans()):
            boxes = []
        for begin, extent in boxes:
            rows.append(tensor)
            offsets += begin
            sizes += extent
            counts.append(int(np.prod(extent, dtype=np.int64)) * DTYPES[dtypes[tensor]].itemsize)
            pointers.append(len(sizes))
    n = len(rows)
    digest = draw(st.lists(st.integers(0, 2**64 - 1), min_size=2 * n, max_size=2 * n))
    laid = np.array(draw(st.permutations(range(n))), np.int64)  # chunks in the order of their bytes
    stop = np.zeros(n, np.int64)
    stop[laid] = np.cumsum(np.array(counts, np.int64)[laid])
    chunks = ChunkTable(
        tensor=np.array(rows, np.int64),
        file=np.zeros(n, np.int64),
        byte_start=4096 + stop - np.array(counts, np.int64),
        byte_count=np.array(counts, np.int64),
        digest=np.array(digest, np.uint64).reshape(n, 2),
        box_start=np.array(pointers, np.int64),
        box_offsets=np.array(offsets, np.int64),
        box_sizes=np.array(sizes, np.int64),
    )
    end = 4096 + sum(counts)
    tensors = tuple(
        TensorRecord(f"{i}", dtype, tuple(shape))
        for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))
    )
    return chunks, tensors, (FileRecord("shards/00000-5f0c.safetensors", end, 32 * "0", 4096, 0),)


@given(_checkpoints())
def test_any_table_round_trips(checkpoint):
    chunks, tensors, files = checkpoint
    data = encode_index(chunks)
    expected = manifest(data, tensors=tensors, files=files, aliases={})
    assert _same(decode_index(data, expected, "index"), chunks)


def test_read_index(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.publish("manifest.json", encode_manifest(manifest()))
    with pytest.raises(FormatError, match="missing"):
        read_index(storage, read_manifest(storage))
    storage.publish("index-5f0c.safetensors", encode_index(table()))
    assert _same(read_index(storage, read_manifest(storage)), table())
    storage.publish("index-5f0c.safetensors", b"", replace=True)
    with pytest.raises(FormatError, match="expected .* bytes, it has 0"):
        read_index(storage, read_manifest(storage))


def test_the_digest_is_that_of_all_bytes():
    data = encode_index(table())
    assert manifest(data).index.digest == bytes_digest(data)
