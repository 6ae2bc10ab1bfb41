"""Zarr groups and arrays: read to their bits as zarr-python and TensorStore wrote them, damage found."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

import shardproof as sp
from shardproof.engine.foreign import FileRange
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import (
    CorruptChunkError,
    FormatError,
    NotCommittedError,
    PlainDataError,
    ShardproofError,
    StorageError,
)
from shardproof.runs.maintenance import VerifyReport, verify_foreign
from tests.unit.formats.peers import Golden, bits, check_golden

GOLDENS = ["zarr2_group", "zarr3_group", "zarr3_tensorstore"]
SAMPLE = np.arange(35, dtype=np.float32).reshape(7, 5) * 1.5


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_checkpoints_read_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    check_golden(Golden(name, tmp_path), "zarr")


def test_a_target_is_filled_from_a_golden_checkpoint(tmp_path: Path) -> None:
    golden = Golden("zarr3_group", tmp_path)
    state = {"a": {"weight": torch.zeros(7, 5)}, "fill": torch.zeros(6), "scalar": torch.zeros(())}
    sp.load(golden.checkpoint, state, include=["a.weight", "fill", "scalar"])
    assert bits(state["a"]["weight"]) == bits(golden.tensor("a.weight"))
    assert bits(state["fill"]) == bits(golden.tensor("fill"))
    assert bits(state["scalar"]) == bits(golden.tensor("scalar"))


def opened(folder: Path) -> ForeignCheckpoint:
    checkpoint = sp.open(folder, format="zarr")
    assert isinstance(checkpoint, ForeignCheckpoint)
    return checkpoint


def verified(folder: Path) -> VerifyReport:
    with opened(folder) as checkpoint:
        return verify_foreign(checkpoint)


def v2_array(folder: Path, name: str = "w", data: Any = SAMPLE, **options: Any) -> None:
    array = zarr.create_array(
        str(folder),
        name=name,
        shape=data.shape,
        dtype=data.dtype,
        zarr_format=2,
        **{"chunks": (3, 2), **options},
    )
    array[...] = data


def v3_array(folder: Path, name: str = "w", data: Any = SAMPLE, **options: Any) -> None:
    zarr.create(
        store=str(folder),
        path=name,
        shape=data.shape,
        dtype=data.dtype,
        zarr_format=3,
        **{"chunks": (3, 2), **options},
    )[...] = data


V2_OPTIONS: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "fortran": {"compressors": None, "order": "F"},
    "slash": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "fortran compressed": {"order": "F"},
    "zlib": {"compressors": numcodecs.Zlib()},
    "gzip": {"compressors": numcodecs.GZip()},
    "bz2": {"compressors": numcodecs.BZ2()},
    "lzma": {"compressors": numcodecs.LZMA()},
    "zstd": {"compressors": numcodecs.Zstd(checksum=True)},
    "blosc": {"compressors": numcodecs.Blosc(cname="zstd", shuffle=2)},
    "lz4": {"compressors": numcodecs.LZ4()},
    "shuffle": {"filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.LZ4()},
    "delta": {"filters": [numcodecs.Delta("<f4")], "compressors": numcodecs.Zlib()},
    "crc32": {"filters": [numcodecs.Delta("<f4"), numcodecs.CRC32()], "compressors": None},
    "crc32c": {"filters": [numcodecs.CRC32C()], "compressors": None},
    "fletcher32": {"filters": [numcodecs.Fletcher32()], "compressors": numcodecs.Zstd()},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", V2_OPTIONS.values(), ids=V2_OPTIONS)
def test_codecs_of_format_2(options: dict[str, Any], tmp_path: Path) -> None:
    v2_array(tmp_path, **options)
    v2_array(tmp_path, "big", SAMPLE.astype(">f4"), **{**options, "filters": None})
    for key in ("w", "big"):
        assert bits(opened(tmp_path)[key].read()) == bits(torch.from_numpy(SAMPLE)), key
        assert opened(tmp_path)[key][2:6, 1:4].tolist() == SAMPLE[2:6, 1:4].tolist()
    assert verified(tmp_path).ok


def sharded(*inner: Any, **options: Any) -> ShardingCodec:
    return ShardingCodec(chunk_shape=(3, 2), codecs=[BytesCodec(), *inner], **options)


V3_OPTIONS: dict[str, dict[str, Any]] = {
    "raw": {"codecs": [BytesCodec()]},
    "big-endian": {"codecs": [BytesCodec(endian="big")]},
    "big-endian gzip": {"codecs": [BytesCodec(endian="big"), GzipCodec()]},
    "zstd": {"codecs": [BytesCodec(), ZstdCodec(checksum=True)]},
    "blosc": {"codecs": [BytesCodec(), BloscCodec(typesize=4)]},
    "crc32c": {"codecs": [BytesCodec(), Crc32cCodec()]},
    "two": {"codecs": [BytesCodec(), GzipCodec(), ZstdCodec(), Crc32cCodec()]},
    "transpose": {"codecs": [TransposeCodec(order=(1, 0)), BytesCodec(endian="big")]},
    "transpose zstd": {"codecs": [TransposeCodec(order=(1, 0)), BytesCodec(), ZstdCodec()]},
    "v2 names": {"codecs": [BytesCodec()], "chunk_key_encoding": ("v2", "/")},
    "dots": {"codecs": [BytesCodec()], "chunk_key_encoding": ("default", ".")},
    "shard": {"codecs": [sharded()], "chunks": (6, 4)},
    "shard, index first": {"codecs": [sharded(index_location="start")], "chunks": (6, 4)},
    "shard zstd": {"codecs": [sharded(ZstdCodec())], "chunks": (6, 4)},
    "shard, no checksum": {"codecs": [sharded(index_codecs=[BytesCodec()])], "chunks": (6, 4)},
    "shard of transposed": {
        "codecs": [ShardingCodec(chunk_shape=(3, 2), codecs=[TransposeCodec(order=(1, 0)), BytesCodec()])],
        "chunks": (6, 4),
    },
    "transposed shard": {
        "codecs": [
            TransposeCodec(order=(1, 0)),
            ShardingCodec(chunk_shape=(3, 2), codecs=[BytesCodec()]),
        ],
        "chunks": (6, 6),
    },
    "shard in a shard": {
        "codecs": [ShardingCodec(chunk_shape=(6, 4), codecs=[sharded(Crc32cCodec())])],
        "chunks": (12, 8),
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", V3_OPTIONS.values(), ids=V3_OPTIONS)
def test_codecs_of_format_3(options: dict[str, Any], tmp_path: Path) -> None:
    v3_array(tmp_path, **options)
    assert bits(opened(tmp_path)["w"].read()) == bits(torch.from_numpy(SAMPLE))
    assert opened(tmp_path)["w"][2:6, 1:4].tolist() == SAMPLE[2:6, 1:4].tolist()
    assert verified(tmp_path).ok


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "complex128", "uint64", "bool"]
)
@pytest.mark.parametrize("version", [2, 3])
def test_dtypes_of_tensorstore(dtype: str, version: int, tmp_path: Path) -> None:
    options = {"driver": "zarr" if version == 2 else "zarr3", "kvstore": f"file://{tmp_path}/w"}
    store = tensorstore.open(
        options,
        create=True,
        dtype=getattr(tensorstore, dtype),
        shape=[5, 3],
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=[2, 2]),
    ).result()
    raw = np.arange(15, dtype=np.uint8).reshape(5, 3) % (2 if dtype == "bool" else 15)
    store[...] = raw.astype(store.dtype.numpy_dtype)
    assert bits(opened(tmp_path)["w"].read()) == bits(torch.from_numpy(raw).to(getattr(torch, dtype)))


@given(st.data())
@settings(max_examples=40)
@pytest.mark.filterwarnings("ignore")
def test_any_array_is_read_whole_and_in_slices(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=3), label="shape")
    chunks = [data.draw(st.integers(1, 4)) for _ in shape]
    inner = [data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])) for size in chunks]
    order = data.draw(st.permutations(range(len(shape))))
    codecs: list[Any] = [BytesCodec(endian=data.draw(st.sampled_from(["little", "big"])))]
    codecs += [codec for codec in (ZstdCodec(), Crc32cCodec()) if data.draw(st.booleans())]
    if data.draw(st.booleans()):
        codecs.insert(0, TransposeCodec(order=order))
    if shape and data.draw(st.booleans()):  # zarr-python cannot write shards of no dimensions
        codecs = [ShardingCodec(chunk_shape=tuple(inner), codecs=codecs)]
    seed = np.random.default_rng(data.draw(st.integers(0, 9)))
    content = seed.integers(0, 3, shape).astype(np.int32)
    box = tuple(slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape)
    with tempfile.TemporaryDirectory() as folder:
        v3_array(Path(folder), data=content, chunks=tuple(chunks), codecs=codecs, fill_value=1)
        with opened(Path(folder)) as checkpoint:
            assert checkpoint["w"].read().numpy().tolist() == content.tolist()
            assert checkpoint["w"][box].numpy().tolist() == content[box].tolist()


def test_uncompressed_chunks_are_ranges_of_files(tmp_path: Path) -> None:
    v3_array(tmp_path, codecs=[BytesCodec()])
    v3_array(tmp_path, "s", codecs=[sharded()], chunks=(6, 4))
    for key in ("w", "s"):
        views = [box.located() for box in opened(tmp_path).reader.tensors[key].boxes]
        assert len(views) == 9
        assert all(isinstance(view.extent, FileRange) for view in views)


def test_bfloat16_as_unsigned_integers_with_an_attribute(tmp_path: Path) -> None:
    expected = torch.arange(35, dtype=torch.bfloat16).reshape(7, 5) / 3
    raw = expected.view(torch.uint16).numpy()
    v3_array(tmp_path, "v3", raw, attributes={"shardproof:dtype": "bfloat16"}, fill_value=0x3F80)
    v2_array(tmp_path, "v2", raw, attributes={"shardproof:dtype": "bfloat16"})
    v2_array(tmp_path, "numpy", raw, compressors=None, fill_value=None)
    metadata = tmp_path / "numpy" / ".zarray"
    metadata.write_text(metadata.read_text().replace('"<u2"', '"<V2"'))
    for key in ("v3", "v2", "numpy"):
        assert bits(opened(tmp_path)[key].read()) == bits(expected), key
    (tmp_path / "v3" / "c" / "0" / "0").unlink()
    assert opened(tmp_path)["v3"][:3, :2].eq(1.0).all(), "the fill value is given as bits"
    changed(
        tmp_path / "v3" / "zarr.json", lambda array: array["attributes"].update({"shardproof:dtype": "int8"})
    )
    with pytest.raises(FormatError, match="int8"):
        opened(tmp_path)


@pytest.mark.parametrize("fill", [1.5, "NaN", "-Infinity", "0x7fc00001"])
def test_fill_values(fill: float | str, tmp_path: Path) -> None:
    v3_array(tmp_path)
    changed(tmp_path / "w" / "zarr.json", lambda array: array.update(fill_value=fill))
    shutil.rmtree(tmp_path / "w" / "c" / "0")
    number = (
        np.array([0x7FC00001], np.uint32).view(np.float32)[0] if str(fill)[:2] == "0x" else np.float32(fill)
    )
    expected = np.concatenate([np.full((3, 5), number, np.float32), SAMPLE[3:]])
    with opened(tmp_path) as checkpoint:
        assert bits(checkpoint["w"].read()) == bits(torch.from_numpy(expected))
        (note,) = checkpoint.reader.notes
        assert "3 absent chunks, such as w/c/0/0, read as the fill value" in note
        assert "cannot tell a lost chunk from an empty one" in note


def test_the_root_may_be_an_array(tmp_path: Path) -> None:
    v3_array(tmp_path / "weight", "")
    with sp.open(tmp_path / "weight") as checkpoint:
        assert checkpoint.keys() == ["weight"]
        assert bits(checkpoint["weight"].read()) == bits(torch.from_numpy(SAMPLE))


# Damage.


def changed(path: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


PROVED = {
    "v2 zlib": (v2_array, {"compressors": numcodecs.Zlib()}),
    "v2 gzip": (v2_array, {"compressors": numcodecs.GZip()}),
    "v2 bz2": (v2_array, {"compressors": numcodecs.BZ2()}),
    "v2 zstd": (v2_array, {"compressors": numcodecs.Zstd(checksum=True)}),
    "v2 crc32c": (v2_array, {"filters": [numcodecs.CRC32C()], "compressors": None}),
    "v3 crc32c": (v3_array, {"codecs": [BytesCodec(), ZstdCodec(), Crc32cCodec()]}),
    "v3 zstd": (v3_array, {"codecs": [BytesCodec(), ZstdCodec(checksum=True)]}),
    "shard": (v3_array, {"codecs": [sharded(Crc32cCodec())], "chunks": (9, 6)}),
    "blosc": (v2_array, {"compressors": numcodecs.Blosc()}),
    "lz4": (v2_array, {"compressors": numcodecs.LZ4()}),
    "raw shard": (v3_array, {"codecs": [sharded()], "chunks": (9, 6)}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROVED)
def test_every_damaged_byte_is_found_where_there_is_a_checksum(name: str, tmp_path: Path) -> None:
    write, options = PROVED[name]
    write(tmp_path, **options)
    has_checksum = name not in ("blosc", "lz4", "raw shard")
    file = next(path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path.name[0] == "0")
    whole = file.read_bytes()
    expected = bits(torch.from_numpy(SAMPLE))
    found = opened(tmp_path).reader.tensors["w"].boxes[0].located()
    assert found.extent.has_checksum == has_checksum
    chosen = random.Random(0)
    for at in range(0, len(whole), 1 + len(whole) // 75):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chosen.randrange(8)
        file.write_bytes(damaged)
        try:
            same = bits(opened(tmp_path)["w"].read()) == expected
        except ShardproofError:
            pass
        else:
            assert same or not has_checksum, at
    for size in range(0, len(whole), 1 + len(whole) // 50):
        file.write_bytes(whole[:size])
        with pytest.raises(ShardproofError):
            opened(tmp_path)["w"].read()
        assert not verified(tmp_path).ok


@given(st.binary(max_size=80), st.sampled_from(["blosc", "zstd", "lz4", "gzip", "zlib", "bz2", "lzma"]))
def test_decoders_survive_any_bytes(data: bytes, name: str) -> None:
    from shardproof.formats.zarr.zarr_codecs import Codec, Codecs

    magic = {
        "blosc": b"\x02\x01\x21\x04\x30\0\0\0\x30\0\0\0",
        "zstd": b"\x28\xb5\x2f\xfd",
        "lz4": b"\x30\0\0\0",
    }
    chain = Codecs((Codec.of(name, {}),), 48)
    for content in (data, magic.get(name, b"") + data):
        try:
            assert len(chain.decode(content, "file", 0)) == 48
        except (FormatError, CorruptChunkError):
            pass


def bomb(name: str) -> bytes:
    zeros = bytes(1 << 24)
    if name == "zlib":
        return zlib.compress(zeros)
    if name == "zstd without size":  # a frame whose blocks repeat a byte 128 KiB times
        block = (1 << 1 | (1 << 17) << 3).to_bytes(3, "little") + b"\0"
        return b"\x28\xb5\x2f\xfd\0\x58" + block * 100 + b"\x01\0\0"
    return bytes(
        {"zstd": numcodecs.Zstd(), "blosc": numcodecs.Blosc(), "lz4": numcodecs.LZ4()}[name].encode(zeros)
    )


BOMBS = {
    "zlib": "gives 168001 bytes, expected 168000",
    "zstd": "header says 16777216 bytes",
    "zstd without size": "Destination buffer is too small",
    "blosc": "header says 16777216 bytes",
    "lz4": "header says 16777216 bytes",
}


@pytest.mark.parametrize("name", BOMBS)
def test_chunks_that_inflate_without_bounds_are_refused(name: str, tmp_path: Path) -> None:
    compressor = {"zlib": numcodecs.Zlib(), "blosc": numcodecs.Blosc(), "lz4": numcodecs.LZ4()}
    v2_array(tmp_path, compressors=compressor.get(name, numcodecs.Zstd()), chunks=(700, 60))
    data = bomb(name)
    assert len(data) < 700 * 60 * 4
    (tmp_path / "w" / "0.0").write_bytes(data)
    with pytest.raises(ShardproofError, match=BOMBS[name]):
        opened(tmp_path)["w"].read()


def test_a_chunk_of_an_impossible_size_is_not_read(tmp_path: Path) -> None:
    v2_array(tmp_path)
    with (tmp_path / "w" / "0.0").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match="has 1099511627776 bytes, expected at most"):
        opened(tmp_path)["w"].read()


def test_a_zstd_frame_without_a_size_is_read(tmp_path: Path) -> None:
    v2_array(tmp_path, compressors=numcodecs.Zstd(), chunks=(7, 5))
    block = SAMPLE.tobytes()
    for content, is_whole in ((block, True), (block[:-4], False), (block + b"1234", False)):
        frame = b"\x28\xb5\x2f\xfd\0\x58" + (1 | len(content) << 3).to_bytes(3, "little") + content
        (tmp_path / "w" / "0.0").write_bytes(frame)
        if is_whole:
            assert bits(opened(tmp_path)["w"].read()) == bits(torch.from_numpy(SAMPLE))
        else:
            with pytest.raises(FormatError):
                opened(tmp_path)["w"].read()


@pytest.mark.parametrize("codec", ["pickle", "vlen-utf8", "msgpack2", "nothing", None])
def test_unknown_codecs_are_refused_for_the_key_alone(codec: Any, tmp_path: Path) -> None:
    v2_array(tmp_path, compressors=numcodecs.Zlib())
    v2_array(tmp_path, "other", compressors=None)
    changed(tmp_path / "w" / ".zarray", lambda array: array.update(compressor={"id": codec}))
    assert bits(opened(tmp_path)["other"].read()) == bits(torch.from_numpy(SAMPLE))
    with pytest.raises(PlainDataError, match="w is a Zarr array .*the codec .* is unknown"):
        opened(tmp_path)["w"]


def test_filters_cannot_ask_for_any_amount_of_memory(tmp_path: Path) -> None:
    v2_array(tmp_path, compressors=None)
    filters = [{"id": "astype", "encode_dtype": "<f4", "decode_dtype": "<U100000000"}]
    changed(tmp_path / "w" / ".zarray", lambda array: array.update(filters=filters))
    with pytest.raises(PlainDataError, match="U100000000"):
        opened(tmp_path)["w"]


@pytest.mark.filterwarnings("ignore")
def test_every_damaged_byte_of_a_shard_index_is_found(tmp_path: Path) -> None:
    v3_array(tmp_path, codecs=[sharded()], chunks=(9, 6))
    file = tmp_path / "w" / "c" / "0" / "0"
    whole = file.read_bytes()
    for at in range(len(whole) - 9 * 16 - 4, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(CorruptChunkError, match="CRC-32C: expected"):
            opened(tmp_path)["w"].read()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("offset", "count", "message"),
    [(10**6, 24, "chunk of 24 bytes from byte 1000000"), (0, 2**63, "bytes from byte"), (0, 20, "24")],
)
def test_a_shard_index_that_leads_out_is_refused(
    offset: int, count: int, message: str, tmp_path: Path
) -> None:
    v3_array(tmp_path, codecs=[sharded(index_codecs=[BytesCodec()])], chunks=(9, 6))
    file = tmp_path / "w" / "c" / "0" / "0"
    whole = bytearray(file.read_bytes())
    whole[-16:] = offset.to_bytes(8, "little") + count.to_bytes(8, "little")
    file.write_bytes(whole)
    with pytest.raises(FormatError, match=message):
        opened(tmp_path)["w"].read()


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [10**9, 10**9]},
        {"shape": [10**6, 10**6]},
        {"shape": [10**30, 5]},
        {"shape": [-7, 5]},
        {"shape": [7.0, 5]},
        {"shape": "75"},
        {"shape": None},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 2]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40, 2**40]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**30, 2**20]}}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/../"}}},
        {"codecs": []},
        {"codecs": [{"name": "transpose", "configuration": {"order": [0, 0]}}, {"name": "bytes"}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]},
        {"fill_value": "0x1ffffffff"},
        {"fill_value": {"a": 1}},
        {"fill_value": "zero"},
        {"zarr_format": 4},
        {"node_type": "tree"},
    ],
    ids=str,
)
def test_damaged_metadata_is_refused_quickly(change: dict[str, Any], tmp_path: Path) -> None:
    v3_array(tmp_path)
    changed(tmp_path / "w" / "zarr.json", lambda array: array.update(change))
    begun = time.monotonic()
    with pytest.raises(FormatError, match="w/zarr.json"):
        opened(tmp_path)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
        {"data_type": "string"},
        {"data_type": {"name": "fixed_length_utf32", "configuration": {"length_bytes": 4}}},
        {"codecs": [{"name": "zstd"}, {"name": "bytes"}]},
        {"storage_transformers": [{"name": "indirect"}]},
        {"must_know": {"name": "it"}},
    ],
    ids=str,
)
def test_an_unsupported_feature_hides_only_its_array(change: dict[str, Any], tmp_path: Path) -> None:
    v3_array(tmp_path)
    v3_array(tmp_path, "other")
    changed(tmp_path / "w" / "zarr.json", lambda array: array.update(change))
    assert bits(opened(tmp_path)["other"].read()) == bits(torch.from_numpy(SAMPLE))
    with pytest.raises(PlainDataError, match="w is a Zarr array with an unsupported feature"):
        opened(tmp_path)["w"]


def test_a_shard_with_a_false_number_of_chunks_is_refused_quickly(tmp_path: Path) -> None:
    v3_array(
        tmp_path, chunks=(2048, 2048), codecs=[ShardingCodec(chunk_shape=(2048, 2048), codecs=[BytesCodec()])]
    )
    inner = {"chunk_shape": [1, 1], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]}
    sharding = [{"name": "sharding_indexed", "configuration": inner}]
    changed(tmp_path / "w" / "zarr.json", lambda array: array.update(codecs=sharding))
    (tmp_path / "w" / "c" / "0" / "0").write_bytes(bytes(1000))
    begun = time.monotonic()
    with pytest.raises(FormatError, match="1000 bytes, expected at least 67108864 for its index"):
        opened(tmp_path)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, '{"zarr_format": 3}'])
def test_metadata_that_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    v3_array(tmp_path)
    (tmp_path / "w" / "zarr.json").write_text(text)
    with pytest.raises(FormatError, match="w/zarr.json"):
        opened(tmp_path)


def test_consolidated_metadata_must_agree_with_the_arrays(tmp_path: Path) -> None:
    for version, write in ((2, v2_array), (3, v3_array)):
        folder = tmp_path / str(version)
        root = zarr.open_group(str(folder), mode="w", zarr_format=version)
        write(folder, "a/w")
        write(folder, "b")
        zarr.consolidate_metadata(root.store)
        assert opened(folder).keys() == ["a.w", "b"]
        write(folder, "c")
        with opened(folder) as checkpoint:
            assert "does not list c" in checkpoint.reader.notes[0]
            assert bits(checkpoint["c"].read()) == bits(torch.from_numpy(SAMPLE))
        metadata = folder / "a" / "w" / (".zarray" if version == 2 else "zarr.json")
        text = metadata.read_text()
        changed(metadata, lambda array: array.update(shape=[6, 5]))
        with pytest.raises(FormatError, match="a/w differs from"):
            opened(folder)
        metadata.write_text(text)
        assert opened(folder).keys() == ["a.w", "b", "c"]
        metadata.unlink()
        with pytest.raises(StorageError, match="lists the array"):
            opened(folder)


def test_two_arrays_with_one_key_are_refused(tmp_path: Path) -> None:
    v3_array(tmp_path, "a/w")
    v3_array(tmp_path, "a.w")
    with pytest.raises(FormatError, match="same key a.w"):
        opened(tmp_path)


def test_metadata_of_both_formats_must_agree(tmp_path: Path) -> None:
    v2_array(tmp_path, compressors=None)
    v3_array(tmp_path / "other", codecs=[BytesCodec()], chunk_key_encoding=("v2", "."))
    shutil.copy(tmp_path / "other" / "w" / "zarr.json", tmp_path / "w")
    shutil.rmtree(tmp_path / "other")
    assert bits(opened(tmp_path)["w"].read()) == bits(torch.from_numpy(SAMPLE))
    changed(tmp_path / "w" / ".zarray", lambda array: array.update(dtype="<i4"))
    with pytest.raises(FormatError, match="says int32"):
        opened(tmp_path)


def test_cut_and_missing_files_are_errors(tmp_path: Path) -> None:
    v3_array(tmp_path, codecs=[BytesCodec()])
    chunk = tmp_path / "w" / "c" / "1" / "1"
    checkpoint = opened(tmp_path)
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert any("23 bytes, expected 24" in fault.message for fault in verified(tmp_path).faults)
    with pytest.raises(StorageError, match="expected 24"):
        sp.load(tmp_path, {"w": torch.zeros(7, 5)})
    chunk.unlink()
    with pytest.raises(
        StorageError, match=r"c/1/1 is missing: it holds the part of w that begins at \(3, 2\)"
    ):
        checkpoint["w"].read()
    with pytest.raises(NotCommittedError, match="not a Zarr group"):
        opened(tmp_path / "w" / "c")
