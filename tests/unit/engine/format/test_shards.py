"""Shard files: other readers open them; hostile headers are refused."""

from __future__ import annotations

import json
import resource
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given

from shardproof.dtypes import DTYPES
from shardproof.engine.format import (
    bytes_digest,
    chunk_name,
    encode_entries,
    file_digest,
    parse_chunk_name,
    parse_header,
    read_chunk_digests,
    read_shard_header,
    shard_header,
)
from shardproof.errors import FormatError, StorageError
from shardproof.storage import LocalStorage
from tests.instructions import count_instructions
from tests.unit.engine.format.samples import shard

NUMPY_HAS = [name for name in DTYPES if not name.startswith(("bfloat", "float8"))]


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_torch_reads_every_dtype(tmp_path):
    payloads: dict[str, bytes] = {}
    path = tmp_path / "shard.safetensors"
    path.write_bytes(shard(list(DTYPES), payloads))
    loaded = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as opened:
        assert json.loads(opened.metadata()["shardproof"]) == {"version": 1}
        for name, dtype in DTYPES.items():
            for tensor in (opened.get_tensor(f"{name}[0:3]"), loaded[f"{name}[0:3]"]):
                assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == payloads[name]
                true = getattr(torch, name)
                if dtype.code != "U8" and dtype.parts == 1:
                    assert tensor.dtype == true
                assert tensor.contiguous().view(true).shape in [(3,), (3, 1)]


def test_numpy_reads_every_dtype_that_it_has(tmp_path):
    payloads: dict[str, bytes] = {}
    path = tmp_path / "shard.safetensors"
    path.write_bytes(shard(NUMPY_HAS, payloads))
    loaded = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, framework="numpy") as opened:
        for name in NUMPY_HAS:
            assert opened.get_tensor(f"{name}[0:3]").tobytes() == payloads[name]
            assert loaded[f"{name}[0:3]"].tobytes() == payloads[name]


def test_data_begins_on_a_page_and_entries_are_aligned(tmp_path):
    data = shard(list(DTYPES))
    header = parse_header(data, len(data), "f")
    assert header.data_start % 4096 == 0
    for name, _, _, start, _ in header.entries:
        if not name.startswith("@"):
            assert start % DTYPES[parse_chunk_name(name)[0]].alignment == 0
    assert header.entries[-1][3] % 8 == 0


@given(st.integers(0, 511), st.integers(0, 9000), st.integers(0, 3000))
def test_a_header_ends_at_the_given_size_or_page_offset(eighths, length, eighths_of_size):
    metadata, in_page, size = {"a": "x" * length}, 8 * eighths, 8 * eighths_of_size
    bare = 8 + len(json.dumps({"__metadata__": metadata}, separators=(",", ":")))
    header = shard_header(b"", metadata, in_page=in_page, size=size)
    if bare <= size:
        assert len(header) == size
    else:
        assert len(header) % 4096 == in_page and bare <= len(header) < bare + 4096
    assert parse_header(header, len(header), "f").metadata == metadata


