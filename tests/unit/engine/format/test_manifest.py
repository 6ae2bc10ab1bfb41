"""The manifest: round trips, damage, and hostile texts."""

from __future__ import annotations

import json
import resource
import time

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from shardproof.dtypes import DTYPES
from shardproof.engine.format import FileRecord, TensorRecord, decode_manifest, encode_manifest, read_manifest
from shardproof.errors import FormatError, NotCommittedError
from shardproof.storage import LocalStorage
from tests.instructions import count_instructions
from tests.unit.engine.format.samples import manifest, sealed


def _plain() -> dict:
    return json.loads(encode_manifest(manifest())) | {}


def _edited(**changes) -> bytes:
    value = _plain()
    del value["digest"]
    return sealed(value | changes)


def test_round_trip():
    data = encode_manifest(manifest())
    assert decode_manifest(data, "manifest.json") == manifest()
    assert encode_manifest(decode_manifest(data, "manifest.json")) == data


def test_the_text_is_what_the_specification_says():
    value = _plain()
    assert list(value)[:2] == ["format", "version"]
    assert value["format"] == "shardproof" and value["version"] == 1
    assert value["tensors"][0] == ["a.weight", "float32", [4, 2]]
    assert value["files"][1] == ["shards/00001-5f0c.safetensors", 4128, 32 * "f", 4096, 1]
    assert list(value)[-1] == "digest"


def test_spaces_do_not_matter():
    value = _plain()
    del value["digest"]
    assert decode_manifest(sealed(json.dumps(value, indent=2).encode()), "f") == manifest()


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_found(bit):
    data = bytearray(encode_manifest(manifest()))
    for at in range(len(data)):
        data[at] ^= 1 << bit
        with pytest.raises(FormatError, match=r"manifest\.json"):
            decode_manifest(bytes(data), "manifest.json")
        data[at] ^= 1 << bit


def test_every_cut_is_found():
    data = encode_manifest(manifest())
    for length in range(len(data)):
        with pytest.raises(FormatError):
            decode_manifest(data[:length], "manifest.json")
    with pytest.raises(FormatError):
        decode_manifest(data + b"\n", "manifest.json")


def test_every_flipped_bit_under_a_right_digest_is_refused_or_read_as_it_stands():
    """As after an edit by hand: the values differ only as the text does."""
    data = encode_manifest(manifest())
    body = data[:-46] + b"}"
    for at in range(len(body) - 1):  # the last byte makes way for the digest
        for bit in range(8):
            text = bytearray(body)
            text[at] ^= 1 << bit
            try:
                found = decode_manifest(sealed(bytes(text)), "f")
            except FormatError:
                continue
            assert repr(found) != repr(manifest())  # 0.0 is not -0.0
            again = json.loads(text)
            assert [msgspec.to_builtins(record) for record in found.tensors] == [
                [key, dtype, tuple(shape)] for key, dtype, shape in again["tensors"]
            ]
            assert found.objects == again["objects"] and found.metadata == again["metadata"]


