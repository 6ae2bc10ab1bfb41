"""References to files of other steps: in the manifest, and those of all steps of a run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from shardproof.engine.format import (
    MANIFEST_NAME,
    SEAL_LENGTH,
    FileRecord,
    Manifest,
    decode_manifest,
    encode_manifest,
    locate_files,
    lost_files,
    named_files,
    read_seal,
    references_in,
    references_of_siblings,
    unreferenced_files,
)
from shardproof.errors import FormatError
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.unit.engine.format.samples import manifest, sealed

SHARED = FileRecord("shards/00007-77aa.safetensors", 5000, 32 * "a", 4096, 7, "step-00000100")


def referring(*more: FileRecord) -> Manifest:
    return manifest(version=2, files=(*manifest().files, *more))


def test_round_trip() -> None:
    data = encode_manifest(referring(SHARED))
    found = decode_manifest(data, "manifest.json")
    assert found == referring(SHARED)
    assert found.referenced_files == (SHARED,) and found.own_files == manifest().files
    value = json.loads(data)
    assert value["version"] == 2
    assert value["files"][0] == ["shards/00000-5f0c.safetensors", 4136, 32 * "0", 4096, 0, ""]
    assert value["files"][2] == [*msgspec.structs.astuple(SHARED)]
    assert len(value["index"]) == 5


def test_a_manifest_without_references_has_version_1() -> None:
    assert encode_manifest(manifest()).startswith(b'{"format":"shardproof","version":1,')
    assert b'"step-' not in encode_manifest(manifest())


def test_a_reader_of_version_1_alone_refuses_references() -> None:
    """Such a reader takes version 1 only, with five members for each file."""
    value = json.loads(encode_manifest(referring(SHARED)))
    assert value["version"] != 1
    value["version"] = 1
    del value["digest"]
    with pytest.raises(FormatError, match="length 5"):
        decode_manifest(sealed(value), "f")


BAD = {
    "a folder that climbs": {"folder": ".."},
    "a folder below": {"folder": "step-1/shards"},
    "a folder elsewhere": {"folder": "/etc"},
    "a hidden folder": {"folder": ".git"},
    "a folder with a NUL": {"folder": "a\0b"},
    "a folder name too long": {"folder": "a" * 256},
    "another program's file": {"name": "tokenizer.json"},
    "a manifest": {"name": "manifest.json"},
    "an index": {"name": "index-77aa.safetensors", "rank": -1},
    "a name that climbs": {"name": "shards/../../x-a.safetensors"},
    "a shard of another rank": {"rank": 8},
    "a rank spelled otherwise": {"name": "shards/7-77aa.safetensors"},
    "a bad digest": {"digest": "0"},
    "data after the end": {"data_start": 5001},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_references_are_refused(case: str) -> None:
    record = msgspec.structs.replace(SHARED, **BAD[case])
    value = json.loads(encode_manifest(referring(SHARED)))
    del value["digest"]
    value["files"][2] = [*msgspec.structs.astuple(record)]
    with pytest.raises(FormatError):
        decode_manifest(sealed(value), "f")
    with pytest.raises(FormatError):
        encode_manifest(referring(record))


def test_a_reference_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="is listed twice"):
        encode_manifest(referring(SHARED, SHARED))
    other = msgspec.structs.replace(SHARED, folder="step-00000101")
    assert decode_manifest(encode_manifest(referring(SHARED, other)), "f").referenced_files == (
        SHARED,
        other,
    )


@pytest.mark.parametrize(("version", "files"), [(1, (SHARED,)), (2, ())])
def test_version_and_references_go_together(version: int, files: tuple[FileRecord, ...]) -> None:
    with pytest.raises(FormatError):
        encode_manifest(manifest(version=version, files=(*manifest().files, *files)))


def put(storage: LocalStorage, found: Manifest) -> None:
    storage.publish("manifest.json", encode_manifest(found), replace=True)


def test_the_references_of_all_steps_of_a_run_are_found(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    put(run.within("step-00000100"), manifest())
    put(run.within("step-00000200"), referring(SHARED))
    put(run.within("best"), referring(SHARED, msgspec.structs.replace(SHARED, folder="step-00000200")))
    (tmp_path / "logs").mkdir()
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name": "an app"}')
    references = references_in(run)
    assert references.by_folder == {
        "step-00000100": {SHARED.name: ["best", "step-00000200"]},
        "step-00000200": {SHARED.name: ["best"]},
    }
    assert references.users("step-00000100") == ["best", "step-00000200"] and not references.unknown
    assert references.users("best") == [] and not references.files("best")
    assert references_of_siblings(run.within("step-00000100")) == references
    without = references_in(run, without=["best"])
    assert without.by_folder == {"step-00000100": {SHARED.name: ["step-00000200"]}}


@pytest.mark.parametrize("damage", [b"", b'{"format":"shardproof","version":2,"wr', b"\0" * 4000])
def test_a_manifest_that_cannot_be_read_may_refer_to_anything(tmp_path: Path, damage: bytes) -> None:
    run = LocalStorage(tmp_path)
    run.within("step-00000100").publish("manifest.json", damage)
    assert references_in(run).unknown == ["step-00000100"]
    assert unreferenced_files([SHARED], references_in(run), run.within) == []


def test_a_manifest_of_impossible_length_is_not_read(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    run.within("step-00000100").publish("manifest.json", b"{}")
    with (tmp_path / "step-00000100" / "manifest.json").open("r+b") as file:
        file.truncate(1 << 42)
    assert references_in(run).unknown == ["step-00000100"]


def test_unreferenced_files_are_those_that_no_step_needs(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    assert unreferenced_files([SHARED], references_in(run), run.within) == [SHARED]
    put(run.within("step-00000200"), referring(SHARED))
    assert unreferenced_files([SHARED], references_in(run), run.within) == []
    own = msgspec.structs.replace(manifest().files[0], folder="step-00000200")
    assert unreferenced_files([own], references_in(run), run.within) == [], "its own step needs it"
    assert unreferenced_files([SHARED], references_in(run, without=["step-00000200"]), run.within) == [SHARED]


def test_files_of_a_checkpoint_are_located_and_lost_ones_named(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    step, found = run.within("step-00000200"), referring(SHARED)
    put(step, found)
    assert named_files(step) == {
        "manifest.json",
        "index-5f0c.safetensors",
        "shards/00000-5f0c.safetensors",
        "shards/00001-5f0c.safetensors",
    }
    places = locate_files(step, found)
    assert [(storage.location, name) for storage, name in places] == [
        (str(tmp_path / "step-00000200"), "shards/00000-5f0c.safetensors"),
        (str(tmp_path / "step-00000200"), "shards/00001-5f0c.safetensors"),
        (str(tmp_path / "step-00000100"), "shards/00007-77aa.safetensors"),
    ]
    for record, (storage, name) in zip(found.files, places, strict=True):
        sink = storage.create(name)
        sink.finish(record.size)
    assert lost_files(step, found) == {}
    (tmp_path / "step-00000100" / SHARED.name).unlink()
    assert lost_files(step, found) == {SHARED.place: f"{SHARED.place}: expected 5000 bytes, it is missing"}


def test_different_manifests_have_different_seals(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert read_seal(storage) is None
    put(storage, manifest())
    first = read_seal(storage)
    put(storage, manifest(step=1001))
    assert first is not None and read_seal(storage) not in (None, first)
    put(storage, manifest())
    assert read_seal(storage) == first


def test_a_manifest_that_is_removed_while_its_seal_is_read_has_none(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.publish(MANIFEST_NAME, bytes(SEAL_LENGTH))
    removed: list[str] = []

    def remove(operation: str, name: str) -> None:
        storage.delete(name)
        removed.append(name)

    assert read_seal(FaultyStorage(storage, 0, remove, only=("read",))) is None
    assert removed == [MANIFEST_NAME]
