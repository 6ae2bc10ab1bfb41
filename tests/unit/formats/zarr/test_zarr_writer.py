"""The writer of Zarr groups: zarr-python and TensorStore read what it writes, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import shardproof as sp
from shardproof.errors import CorruptChunkError, FormatError, PlainDataError, StorageError, StructureError
from shardproof.formats import Contents, FormatWriter, WriteOptions, writer_of
from shardproof.state import decode_plain
from shardproof.storage import LocalStorage
from tests.unit.formats.peers import bits
from tests.unit.formats.writers import (
    ALL_DTYPES,
    TensorSource,
    contents_of,
    random_bits,
    tensors,
    write_all,
)

pytest.importorskip("google_crc32c")


def writer(contents: Contents, chunk: int | None = None, piece: int = 64 << 20) -> FormatWriter:
    return writer_of("zarr")(contents, WriteOptions(chunk, piece))


def as_tensor(values: Any, attributes: Any) -> torch.Tensor:
    """A tensor of an array that a peer read."""
    found = torch.from_numpy(np.array(values))  # a copy: a scalar is no array
    if "shardproof:dtype" not in attributes:
        return found
    dtype: torch.dtype = getattr(torch, attributes["shardproof:dtype"])
    if not found.numel():
        return torch.empty(found.shape, dtype=dtype)
    return found.reshape(-1).view(dtype).reshape(found.shape)


def read_with_zarr(folder: Path) -> dict[str, torch.Tensor]:
    zarr = pytest.importorskip("zarr", minversion="3")
    group = zarr.open_group(folder, mode="r", use_consolidated=True)
    unconsolidated = zarr.open_group(folder, mode="r", use_consolidated=False)
    assert set(group.array_keys()) == set(unconsolidated.array_keys())
    return {
        array.attrs.get("shardproof:key", name): as_tensor(array[...], array.attrs)
        for name, array in group.arrays()
    }


def read_with_tensorstore(folder: Path) -> dict[str, torch.Tensor]:
    tensorstore = pytest.importorskip("tensorstore")
    found = {}
    for path in folder.glob("*/zarr.json"):
        attributes = json.loads(path.read_text())["attributes"]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path.parent}/"}}
        values = tensorstore.open(spec, open=True, read=True).result().read().result()
        found[attributes.get("shardproof:key", path.parent.name)] = as_tensor(values, attributes)
    return found


def read_with_shardproof(folder: Path) -> dict[str, torch.Tensor]:
    with sp.open(folder) as checkpoint:
        return {item.key: checkpoint[item.key].read() for item in checkpoint.tensors}


READERS = [read_with_zarr, read_with_tensorstore, read_with_shardproof]


@pytest.mark.parametrize("read", READERS)
@settings(max_examples=25)
@given(state=tensors(ALL_DTYPES))
def test_tensors_of_every_kind_are_read_back(
    read: Any, state: dict[str, torch.Tensor], tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("c")
    source = write_all(writer(contents_of(state), 48, 16), state, folder)
    assert source.largest <= 16
    assert {key: bits(value) for key, value in read(folder).items()} == {
        key: bits(value) for key, value in state.items()
    }


KEYS = [
    "a/b",
    "../x",
    "..",
    ".",
    "__meta__",
    "zarr.json",
    "%2F",
    "c",
    "ü.ключ [0:2]",
    "a\0b",
    "a b",
    "A",
    "a.b.c",
    "x" * 255,
    "x" * 300,
    "x" * 299 + "y",
    "ü" * 128,
    "/" * 100,
]


@pytest.mark.parametrize("read", READERS)
def test_keys_that_zarr_cannot_have_as_names_are_escaped(read: Any, tmp_path: Path) -> None:
    state = {key: torch.tensor([at]) for at, key in enumerate(KEYS)}
    write_all(writer(contents_of(state)), state, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"], "no name leads out of the folder"
    assert {key: value.tolist() for key, value in read(tmp_path / "c").items()} == {
        key: value.tolist() for key, value in state.items()
    }
    assert (tmp_path / "c" / "a.b.c" / "zarr.json").exists()
    assert not list((tmp_path / "c").glob("__*")), "Zarr reserves such names"


@pytest.mark.parametrize("shape", [(100, 1 << 17), (3, 40, 1 << 17), (1, (9 << 20) + 5)])
def test_chunks_have_whole_rows_and_each_is_written_by_one_unit(shape: tuple[int, ...]) -> None:
    plan = writer(Contents({"w": ("float32", shape), "b": ("int8", (7,))}))
    boxes = [box for unit in plan.units for box in unit.boxes]
    assert len(set(boxes)) == len(boxes)
    of_w = [sizes for key, _, sizes in boxes if key == "w"]
    assert max(torch.Size(sizes).numel() * 4 for sizes in of_w) <= 32 << 20
    assert sum(torch.Size(sizes).numel() for sizes in of_w) == torch.Size(shape).numel()
    assert min(torch.Size(sizes).numel() * 4 for sizes in of_w) >= 16 << 20
    if shape[0] > 1:
        assert all(sizes[-1] == shape[-1] for sizes in of_w)


def test_units_are_small_enough_to_be_written_in_parallel() -> None:
    many = writer(Contents({f"b{at}": ("int8", (7,)) for at in range(1000)}))
    assert [len(unit.boxes) for unit in many.units] == [256, 256, 256, 232]
    large = writer(Contents({"w": ("int8", (1 << 30, 2))}))
    assert max(unit.nbytes for unit in large.units) <= 256 << 20
    assert sum(unit.nbytes for unit in large.units) == 2 << 30


@pytest.mark.parametrize("read", READERS)
def test_a_flipped_bit_of_a_chunk_is_found(read: Any, tmp_path: Path) -> None:
    state = {"w": random_bits("float32", (10, 3))}
    write_all(writer(contents_of(state), 50), state, tmp_path)
    (chunk,) = tmp_path.glob("w/c/2/0")
    assert chunk.stat().st_size == 4 * 12 + 4, "the last chunk has the size of all"
    data = bytearray(chunk.read_bytes())
    for at in (0, len(data) // 2, len(data) - 1):
        data[at] ^= 1
        chunk.write_bytes(data)
        with pytest.raises((ValueError, CorruptChunkError), match=r"(?i)checksum|digest mismatch|crc"):
            read(tmp_path)
        data[at] ^= 1


def test_there_is_no_group_before_the_commit(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    plan, target = writer(contents_of(state)), LocalStorage(tmp_path)
    records = {unit.name: plan.write(unit, TensorSource(state), target) for unit in plan.units}
    assert not list(tmp_path.rglob("zarr.json"))
    plan.commit(records, target)
    assert (tmp_path / "zarr.json").exists()


VALUES = {"lr": 0.1, "betas": (0.9, float("inf")), "names": ["ü", None]}


def test_plain_values_and_ties_are_attributes_of_the_group(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    state = {"embed": torch.ones(3)}
    contents = contents_of(state, objects=VALUES, aliases={"head": "embed"}, step=7, metadata={"run": (1,)})
    plan = writer(contents)
    write_all(plan, state, tmp_path)
    attributes = dict(zarr.open_group(tmp_path, mode="r").attrs)
    found = {key: decode_plain(value) for key, value in attributes.pop("shardproof:objects").items()}
    assert found == VALUES
    assert decode_plain(attributes.pop("shardproof:metadata")) == {"run": (1,)}
    assert attributes == {
        "shardproof:aliases": {"head": "embed"},
        "shardproof:every_chunk": True,
        "shardproof:step": 7,
    }
    assert len(plan.notes) == 1 and "head" in plan.notes[0]
    with sp.open(tmp_path) as checkpoint:
        assert {key: checkpoint[key] for key in checkpoint.objects} == VALUES
        assert (checkpoint.step, checkpoint.metadata) == (7, {"run": (1,)})
        assert checkpoint.aliases == {"head": "embed"}
        assert checkpoint["head"].read().tolist() == [1, 1, 1]


def test_a_tie_to_a_tensor_that_cannot_be_read_is_an_error_of_its_key_alone(tmp_path: Path) -> None:
    state = {"embed": torch.ones(3), "w": torch.ones(2)}
    write_all(writer(contents_of(state, aliases={"head": "embed"})), state, tmp_path)
    array = json.loads((tmp_path / "embed" / "zarr.json").read_text())
    (tmp_path / "embed" / "zarr.json").write_text(json.dumps({**array, "data_type": "float7"}))
    group = json.loads((tmp_path / "zarr.json").read_text())
    del group["consolidated_metadata"]
    (tmp_path / "zarr.json").write_text(json.dumps(group))
    with sp.open(tmp_path) as checkpoint:
        assert checkpoint.keys() == ["embed", "head", "w"]
        assert checkpoint["w"].read().tolist() == [1, 1]
        for key in ("embed", "head"):
            with pytest.raises(PlainDataError, match=f"{key} is .*float7"):
                checkpoint[key]


@pytest.mark.parametrize(
    "attributes",
    [
        {"shardproof:objects": []},
        {"shardproof:objects": {"embed": 1}},
        {"shardproof:aliases": {"head": "nothing"}},
        {"shardproof:aliases": {"embed": "embed"}},
        {"shardproof:step": -1},
        {"shardproof:step": True},
        {"shardproof:metadata": {"$tuple": []}},
        {"shardproof:metadata": {"$unknown": 1}},
    ],
)
def test_damaged_attributes_are_errors(attributes: dict[str, Any], tmp_path: Path) -> None:
    state = {"embed": torch.ones(3)}
    write_all(writer(contents_of(state)), state, tmp_path)
    group = json.loads((tmp_path / "zarr.json").read_text())
    (tmp_path / "zarr.json").write_text(json.dumps({**group, "attributes": attributes}))
    with pytest.raises(FormatError, match="zarr.json"):
        sp.open(tmp_path)


def test_a_lost_chunk_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    state = {"w": random_bits("float32", (10, 3))}
    write_all(writer(contents_of(state), 50), state, tmp_path)
    (tmp_path / "w" / "c" / "1" / "0").unlink()
    with sp.open(tmp_path) as checkpoint, pytest.raises(StorageError, match="w/c/1/0"):
        checkpoint["w"].read()


def test_an_interrupted_unit_and_an_interrupted_commit_are_repeated(tmp_path: Path) -> None:
    state = {"a": random_bits("float32", (64, 2)), "b": random_bits("bfloat16", (64,))}
    plan, target = writer(contents_of(state), 100, 16), LocalStorage(tmp_path)
    with pytest.raises(InterruptedError):
        plan.write(plan.units[0], TensorSource(state, fails_at=9), target)
    assert len(target.list()) == 1, "the chunk that was not finished is removed"
    (tmp_path / "a" / "c" / "1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "a" / "c" / "1" / "0").write_bytes(b"left behind" * 100)
    (tmp_path / "b").mkdir(exist_ok=True)
    (tmp_path / "b" / "zarr.json").write_bytes(b"left behind")
    write_all(plan, state, tmp_path)
    write_all(plan, state, tmp_path)
    found = read_with_zarr(tmp_path)
    assert {key: bits(value) for key, value in found.items()} == {
        key: bits(value) for key, value in state.items()
    }


def test_a_unit_that_was_not_written_prevents_the_commit(tmp_path: Path) -> None:
    state = {"a": random_bits("float32", (64, 2))}
    plan, target = writer(contents_of(state), 100), LocalStorage(tmp_path)
    records = {unit.name: plan.write(unit, TensorSource(state), target) for unit in plan.units}
    with pytest.raises(StructureError, match="chunks-000000 was not written"):
        plan.commit({}, target)
    chunk = tmp_path / "a" / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(StorageError, match="a/c/1/0: expected 92 bytes, it has 91"):
        plan.commit(records, target)
    assert not list(tmp_path.rglob("zarr.json"))


def test_contents_that_zarr_cannot_hold_are_refused() -> None:
    with pytest.raises(StructureError, match="'w'.*int4"):
        writer(Contents({"w": ("int4", (2,))}))
    for key in ("", "\ud800"):
        with pytest.raises(StructureError):
            writer(Contents({key: ("int8", (2,))}))
    with pytest.raises(StructureError, match="'head' cannot be tied"):
        writer(Contents({"w": ("int8", (2,))}, aliases={"head": "nothing"}))
    with pytest.raises(PlainDataError, match="a"):
        writer(Contents({}, objects={"a": object()}))


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(StructureError, match=r"pip install 'shardproof\[zarr\]'"):
        writer(Contents({}))
