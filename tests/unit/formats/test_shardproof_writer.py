"""The writer of shardproof's own format writes the same state as a save."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import shardproof as sp
from shardproof.engine.format import parse_shard_name, read_index, read_manifest
from shardproof.engine.loading import NativeCheckpoint
from shardproof.errors import PlainDataError, ShardproofError, StorageError, StructureError
from shardproof.formats import Contents, FormatWriter, WriteOptions, writer_of
from shardproof.maintenance import repair, verify
from shardproof.report import diff
from shardproof.state import references
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


def writer(contents: Contents, max_file_bytes: int | None = None, piece: int = 64 << 20) -> FormatWriter:
    return writer_of("shardproof")(contents, WriteOptions(max_file_bytes, piece))


STATE: dict[str, Any] = {
    "big": random_bits("float32", (70, 1024, 100)),
    "half": random_bits("bfloat16", (33, 5)),
    "flag": random_bits("bool", (7,)),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "z": random_bits("complex128", (3, 3)),
    "lr": 1e-3,
    "names": {"b", "a"},
    "nested": {"text": "x" * 70_000, "blob": b"1" * 200},
}
TENSORS = {key: value for key, value in STATE.items() if isinstance(value, torch.Tensor)}
OBJECTS = {"lr": 1e-3, "names": {"b", "a"}, "nested.text": "x" * 70_000, "nested.blob": b"1" * 200}


def test_the_state_is_the_same_as_that_of_a_save(tmp_path: Path) -> None:
    state = {**STATE, "tied": STATE["half"]}
    sp.save(tmp_path / "saved", state, step=3, metadata={"run": (1, 2)})
    with sp.open(tmp_path / "saved") as saved:
        assert isinstance(saved, NativeCheckpoint)
        objects = {key: saved[key] for key in saved.objects}
        inside = {key for key, _ in references(list(saved.objects.values()))}
        stored = {item.key: saved[item.key].read() for item in saved.tensors if item.key not in inside}
        contents = contents_of(
            stored,
            aliases=saved.aliases,
            objects=objects,
            step=saved.step,
            metadata=saved.metadata,
            time=5.0,
        )
    plain = writer(contents)
    write_all(plain, stored, tmp_path / "written")
    one, other = LocalStorage(tmp_path / "saved"), LocalStorage(tmp_path / "written")
    assert diff(one, other).same
    assert verify(other).ok
    manifest = read_manifest(other)
    assert (manifest.step, manifest.time, manifest.metadata) == (3, 5.0, read_manifest(one).metadata)
    target = {**{key: torch.zeros_like(value) for key, value in TENSORS.items()}}
    sp.load(tmp_path / "written", target, include=list(target))
    assert {key: bits(value) for key, value in target.items()} == {
        key: bits(value) for key, value in TENSORS.items()
    }


def test_a_tensor_of_the_same_key_is_not_taken_for_the_one_in_a_value(tmp_path: Path) -> None:
    tensors = {"rng.state": torch.ones(2)}
    objects = {"rng": {"state": torch.zeros(2)}}
    write_all(writer(contents_of(tensors, objects=objects)), tensors, tmp_path)
    with sp.open(tmp_path) as checkpoint:
        assert checkpoint["rng.state"].read().tolist() == [1, 1]
        assert checkpoint["rng"]["state"].tolist() == [0, 0]


def test_large_values_that_are_no_tensors_of_the_source_are_stored_as_tensors(tmp_path: Path) -> None:
    sp.save(tmp_path / "saved", STATE)
    write_all(writer(contents_of(TENSORS, objects=OBJECTS), 1 << 20), TENSORS, tmp_path / "written")
    difference = diff(LocalStorage(tmp_path / "saved"), LocalStorage(tmp_path / "written"))
    assert difference.same, difference
    with sp.open(tmp_path / "written") as checkpoint:
        assert {key: checkpoint[key] for key in OBJECTS} == OBJECTS


def test_a_large_value_gets_a_key_that_no_tensor_has(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "a.b@": torch.zeros(1)}
    value = {"b": np.arange(50.0)}
    write_all(writer(contents_of(state, objects={"a": value})), state, tmp_path)
    with sp.open(tmp_path) as checkpoint:
        assert checkpoint["a.b"].read().tolist() == [1, 1]
        assert (checkpoint["a"]["b"] == value["b"]).all()


@settings(max_examples=25)
@given(state=tensors(ALL_DTYPES))
def test_tensors_of_every_kind_are_read_back(state: dict[str, torch.Tensor], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("c")
    source = write_all(writer(contents_of(state), 40, 16), state, folder)
    assert source.largest <= 16
    with sp.open(folder) as checkpoint:
        assert checkpoint.keys() == sorted(state)
        assert {key: bits(checkpoint[key].read()) for key in state} == {
            key: bits(value) for key, value in state.items()
        }
    assert verify(LocalStorage(folder)).ok


def test_chunks_are_cut_along_rows_and_files_and_reads_are_bounded(tmp_path: Path) -> None:
    state = {"a": random_bits("float32", (100, 1 << 17)), "b": random_bits("int8", (1 << 20,))}
    source = write_all(writer(contents_of(state), 20 << 20, 3 << 20), state, tmp_path)
    assert source.largest <= 3 << 20
    storage = LocalStorage(tmp_path)
    manifest = read_manifest(storage)
    table = read_index(storage, manifest)
    assert table.byte_count.max() <= 16 << 20
    assert all(size == 1 << 17 for _, (_, size) in map(table.boxes.pair, range(len(table) - 1)))
    data = [record.size - record.data_start for record in manifest.files]
    assert len(data) == math.ceil(51 / 20) and max(data) <= (20 << 20) + 4096
    write_all(writer(contents_of(state), 20 << 20, 64 << 20), state, tmp_path / "again")
    again = read_manifest(LocalStorage(tmp_path / "again"))
    assert again.files == manifest.files, "the bound of reads changes nothing that is written"


def test_contents_without_elements_make_a_checkpoint(tmp_path: Path) -> None:
    write_all(writer(Contents({})), {}, tmp_path / "nothing")
    assert list(sp.open(tmp_path / "nothing")) == []
    state = {"e": torch.empty(0, 3)}
    write_all(writer(contents_of(state, objects={"a": 1})), state, tmp_path / "values")
    assert verify(LocalStorage(tmp_path / "values")).ok
    with sp.open(tmp_path / "values") as checkpoint:
        assert checkpoint["a"] == 1 and checkpoint["e"].read().shape == (0, 3)
    (tmp_path / "values" / "manifest.json").unlink()
    assert repair(LocalStorage(tmp_path / "values")).tensors[0].key == "e", "the first file declares it"


def test_an_interrupted_unit_and_an_interrupted_commit_are_repeated(tmp_path: Path) -> None:
    plan = writer(contents_of(TENSORS), 8 << 20, 1 << 20)
    target = LocalStorage(tmp_path)
    with pytest.raises(InterruptedError):
        plan.write(plan.units[0], TensorSource(TENSORS, fails_at=2), target)
    for unit in plan.units:  # leftovers under the names of the units
        (tmp_path / "shards").mkdir(exist_ok=True)
        (tmp_path / "shards" / f"{unit.name}.safetensors").write_bytes(b"left behind")
    source = TensorSource(TENSORS)
    records = {unit.name: plan.write(unit, source, target) for unit in plan.units}
    (tmp_path / f"index-{plan.units[0].name[6:]}.safetensors").write_bytes(b"left behind")
    plan.commit(records, target)
    plan.commit(records, target)
    assert verify(target).ok
    assert all(parse_shard_name(name) for name in target.list("shards"))


def test_a_lost_manifest_is_written_again(tmp_path: Path) -> None:
    contents = contents_of(TENSORS, objects=OBJECTS, aliases={"tied": "half"})
    write_all(writer(contents, 8 << 20), TENSORS, tmp_path)
    manifest = read_manifest(LocalStorage(tmp_path))
    (tmp_path / "manifest.json").unlink()
    repaired = repair(LocalStorage(tmp_path))
    assert (repaired.tensors, repaired.files, repaired.objects, repaired.aliases, repaired.index) == (
        manifest.tensors,
        manifest.files,
        manifest.objects,
        manifest.aliases,
        manifest.index,
    )


def test_a_unit_that_was_not_written_as_planned_prevents_the_commit(tmp_path: Path) -> None:
    plan = writer(contents_of(TENSORS), 8 << 20)
    target, source = LocalStorage(tmp_path), TensorSource(TENSORS)
    records = {unit.name: plan.write(unit, source, target) for unit in plan.units}
    name = plan.units[1].name
    wrong: list[tuple[dict[str, Any], type[ShardproofError], str]] = [
        ({key: value for key, value in records.items() if key != name}, StructureError, "not written"),
        ({**records, name: {**records[name], "digests": records[plan.units[0].name]["digests"]}}, *PLANNED),
        ({**records, name: {**records[name], "size": 9}}, *PLANNED),
    ]
    for found, kind, text in wrong:
        with pytest.raises(kind, match=text):
            plan.commit(found, target)
    shard = tmp_path / "shards" / f"{name}.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StorageError, match="expected"):
        plan.commit(records, target)
    assert target.size("manifest.json") is None


PLANNED = (StructureError, "not written as planned")


def test_contents_that_the_format_cannot_hold_are_refused_before_a_file_is_written() -> None:
    with pytest.raises(StructureError, match="'w'.*int4"):
        writer(Contents({"w": ("int4", (2,))}))
    with pytest.raises(StructureError, match="impossible shape"):
        writer(Contents({"w": ("int8", (1 << 62, 4))}))
    with pytest.raises(StructureError, match="'v' is an alias of 'u'"):
        writer(Contents({"w": ("int8", (2,))}, aliases={"v": "u"}))
    with pytest.raises(StructureError, match="both a tensor and an object"):
        writer(Contents({"w": ("int8", (2,))}, objects={"w": 1}))
    with pytest.raises(PlainDataError, match="a"):
        writer(Contents({}, objects={"a": object()}))


def test_a_source_that_gives_another_dtype_is_an_error(tmp_path: Path) -> None:
    plan = writer(Contents({"w": ("float16", (2,))}))
    with pytest.raises(StructureError, match=r"'w': the source gives float32 of shape \[2\]"):
        plan.write(plan.units[0], TensorSource({"w": torch.ones(2)}), LocalStorage(tmp_path))
    assert LocalStorage(tmp_path).list() == []


def test_equal_contents_give_equal_attempts_and_others_do_not() -> None:
    def names(contents: Contents, limit: int | None = None) -> list[str]:
        return [unit.name for unit in writer(contents, limit).units]

    contents = contents_of(TENSORS, step=1)
    assert names(contents) == names(contents_of(dict(reversed(TENSORS.items())), step=1))
    assert names(contents) != names(contents_of(TENSORS, step=2))
    assert names(contents)[0] != names(contents, 1 << 20)[0]
