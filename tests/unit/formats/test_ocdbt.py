"""The tree of an OCDBT database: read as TensorStore reads it, and refused where it would use up memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import tensorstore
import zstandard

import shardproof as sp
from shardproof.engine.foreign.read_budget import ReadBudget
from shardproof.errors import FormatError, ShardproofError
from shardproof.formats.ocdbt import OcdbtArrays, OcdbtValue, read_ocdbt_tree
from shardproof.storage import LocalStorage

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE


def read_tree(folder: Path) -> dict[str, OcdbtValue]:
    storage = LocalStorage(folder)
    return read_ocdbt_tree(lambda: storage.read("manifest.ocdbt"), storage.read, ReadBudget())


@pytest.mark.parametrize("compression", [None, {"id": "zstd", "level": 1}])
@pytest.mark.parametrize(("node_bytes", "inline_bytes"), [(300, 0), (300, 100), (1 << 20, 10), (64, 1000)])
def test_keys_and_values_are_those_of_tensorstore(
    tmp_path: Path, compression: Any, node_bytes: int, inline_bytes: int
) -> None:
    """Small nodes give a high tree. Several transactions give several versions and data files."""
    config = {
        "max_decoded_node_bytes": node_bytes,
        "max_inline_value_bytes": inline_bytes,
        "compression": compression,
    }
    base = {"driver": "file", "path": f"{tmp_path}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    expected = {f"layer/{number % 7}/{number}.{number}": b"v" * (number % 40) for number in range(400)}
    for part in range(2):
        transaction = tensorstore.Transaction()
        for key, value in expected.items():
            if len(key) % 2 == part:
                store.with_transaction(transaction)[key] = value
        transaction.commit_sync()
    del store["layer/3/3.3"]
    del expected["layer/3/3.3"]
    found = {
        key: value.inline
        if not value.file
        else (tmp_path / value.file).read_bytes()[value.start : value.start + value.nbytes]
        for key, value in read_tree(tmp_path).items()
    }
    assert found == expected


def test_an_empty_database_has_no_keys(tmp_path: Path) -> None:
    base = {"driver": "file", "path": f"{tmp_path}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    store["a"] = b"1"
    del store["a"]
    assert read_tree(tmp_path) == {}


def number(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def numbers(*values: int) -> bytes:
    return b"".join(map(number, values))


def encoded(magic: int, content: bytes, *, compress: bool = False) -> bytes:
    body = numbers(0, int(compress)) + (zstandard.compress(content) if compress else content)
    data = magic.to_bytes(4, "big") + (len(body) + 16).to_bytes(8, "little") + body
    return data + google_crc32c.value(data).to_bytes(4, "little")


def table(path: bytes = b"data") -> bytes:
    return numbers(1, len(path), 0) + path


def inner_node(height: int, children: int, start: int, nbytes: int) -> bytes:
    """A node whose entries are all the same node."""
    zero, one = bytes(children), b"\1" * children
    places = zero + number(start) * children + number(nbytes) * children
    keys = zero[1:] + one + one + bytes(range(children))
    return encoded(NODE, bytes([height]) + table() + number(children) + keys + places + 3 * zero)


def leaf_node(*, key: bytes = b"k", value: bytes = b"v", compress: bool = False) -> bytes:
    entry = numbers(len(key)) + key + numbers(len(value), 0) + value
    return encoded(NODE, b"\0" + table() + number(1) + entry, compress=compress)


def written(folder: Path, nodes: list[bytes], height: int, path: bytes = b"data") -> Path:
    """A database whose root is the last node. It has the tree of an Orbax checkpoint of one array."""
    data = b"".join(nodes)
    root = numbers(0, len(data) - len(nodes[-1]), len(nodes[-1]))
    config = bytes(16) + b"\0" + numbers(100, 1 << 23) + b"\4" + number(0)
    versions = numbers(1, 1) + bytes([height]) + root + bytes(3) + bytes(8)
    (folder / "manifest.ocdbt").write_bytes(encoded(MANIFEST, config + table(path) + versions + b"\0"))
    (folder / "data").write_bytes(data)
    leaf = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": {"('w',)": leaf}, "use_ocdbt": True}))
    return folder


def test_a_database_written_here_is_one_for_tensorstore(tmp_path: Path) -> None:
    """So the hostile ones below are refused for what they ask, and not for how they are written."""
    leaf = leaf_node()
    written(tmp_path, [leaf, inner_node(1, 3, 0, len(leaf))], 1)
    base = {"driver": "file", "path": f"{tmp_path}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    assert sorted(store.list().result()) == [b"\0k", b"\1k", b"\2k"]
    assert sorted(read_tree(tmp_path)) == ["\0k", "\1k", "\2k"]


def test_a_database_of_many_empty_entries_is_read(tmp_path: Path) -> None:
    """They compress to almost nothing, so the stored bytes do not bound them."""
    count = 270_080
    firsts = range(0, count, 256)  # the others share the first two bytes of their keys
    shared = (b"\0" + b"\2" * 255) * len(firsts)
    added = (b"\3" + b"\1" * 255) * len(firsts)
    keys = b"".join(first.to_bytes(3, "big") + bytes(range(1, 256)) for first in firsts)
    entries = shared[1:] + added + keys + bytes(2 * count)
    node = encoded(NODE, b"\0" + table() + number(count) + entries, compress=True)
    arrays = OcdbtArrays(LocalStorage(written(tmp_path, [node], 0)))
    assert len(node) < count / 10 and len(arrays.listed()) == count


def test_a_database_with_numbered_manifests_is_unsupported_and_its_remedy_helps(tmp_path: Path) -> None:
    def database(name: str, **options: Any) -> Any:
        base = {"driver": "file", "path": f"{tmp_path}/{name}/"}
        return tensorstore.KvStore.open({"driver": "ocdbt", "base": base, **options}).result()

    source = database("numbered", config={"manifest_kind": "numbered"})
    source["a"] = b"1"
    with pytest.raises(FormatError, match="does not read this kind .* numbered manifests") as caught:
        OcdbtArrays(LocalStorage(tmp_path / "numbered"))
    assert "damaged" not in caught.value.message
    target = database("default")
    for key in source.list().result():
        target[key] = source[key]
    assert OcdbtArrays(LocalStorage(tmp_path / "default")).listed() == {"a"}


def test_a_node_that_is_named_again_and_again_is_refused(tmp_path: Path) -> None:
    """Eight levels of 100 references: 10^16 keys in 5 kB."""
    nodes = [leaf_node()]
    for height in range(1, 9):
        start = sum(map(len, nodes[:-1]))
        nodes.append(inner_node(height, 100, start, len(nodes[-1])))
    written(tmp_path, nodes, 8)
    assert (tmp_path / "data").stat().st_size < 10_000
    with pytest.raises(FormatError, match=r"manifest\.ocdbt: .*repeats itself too often"):
        sp.open(tmp_path)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([leaf_node(value=bytes(1 << 27), compress=True)], "more than 67108864 bytes after decompression"),
        ([leaf_node(key=bytes(1 << 17))], "a key shares 0 bytes and adds 131072"),
        ([leaf_node()[:-1] + b"\0"], "does not match its CRC-32C"),
        ([encoded(NODE, b"\0" + table() + number(1 << 40))], "has 1099511627776 entries"),
        ([encoded(NODE, b"\0" + number(1 << 40))], "ends within 1099511627775 numbers"),
        ([inner_node(1, 3, 0, 10)], "has the height 1, expected 0"),
    ],
)
def test_false_nodes_are_refused(tmp_path: Path, nodes: list[bytes], message: str) -> None:
    written(tmp_path, nodes, 0)
    with pytest.raises(FormatError, match=message):
        sp.open(tmp_path)


def test_a_data_file_outside_of_the_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(leaf_node())
    (tmp_path / "inner").mkdir()
    written(tmp_path / "inner", [leaf_node()], 0, b"../data")
    with pytest.raises(ShardproofError, match=r'a part "\.\."'):
        sp.open(tmp_path / "inner")


def test_a_chunk_that_decodes_to_more_than_its_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_METADATA").write_text(
        json.dumps(
            {
                "tree_metadata": {
                    "('w',)": {
                        "key_metadata": [{"key": "w", "key_type": 2}],
                        "value_metadata": {"value_type": "jax.Array"},
                    }
                },
                "use_ocdbt": True,
            }
        )
    )
    base = {"driver": "file", "path": f"{tmp_path}/"}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": "w/"},
        "metadata": {
            "shape": [8],
            "chunks": [4],
            "dtype": "<f4",
            "fill_value": None,
            "compressor": {"id": "zstd", "level": 1},
        },
    }
    array = tensorstore.open(spec, create=True).result()
    array[...] = list(range(8))
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    store["w/1"] = zstandard.compress(bytes(1 << 20))
    with sp.open(tmp_path) as checkpoint:
        assert checkpoint["w"][:4].tolist() == [0, 1, 2, 3]
        with pytest.raises(FormatError, match="its header says 1048576 bytes, expected 16"):
            checkpoint["w"].read()
