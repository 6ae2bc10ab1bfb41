"""The writers of safetensors files: the safetensors package reads what they write, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import shardproof as sp
from shardproof.errors import FormatError, PlainDataError, StorageError, StructureError
from shardproof.formats import Contents, FormatWriter, WriteOptions, writer_of
from shardproof.formats.json_values import OBJECTS
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

STORABLE = [name for name in ALL_DTYPES if name not in ("complex32", "complex128", "float4_e2m1fn_x2")]


def writer(
    contents: Contents, max_file_bytes: int | None = None, piece: int = 64 << 20, to: str = "safetensors"
) -> FormatWriter:
    return writer_of(to)(contents, WriteOptions(max_file_bytes, piece))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors as the safetensors package reads them, through the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        return load_file(folder / "model.safetensors")
    described = json.loads(index.read_text())
    found = {key: load_file(folder / name)[key] for key, name in described["weight_map"].items()}
    assert described["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    names = sorted(path.name for path in folder.iterdir() if path != index)
    assert names == sorted(set(described["weight_map"].values()))
    assert names == [f"model-{at + 1:05d}-of-{len(names):05d}.safetensors" for at in range(len(names))]
    assert sum(len(load_file(folder / name)) for name in names) == len(found)
    return found


@settings(max_examples=40)
@given(state=tensors(STORABLE), limit=..., piece=...)
def test_tensors_of_every_kind_are_read_back(
    state: dict[str, torch.Tensor], limit: bool, piece: bool, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("c")
    to = "hf" if piece else "safetensors"
    source = write_all(
        writer(contents_of(state), 40 if limit else None, 16 if piece else 200, to), state, folder
    )
    assert source.largest <= (16 if piece else 200)
    found = loaded(folder)
    assert {key: bits(value) for key, value in found.items()} == {
        key: bits(value) for key, value in state.items()
    }


def test_tensors_are_aligned_and_the_metadata_is_what_transformers_needs(tmp_path: Path) -> None:
    state = {f"{name}{count}": random_bits(name, (count,)) for name in STORABLE for count in (1, 3)}
    write_all(writer(contents_of(state)), state, tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert (8 + length) % 8 == 0
    for key, entry in header.items():
        assert entry["data_offsets"][0] % state[key].element_size() == 0, key
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_pairs_of_four_bit_numbers_are_counted_one_by_one(tmp_path: Path) -> None:
    state = {"w": random_bits("float4_e2m1fn_x2", (2, 3))}
    write_all(writer(contents_of(state)), state, tmp_path)
    found = loaded(tmp_path)["w"]
    assert found.dtype == state["w"].dtype and found.shape == (2, 3)
    assert torch.equal(found.view(torch.uint8), state["w"].view(torch.uint8))


def test_files_are_filled_in_order_and_a_larger_tensor_has_its_own(tmp_path: Path) -> None:
    state = {
        "c": torch.zeros(10),
        "b": torch.ones(5),
        "large": random_bits("float32", (50,)),
        "a": torch.ones(5),
        "empty": torch.empty(0, 3),
    }
    plan = writer(contents_of(state), 60)
    assert [[key for key, _, _ in unit.boxes] for unit in plan.units] == [
        ["c", "b"],
        ["large"],
        ["a", "empty"],
    ]
    source = write_all(plan, state, tmp_path)
    assert loaded(tmp_path).keys() == state.keys()
    assert source.largest == 200
    small = write_all(writer(contents_of(state), 60, 32), state, tmp_path / "again")
    assert small.largest <= 32
    names = [unit.name for unit in plan.units]
    assert all((tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_a_checkpoint_without_tensors_is_one_file(tmp_path: Path) -> None:
    write_all(writer(Contents({})), {}, tmp_path)
    assert loaded(tmp_path) == {}


def test_tied_tensors_are_stored_under_each_name_or_once(tmp_path: Path) -> None:
    state = {"embed": random_bits("bfloat16", (4, 2)), "other": torch.ones(1)}
    contents = contents_of(state, aliases={"head": "embed"})
    plain = writer(contents, 16)
    write_all(plain, state, tmp_path / "safetensors")
    found = loaded(tmp_path / "safetensors")
    assert found.keys() == {"embed", "head", "other"} and bits(found["head"]) == bits(state["embed"])
    assert "head" in plain.notes[0] and sum(unit.nbytes for unit in plain.units) == 36
    hf = writer(contents, to="hf")
    write_all(hf, state, tmp_path / "hf")
    assert loaded(tmp_path / "hf").keys() == state.keys()
    assert "head (as embed)" in hf.notes[0]
    with pytest.raises(StructureError, match="'head' cannot be tied to 'nothing'"):
        writer(contents_of(state, aliases={"head": "nothing"}))


VALUES = {"name": "ü", "lr": 0.1, "betas": (0.9, float("inf")), "format": "np"}


METADATA = {"run": 1, "author": "ü", "format": "np", "array": np.ones(2)}


def test_plain_values_are_stored_beside_the_tensors(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(3)}
    plan = writer(contents_of(state, objects=VALUES, step=7, metadata=METADATA), 12)
    write_all(plan, state, tmp_path)
    assert plan.notes == []
    with safe_open(tmp_path / "model-00001-of-00002.safetensors", "pt") as file:
        assert file.metadata().items() >= {"author": "ü", "format": "pt", "shardproof:step": "7"}.items()
    with safe_open(tmp_path / "model-00002-of-00002.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    with sp.open(tmp_path) as checkpoint:
        assert {key: checkpoint[key] for key in checkpoint.objects} == VALUES
        assert checkpoint.step == 7
        found = {
            key: value if key != "array" else value.tolist() for key, value in checkpoint.metadata.items()
        }
        assert found == {**METADATA, "array": [1, 1]}
    with pytest.raises(PlainDataError, match="a"):
        writer(contents_of(state, objects={"a": object()}))


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 100_000, "7", '{"w": 1}', '{"v": {"$tuple": 3}}'],
)
def test_damaged_values_are_errors_that_name_the_file(text: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors", {OBJECTS: text})
    with (
        pytest.raises(FormatError, match=r"model.safetensors|shardproof:objects"),
        sp.open(tmp_path) as found,
    ):
        _ = found["v"]


def test_hf_files_have_text_values_and_a_note_names_the_others(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    plan = writer(
        contents_of(state, objects={**VALUES, "model": object()}, step=7, metadata=METADATA), to="hf"
    )
    write_all(plan, state, tmp_path)
    assert not writer(contents_of(state, objects={"format": "pt"}), to="hf").notes
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "name": "ü", "author": "ü"}
    lost, values = plan.notes
    assert "the step (7) and the metadata (array, format, run)" in lost
    assert "betas, format, lr, model" in values


def test_hf_files_have_at_most_five_gigabytes() -> None:
    contents = Contents({f"w{at}": ("int8", (2 * 10**9,)) for at in range(5)})
    assert [len(unit.boxes) for unit in writer(contents, to="hf").units] == [2, 2, 1]
    assert [len(unit.boxes) for unit in writer(contents).units] == [5]


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize("dtype", ["complex128", "complex32", "int4"])
def test_a_dtype_that_safetensors_lacks_is_refused(to: str, dtype: str) -> None:
    with pytest.raises(StructureError, match=f"'model.w'.*no type for {dtype}.*--exclude"):
        writer(Contents({"a": ("int8", ()), "model.w": (dtype, (2,))}), to=to)


def test_names_that_safetensors_reserves_or_cannot_store_are_refused() -> None:
    for key in ("__metadata__", "\ud800"):
        with pytest.raises(StructureError):
            writer(Contents({key: ("int8", (2,))}))
    with pytest.raises(StructureError, match="100000000"):
        writer(Contents({}, objects={"text": "x" * 100_000_000}))


def test_an_interrupted_unit_is_written_again(tmp_path: Path) -> None:
    state = {"a": random_bits("float32", (64,)), "b": random_bits("int64", (64,))}
    plan, target = writer(contents_of(state), 300, 64), LocalStorage(tmp_path)
    with pytest.raises(InterruptedError):
        plan.write(plan.units[0], TensorSource(state, fails_at=2), target)
    assert target.list() == []
    for unit in plan.units:  # as a killed process leaves them
        (tmp_path / unit.name).write_bytes(b"left behind" * 1000)
    write_all(plan, state, tmp_path)
    plan.commit({unit.name: {} for unit in plan.units}, target)
    assert {key: bits(value) for key, value in loaded(tmp_path).items()} == {
        key: bits(value) for key, value in state.items()
    }


def test_a_unit_that_was_not_written_prevents_the_commit(tmp_path: Path) -> None:
    state = {"a": random_bits("float32", (64,)), "b": random_bits("int64", (64,))}
    plan, target = writer(contents_of(state), 300), LocalStorage(tmp_path)
    records = {unit.name: plan.write(unit, TensorSource(state), target) for unit in plan.units}
    with pytest.raises(StructureError, match="model-00002-of-00002.safetensors was not written"):
        plan.commit({"model-00001-of-00002.safetensors": {}}, target)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match="model-00002-of-00002.safetensors: expected"):
        plan.commit(records, target)
    file.unlink()
    with pytest.raises(StorageError, match="missing"):
        plan.commit(records, target)
    assert target.size("model.safetensors.index.json") is None