_SHARD = "shards/00000-5f0c.safetensors"
BAD = {
    "a name that climbs": {"files": [["../../etc/passwd", 1, 32 * "0", 0, 0]]},
    "an absolute name": {"files": [["/etc/passwd", 1, 32 * "0", 0, 0]]},
    "an index that climbs": {"index": ["shards/../../x", 1, 32 * "0", 0, -1]},
    "an empty name": {"files": [["", 1, 32 * "0", 0, 0]]},
    "the name of somebody else's file": {"files": [["tokenizer.json", 1, 32 * "0", 0, 0]]},
    "a shard of another attempt": {"files": [["shards/00000-abcd.safetensors", 1, 32 * "0", 0, 0]]},
    "a shard of another rank": {"files": [["shards/00001-5f0c.safetensors", 1, 32 * "0", 0, 0]]},
    "an index of another attempt": {"index": ["index-abcd.safetensors", 1, 32 * "0", 0, -1]},
    "another attempt than its files": {"attempt": "abcd"},
    "a file twice": {"files": [[_SHARD, 1, 32 * "0", 0, 0], [_SHARD, 1, 32 * "0", 0, 0]]},
    "a negative size": {"files": [[_SHARD, -1, 32 * "0", 0, 0]]},
    "a huge size": {"files": [[_SHARD, 2**63, 32 * "0", 0, 0]]},
    "data after the end": {"files": [[_SHARD, 10, 32 * "0", 11, 0]]},
    "a size that is no integer": {"files": [[_SHARD, 1.5, 32 * "0", 0, 0]]},
    "a digest in capitals": {"files": [[_SHARD, 1, 32 * "A", 0, 0]]},
    "a short digest": {"files": [[_SHARD, 1, "0", 0, 0]]},
    "a rank that is none": {"files": [[_SHARD, 1, 32 * "0", 0, 2]]},
    "a file record too long": {"files": [[_SHARD, 1, 32 * "0", 0, 0, 0]]},
    "a negative dimension": {"tensors": [["a", "float32", [-1]]]},
    "a huge dimension": {"tensors": [["a", "float32", [2**63]]]},
    "a shape whose product overflows": {"tensors": [["a", "float32", [2**40, 2**40]]]},
    "a shape whose bytes overflow": {"tensors": [["a", "float64", [2**60]]]},
    "an empty shape that overflows": {"tensors": [["a", "float32", [0, 2**40, 2**40]]]},
    "too many dimensions": {"tensors": [["a", "float32", [1] * 65]]},
    "an unknown dtype": {"tensors": [["a", "float33", [1]]]},
    "tensors out of order": {"tensors": [["b", "float32", []], ["a", "float32", []]], "aliases": {}},
    "a tensor twice": {"tensors": [["a", "float32", []], ["a", "float32", []]], "aliases": {}},
    "a tensor record too short": {"tensors": [["a", "float32"]]},
    "an alias of nothing": {"aliases": {"x": "nothing"}},
    "an alias of an alias": {"aliases": {"x": "a.weight", "y": "x"}},
    "an alias that is a tensor": {"aliases": {"a.weight": "step"}},
    "an object that is a tensor": {"objects": {"a.weight": 1}},
    "an object that is an alias": {"objects": {"b.weight": 1}},
    "a world of nobody": {"world_size": 0},
    "a world size that is a truth value": {"world_size": True},
    "a negative step": {"step": -1},
    "an attempt that climbs": {"attempt": "../x"},
    "a time that is a text": {"time": "now"},
    "a member that is unknown": {"extra": 1},
    "a nested text": {"metadata": json.loads("[" * 500 + "]" * 500)},
}


def test_the_file_names_of_the_refused_manifests_are_valid():
    assert decode_manifest(_edited(files=[[_SHARD, 1, 32 * "0", 0, 0]]), "f").files[0].name == _SHARD


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
def test_invalid_members_are_refused(changes):
    with pytest.raises(FormatError, match="^f: "):
        decode_manifest(_edited(**changes), "f")


def test_every_member_is_required():
    value = _plain()
    del value["digest"]
    for name in value:
        with pytest.raises(FormatError):
            decode_manifest(sealed({key: value[key] for key in value if key != name}), "f")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step":1000', b'"step":1000,"step":2000'),
        (b'"step":1000', b'"step":1000,"st\\u0065p":2000'),
        (b'"loss":2.5', b'"loss":2.5,"loss":3.5'),
        (b'"objects":{', b'"objects":{"schedule":0,'),
        (b'"objects":{', b'"objects":{"x":{"y":[{"a":1,"a":1}]},'),
        (b'"aliases":{', b'"aliases":{"b.weight":"step",'),
    ],
)
def test_duplicate_names_are_refused(old, new):
    body = encode_manifest(manifest())[:-46] + b"}"
    assert old in body
    with pytest.raises(FormatError, match="twice|duplicate"):
        decode_manifest(sealed(body.replace(old, new)), "f")


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"0x10", b"1" * 5000])
@pytest.mark.parametrize("place", [b'"step":1000', b'"time":1763712000.25', b'"loss":2.5'])
def test_numbers_that_json_does_not_have_are_refused(place, number):
    body = encode_manifest(manifest())[:-46] + b"}"
    name = place.split(b":")[0]
    with pytest.raises(FormatError):
        decode_manifest(sealed(body.replace(place, name + b":" + number)), "f")