def test_a_shard_file_carries_its_digests(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.publish("s", shard(["bfloat16", "bool"]))
    header = read_shard_header(storage, "s")
    digests = read_chunk_digests(storage, "s", header)
    assert digests.shape == (2, 2)
    for (_, _, _, start, stop), (high, low) in zip(header.entries, digests.tolist(), strict=False):
        assert bytes_digest(storage.read("s", start, stop)) == f"{high:016x}{low:016x}"
    whole = header.raw + digests.astype(">u8").tobytes()
    assert file_digest(header.raw, digests) == bytes_digest(whole)
    assert header.metadata == {"shardproof": '{"version": 1}'}


def test_padding_must_be_zero(tmp_path):
    data = bytearray(shard(["bool"]))
    at = parse_header(bytes(data), len(data), "s").entries[1][3]
    data[at] ^= 1
    storage = LocalStorage(tmp_path)
    storage.publish("s", bytes(data))
    with pytest.raises(FormatError, match="the padding at bytes .* is not zero"):
        read_chunk_digests(storage, "s", read_shard_header(storage, "s"))


def test_a_shard_file_without_digests_is_refused(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.publish("s", safetensors.numpy.save({"a": np.zeros(3)}))
    header = read_shard_header(storage, "s")
    assert [entry[0] for entry in header.entries] == ["a"]
    with pytest.raises(FormatError, match="@digests"):
        read_chunk_digests(storage, "s", header)


def test_a_missing_shard_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="missing"):
        read_shard_header(LocalStorage(tmp_path), "s")


def test_every_flipped_bit_of_a_header_fails_its_digest():
    data = shard(["float32", "bool"])
    header = parse_header(data, len(data), "s")
    digests = np.ones((2, 2), np.uint64)
    right = file_digest(header.raw, digests)
    raw = bytearray(header.raw)
    for at in range(len(raw)):
        raw[at] ^= 1 << (at % 8)
        assert file_digest(bytes(raw), digests) != right
        raw[at] ^= 1 << (at % 8)


def test_every_flipped_bit_of_a_header_is_refused_or_keeps_entries_in_the_file():
    data = bytearray(shard(["float32", "bool"]))
    end = bytes(data).rindex(b"}", 0, 4096) + 1
    for at in range(end):
        for bit in range(8):
            data[at] ^= 1 << bit
            try:
                header = parse_header(bytes(data), len(data), "s")
            except FormatError:
                header = None
            data[at] ^= 1 << bit
            if header is not None:
                assert header.data_start == header.entries[0][3]
                assert header.entries[-1][4] == len(data)


def test_every_cut_is_found(tmp_path):
    data = shard(["float32", "bool"])
    for length in range(0, len(data), 11):
        with pytest.raises(FormatError):
            parse_header(data[:length], length, "s")


def _entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD = {
    "empty": b"",
    "four bytes": b"abcd",
    "a header longer than the file": (1 << 20).to_bytes(8, "little") + b"{}",
    "a header of all memory": b"\xff" * 8 + b"{}",
    "a header over the limit": (100_000_001).to_bytes(8, "little") + b"{}",
    "no json": _file(b"{nonsense}"),
    "no object": _file([]),
    "a space first": _file(b" {}"),
    "a number": _file({"a": 1}),
    "negative offsets": _file({"a": _entry(offsets=(-8, 0))}, bytes(8)),
    "offsets that fall": _file({"a": _entry(offsets=(8, 0))}, bytes(8)),
    "huge offsets": _file({"a": _entry(offsets=(0, 2**63))}, bytes(8)),
    "NaN offsets": _file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}}', bytes(8)),
    "fractions": _file({"a": _entry(offsets=(0, 8.0))}, bytes(8)),
    "exponents": _file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8e0]}}', bytes(8)),
    "truth values": _file({"a": _entry((True,), (0, 4))}, bytes(4)),
    "one offset": _file({"a": _entry(offsets=(0,))}, bytes(8)),
    "three offsets": _file({"a": _entry(offsets=(0, 8, 8))}, bytes(8)),
    "a negative shape": _file({"a": _entry((-2,), (0, 8))}, bytes(8)),
    "two negative sizes": _file({"a": _entry((-2, -1), (0, 8))}, bytes(8)),
    "a huge shape": _file({"a": _entry((2**62, 4), (0, 8))}, bytes(8)),
    "a shape that wraps to its bytes": _file({"a": _entry((2**32, 2**32, 2), (0, 8))}, bytes(8)),
    "too many dimensions": _file({"a": _entry([1] * 66 + [2], (0, 8))}, bytes(8)),
    "a shape without end": _file(
        b'{"a":{"dtype":"F32","shape":[' + b"1," * 10**6 + b'1],"data_offsets":[0,4]}}'
    ),
    "another count": _file({"a": _entry((3,), (0, 8))}, bytes(8)),
    "an unknown type": _file({"a": _entry(dtype="F33")}, bytes(8)),
    "an unknown member": _file({"a": _entry() | {"code": "x"}}, bytes(8)),
    "a member missing": _file({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "a hole": _file({"a": _entry(), "b": _entry(offsets=(9, 17))}, bytes(17)),
    "a hole at the beginning": _file({"a": _entry(offsets=(8, 16))}, bytes(16)),
    "an overlap": _file({"a": _entry(), "b": _entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes": _file({"a": _entry(), "b": _entry()}, bytes(8)),
    "bytes after the end": _file({"a": _entry()}, bytes(9)),
    "bytes missing": _file({"a": _entry()}, bytes(7)),
    "metadata that are no texts": _file({"__metadata__": {"a": 1}}),
    "metadata that are a list": _file({"__metadata__": []}),
    "a name twice": _file(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "a name twice, once escaped": _file(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"\\u0061":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "a member twice": _file(
        b'{"a":{"dtype":"F64","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)
    ),
    "metadata twice": _file(b'{"__metadata__":{},"__metadata__":{"a":"b"}}'),
    "a text twice in the metadata": _file(b'{"__metadata__":{"a":"b","a":"c"}}'),
    "text after the object": _file(b"{}{}"),
    "no unicode": _file(b'{"\xff":1}'),
    "deep nesting": _file(b'{"a":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
    "deeper nesting": _file(b'{"a":' * 10**6),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_invalid_headers_are_refused(tmp_path, data):
    storage = LocalStorage(tmp_path)
    storage.publish("hostile", data)
    began = time.monotonic()
    with pytest.raises(FormatError, match="^hostile: "):
        read_shard_header(storage, "hostile")
    assert time.monotonic() - began < 5


def test_a_header_bomb_takes_little_memory(tmp_path):
    path = tmp_path / "bomb"
    with path.open("wb") as file:
        file.write((2**40).to_bytes(8, "little") + b"{")
        file.truncate(2**41)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match="the header claims 1099511627776 bytes"):
        read_shard_header(LocalStorage(tmp_path), "bomb")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # KiB


def test_a_header_that_no_reader_accepts_is_not_written():
    with pytest.raises(FormatError, match="safetensors allows"):
        shard_header(b"", {"shardproof": "x" * 100_000_000})


@pytest.mark.parametrize(
    ("group", "words"), [("objects", "the value of 'data.seen'"), ("metadata", "the metadata 'data.seen'")]
)
def test_the_value_that_makes_a_header_too_long_is_named(group, words):
    declared = {"tensors": {}, "objects": {"small": 1}, "metadata": {"note": "x"}}
    declared[group] = {"few": [1], "data.seen": "x" * 100_000_000, "last": 1}
    with pytest.raises(FormatError, match=f"100000002 bytes, is {words}"):
        shard_header(b"", {"digest": "0" * 32, "shardproof": json.dumps(declared)})


def test_the_chunks_are_named_if_they_make_a_header_too_long():
    with pytest.raises(FormatError, match="100000000 bytes, is the list of its chunks"):
        shard_header(b'"' * 100_000_000, {"shardproof": '{"objects":{},"metadata":{}}'})
    with pytest.raises(FormatError, match="one name"):
        encode_entries(["a", "a"], ["U8", "U8"], [(1,), (1,)], np.array([0, 1]), np.array([1, 1]))
    with pytest.raises(FormatError, match="Unicode"):
        encode_entries(["\ud800"], ["U8"], [(1,)], np.array([0]), np.array([1]))


def test_a_shard_file_without_chunks_is_read(tmp_path):
    data = shard([])
    assert safetensors.numpy.load(data)["@digests"].shape == (0, 2)
    storage = LocalStorage(tmp_path)
    storage.publish("s", data)
    assert read_chunk_digests(storage, "s", read_shard_header(storage, "s")).shape == (0, 2)


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=4),
)
def test_chunk_names_round_trip(key, box):
    offsets, sizes = tuple(first for first, _ in box), tuple(size for _, size in box)
    assert parse_chunk_name(chunk_name(key, offsets, sizes)) == (key, offsets, sizes)


@pytest.mark.parametrize(
    "name",
    ["", "w", "w[", "w]", "w[0]", "w[0:1", "w[1:0]", "w[0:1,]", "w[,0:1]", "w[00:1]", "w[-1:1]", "w[0:1] ",
     "w[ 0:1]", "w[0:\u0661]", "w[" + "1:" * 10 + "]", "w[0:" + "9" * 5000 + "]", "@digests", "@padding"],
)  # fmt: skip
def test_a_name_that_names_no_chunk_is_refused(name):
    with pytest.raises(ValueError, match="does not name a chunk"):
        parse_chunk_name(name)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])).map(lambda key: key + "[]"),
        st.tuples(st.sampled_from(["U8", "F32", "I64"]), st.lists(st.integers(0, 4), max_size=3)),
    ),
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"]))
    ),
)
def test_any_header_is_read_back_here_and_by_safetensors(entries, metadata):
    size = {"U8": 1, "F32": 4, "I64": 8}
    counts = np.array([size[code] * int(np.prod(shape)) for code, shape in entries.values()], np.int64)
    starts = np.cumsum(counts) - counts
    codes = [code for code, _ in entries.values()]
    shapes = [tuple(shape) for _, shape in entries.values()]
    header = shard_header(encode_entries(list(entries), codes, shapes, starts, counts), metadata)
    data = header + bytes(int(counts.sum()))
    found = parse_header(data, len(data), "f")
    expected = {
        name: (code, shape, len(header) + start, len(header) + start + count)
        for name, code, shape, start, count in zip(
            entries, codes, shapes, starts.tolist(), counts.tolist(), strict=True
        )
    }
    assert {name: tuple(rest) for name, *rest in found.entries} == expected
    assert found.metadata == metadata
    loaded = safetensors.numpy.load(data)
    assert {name: array.shape for name, array in loaded.items()} == dict(zip(entries, shapes, strict=True))


def test_entries_are_encoded_in_bulk():
    """Python does nothing for each entry: 20,000 take milliseconds."""

    def cost(count: int) -> int:
        names = [chunk_name(f"model.layers.{i}.weight", (0, 0), (32, 32)) for i in range(count)]
        column = np.arange(count, dtype=np.int64) * 4096
        sizes = np.full(count, 4096)
        return count_instructions(
            lambda: encode_entries(names, ["F32"] * count, [(32, 32)] * count, column, sizes)
        )

    assert cost(2000) == cost(2)