@pytest.mark.parametrize("version", [0, 3, 10**6])
def test_another_version_is_named(version):
    with pytest.raises(FormatError, match=f"version {version}, but this program reads"):
        decode_manifest(_edited(version=version), "f")
    with pytest.raises(FormatError, match=f"version {version}, but this program reads"):
        decode_manifest(_edited(version=version, novelty={}), "f")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 10**7,
        b'{"a":' * 10**6,
        b'"' + b"\\" * 10**7,
        b"{" * 10**7,
        b'":' * 10**6,
        b"\xff" * 10**6,
        b"9" * 10**7,
    ],
    ids=["arrays", "objects", "backslashes", "braces", "colons", "no unicode", "digits"],
)
def test_bombs_are_refused_fast(text):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(FormatError):
        decode_manifest(sealed(text + b"}"), "f")
    assert time.monotonic() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


@pytest.mark.parametrize(
    "metadata",
    [
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"a": [{"b": (1, 2)}]},
        {"a": {1: 2}},
        {"a": b"bytes"},
        {"a": {1, 2}},
        {"a": object()},
        {"a": "\ud800"},
        {"a": json.loads("[" * 300 + "]" * 300)},
    ],
    ids=["nan", "inf", "tuple", "integer key", "bytes", "set", "object", "surrogate", "deep"],
)
def test_values_that_json_would_change_are_not_written(metadata):
    with pytest.raises(FormatError):
        encode_manifest(manifest(metadata=metadata))
    with pytest.raises(FormatError):
        encode_manifest(manifest(objects=metadata))


def test_a_manifest_that_would_not_be_read_is_not_written():
    with pytest.raises(FormatError, match="out of order"):
        encode_manifest(manifest(tensors=tuple(reversed(manifest().tensors))))
    with pytest.raises(FormatError, match=r"metadata\.loss is nan"):
        encode_manifest(manifest(metadata={"loss": float("nan")}))


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    metadata=st.dictionaries(_TEXT, _JSON, max_size=3),
    objects=st.dictionaries(_TEXT.map(lambda key: "o" + key), _JSON, max_size=3),
    tensors=st.dictionaries(
        _TEXT.map(lambda key: "t" + key),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 2**20), max_size=2)),
        max_size=4,
    ),
    step=st.none() | st.integers(0, 2**63 - 1),
    moment=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_values_round_trip(metadata, objects, tensors, step, moment):
    written = manifest(
        metadata=metadata,
        objects=objects,
        tensors=tuple(
            TensorRecord(key, dtype, tuple(shape)) for key, (dtype, shape) in sorted(tensors.items())
        ),
        aliases={},
        step=step,
        time=moment,
    )
    read = decode_manifest(encode_manifest(written), "f")
    assert read == written
    assert repr(read) == repr(written)  # tells 1 from 1.0 and 0.0 from -0.0


def test_tensors_are_decoded_in_bulk():
    """Python does little for each tensor: 100,000 take a tenth of a second."""

    def cost(count: int) -> int:
        tensors = tuple(
            TensorRecord(f"layers.{i:04d}.weight", "bfloat16", (4096, 4096)) for i in range(count)
        )
        data = encode_manifest(manifest(tensors=tensors, aliases={}))
        return count_instructions(lambda: decode_manifest(data, "f"))

    assert cost(2000) - cost(2) < 30 * 1998


def test_read_manifest(tmp_path):
    storage = LocalStorage(tmp_path)
    with pytest.raises(NotCommittedError, match="no committed checkpoint"):
        read_manifest(storage)
    storage.publish("manifest.json", encode_manifest(manifest()))
    assert read_manifest(storage) == manifest()
    storage.publish("manifest.json", b"", replace=True)
    with pytest.raises(FormatError, match=str(tmp_path)):
        read_manifest(storage)


def test_a_manifest_too_large_is_not_read(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(FormatError, match="at most"):
        read_manifest(LocalStorage(tmp_path))


def test_records_have_defaults():
    assert FileRecord("a", 1, 32 * "0") == FileRecord("a", 1, 32 * "0", 0, -1)
