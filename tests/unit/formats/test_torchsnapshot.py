"""Snapshots of TorchSnapshot: read to their bits, lost elements and damage found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import (
    FormatError,
    NotCommittedError,
    PlainDataError,
    ShardproofError,
    StorageError,
    TilingError,
)
from shardproof.runs.maintenance import VerifyReport, verify_foreign
from tests.unit.formats.peers import Golden, bits, check_tensors

METADATA = ".snapshot_metadata"
OWN = ("bf16", "big", "cplx", "f16", "flag", "i64", "scalar")
"""Tensors that each rank of the golden snapshot has for itself."""


def key_of(expected: str, rank: int = 0) -> str:
    key = expected.replace("/", ".")
    return f"{rank}.{key}" if key.removeprefix("extra.") in OWN else key


@pytest.mark.parametrize("rank", [0, 1])
def test_the_golden_snapshot_reads_to_its_expected_bits(rank: int, tmp_path: Path) -> None:
    golden = Golden("snap_w2", tmp_path)
    with sp.open(golden.checkpoint) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert (checkpoint.reader.name, checkpoint.world_size) == ("torchsnapshot", 2)
        check_tensors(golden.renamed(lambda key: key_of(key, rank)), checkpoint)
        report = verify_foreign(checkpoint)
        assert report.ok and report.unproved > 0


def test_values_keep_their_types(tmp_path: Path) -> None:
    with sp.open(Golden("snap_w2", tmp_path).checkpoint) as checkpoint:
        expected = {"lr": 0.1, "name": "ü", "raw": b"\0\1", "step": 7, "tup": (1, 2), "nested.c/d": 3}
        assert {name: checkpoint[f"1.extra.{name}"] for name in expected} == expected
        assert checkpoint["optim.param_groups.0.params"] == list(range(10))
        assert checkpoint["optim.param_groups.0.betas"] == (0.9, 0.999)
        assert checkpoint["optim.param_groups.0.amsgrad"] is False
        assert checkpoint["optim.param_groups.0.fused"] is None
        assert not torch.equal(checkpoint["0.extra.per_rank"].read(), checkpoint["1.extra.per_rank"].read())


def test_a_load_fills_a_nested_target(tmp_path: Path) -> None:
    golden = Golden("snap_w2", tmp_path)
    names = ("emb.weight", "l1.bias", "mask")
    target = {"model": {name: torch.zeros_like(golden.tensor(f"model/{name}")) for name in names}}
    sp.load(golden.checkpoint, target, include=[f"model.{name}" for name in names])
    for name, tensor in target["model"].items():
        assert bits(tensor) == bits(golden.tensor(f"model/{name}"))


def tensor(location: str, shape: list[int], dtype: str = "float32", **options: Any) -> dict[str, Any]:
    return {
        "type": "Tensor",
        "location": location,
        "serializer": "buffer_protocol",
        "dtype": f"torch.{dtype}",
        "shape": shape,
        "replicated": False,
        "byte_range": None,
        **options,
    }


def write(folder: Path, manifest: dict[str, Any], world_size: int = 1) -> Path:
    """Writes the metadata of a snapshot."""
    folder.mkdir(exist_ok=True)
    metadata = {"version": "0.1.0", "world_size": world_size, "manifest": manifest}
    (folder / METADATA).write_text(json.dumps(metadata))
    return folder


def chunked(folder: Path) -> Path:
    """Writes a tensor of 5 rows in two chunks, as TorchSnapshot does with large ones."""
    whole = torch.arange(10.0).reshape(5, 2)
    chunks = []
    for begin, end in ((0, 3), (3, 5)):
        (folder / f"w_{begin}").write_bytes(whole[begin:end].numpy().tobytes())
        part = tensor(f"w_{begin}", [end - begin, 2])
        chunks.append({"offsets": [begin, 0], "sizes": [end - begin, 2], "tensor": part})
    entry = {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [5, 2], "chunks": chunks}
    return write(folder, {"0/w": {**entry, "replicated": False}})


def test_chunks_are_one_tensor(tmp_path: Path) -> None:
    assert sp.open(chunked(tmp_path))["w"].read().tolist() == torch.arange(10.0).reshape(5, 2).tolist()


@pytest.mark.parametrize("count", [1, 15])
def test_the_element_that_torchsnapshot_loses_is_named(count: int, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(bytes(2 * count - 2))
    (tmp_path / "w").write_bytes(bytes(4))
    write(tmp_path, {"0/b": tensor("b", [count], "bfloat16"), "0/w": tensor("w", [1])})
    with sp.open(tmp_path) as checkpoint:
        assert checkpoint["w"].read().tolist() == [0.0], "other tensors can be read"
        with pytest.raises(
            FormatError, match="does not write the last element of bfloat16 tensors of odd size"
        ):
            checkpoint["b"].read()
    with pytest.raises(FormatError, match="last element"):
        sp.load(tmp_path, {"b": torch.zeros(count, dtype=torch.bfloat16)}, include="b")
    assert any("last element" in fault.message for fault in verified(tmp_path).faults)
    (tmp_path / "b").write_bytes(bytes(2 * count))
    assert verified(tmp_path).ok


def verified(folder: Path) -> VerifyReport:
    with sp.open(folder, format="torchsnapshot") as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint)


def test_lists_and_empty_containers_are_objects(tmp_path: Path) -> None:
    number = {"type": "int", "serialized_value": "4", "replicated": False, "readable": None}
    manifest = {
        "0/a": {"type": "dict", "keys": ["empty", "none", "list"]},
        "0/a/empty": {"type": "dict", "keys": []},
        "0/a/none": {"type": "list"},
        "0/a/list": {"type": "list"},
        "0/a/list/1": {"type": "list"},
        "0/a/list/1/0": number,
        "0/a/list/0": number,
        "0/x%2Fy": number,
        "0/x%252Fy": number,
    }
    with sp.open(write(tmp_path, manifest)) as checkpoint:
        expected = {"a.empty": {}, "a.none": [], "a.list": [4, [4]], "x/y": 4, "x%2Fy": 4}
        assert {key: checkpoint[key] for key in checkpoint.keys()} == expected  # noqa: SIM118
    del manifest["0/a/list/0"]
    with pytest.raises(FormatError, match="elements of the list a/list are missing"):
        sp.open(write(tmp_path, manifest))


def test_keys_that_dots_would_make_equal_keep_their_slashes(tmp_path: Path) -> None:
    number = {"type": "int", "serialized_value": "4", "replicated": False, "readable": None}
    with sp.open(write(tmp_path, {"0/a/b.c": number, "0/a.b/c": number, "0/d/e": number})) as checkpoint:
        assert checkpoint.keys() == ["a.b/c", "a/b.c", "d.e"]


def test_a_quantised_tensor_hides_only_its_own_key(tmp_path: Path) -> None:
    entry = tensor("q", [4], "qint8", serializer="per_tensor_qtensor")
    number = {"type": "int", "serialized_value": "4", "replicated": False, "readable": None}
    with sp.open(write(tmp_path, {"0/q": entry, "0/n": number})) as checkpoint:
        assert checkpoint.keys() == ["n", "q"]
        assert checkpoint["n"] == 4
        with pytest.raises(PlainDataError, match=r"q is a tensor of qint8 .* and shape \[4\]"):
            checkpoint["q"]


def test_metadata_in_yaml_is_read(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    chunked(tmp_path)
    metadata = json.loads((tmp_path / METADATA).read_text())
    (tmp_path / METADATA).write_text(yaml.safe_dump(metadata))
    assert sp.open(tmp_path)["w"].read().sum().item() == 45
    (tmp_path / METADATA).write_text("a: &a [1, 2]\nmanifest: [*a, *a]\n")
    with pytest.raises(FormatError, match="aliases"):
        sp.open(tmp_path)


def edited(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = json.loads((folder / METADATA).read_text())
    change(metadata["manifest"]["0/w"])
    (folder / METADATA).write_text(json.dumps(metadata))


def test_holes_and_overlaps_are_errors(tmp_path: Path) -> None:
    chunked(tmp_path)
    edited(tmp_path, lambda entry: entry["chunks"].pop())
    with pytest.raises(TilingError, match="w"):
        sp.open(tmp_path)["w"].read()
    chunked(tmp_path)
    edited(tmp_path, lambda entry: entry["chunks"][1]["offsets"].__setitem__(0, 2))
    with pytest.raises(TilingError, match="w"):
        sp.open(tmp_path)["w"].read()
    assert [type(fault) for fault in verified(tmp_path).faults] == [TilingError]


def part(entry: Any) -> Any:
    return entry["chunks"][0]["tensor"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda entry: part(entry).update(location="../w_0"), "leads out"),
        (lambda entry: part(entry).update(location="/etc/passwd"), "leads out"),
        (lambda entry: part(entry).update(location=7), "not a file name"),
        (lambda entry: part(entry).update(byte_range=[8, 0]), "end before they begin"),
        (lambda entry: part(entry).update(byte_range=[-8, 16]), "not a shape"),
        (lambda entry: part(entry).update(shape=[9, 9]), "has the shape"),
        (lambda entry: part(entry).update(dtype="torch.int8"), "has the dtypes"),
        (lambda entry: entry["chunks"][0].update(offsets=[0]), "structure"),
        (lambda entry: entry.update(shape=[-5, 2]), "not a shape"),
        (lambda entry: entry.update(type="Widget"), "Widget"),
        (lambda entry: entry.pop("chunks"), "chunks"),
    ],
)
def test_false_metadata_is_an_error(change: Callable[[Any], None], found: str, tmp_path: Path) -> None:
    chunked(tmp_path)
    edited(tmp_path, change)
    with pytest.raises(FormatError, match=found):
        sp.open(tmp_path)


@pytest.mark.parametrize("name", ["2/w", "-1/w", "w", "x/w", "0/" + "a/" * 300])
def test_entries_of_no_rank_are_errors(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="structure"):
        sp.open(write(tmp_path, {name: tensor("w", [1])}, 2))


@pytest.mark.parametrize(
    "text", ["{", '{"version": 1', "[" * 100000, "{}", "[]", "\0\1", "", '{"world_size": 0}']
)
def test_damaged_metadata_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_text(text)
    with pytest.raises(FormatError, match=METADATA):
        sp.open(tmp_path)


def test_missing_and_cut_files_are_errors(tmp_path: Path) -> None:
    chunked(tmp_path)
    (tmp_path / "w_0").write_bytes(bytes(20))
    with pytest.raises(StorageError, match="w_0 has 20 bytes, expected 24"):
        sp.load(tmp_path, {"w": torch.zeros(5, 2)})
    (tmp_path / "w_0").unlink()
    with pytest.raises(StorageError, match="w_0"):
        sp.open(tmp_path)["w"].read()
    assert any("w_0" in fault.message for fault in verified(tmp_path).faults)
    (tmp_path / METADATA).unlink()
    with pytest.raises(NotCommittedError, match="did not finish"):
        sp.open(tmp_path, format="torchsnapshot")


def test_a_cut_batched_file_is_an_error(tmp_path: Path) -> None:
    golden = Golden("snap_w2", tmp_path)
    for file in (golden.checkpoint / "batched").iterdir():
        os.truncate(file, file.stat().st_size - 100)
    assert any("batched" in fault.message for fault in verified(golden.checkpoint).faults)
    for rank in range(2):
        with pytest.raises(StorageError, match="batched"), sp.open(golden.checkpoint) as checkpoint:
            checkpoint[f"{rank}.extra.big"].read()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1 << 20), flip=st.integers(1, 255))
def test_a_damaged_byte_of_the_metadata_is_an_error_or_harmless(at: int, flip: int, tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    if not folder.exists():
        Golden("snap_w2", folder)
    metadata = folder / "snap_w2" / "ckpt" / METADATA
    whole = metadata.read_bytes()
    damaged = bytearray(whole)
    damaged[at % len(whole)] ^= flip
    metadata.write_bytes(damaged)
    try:
        verified(metadata.parent)
    except ShardproofError:
        pass
    finally:
        metadata.write_bytes(whole)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


def test_objects_that_would_run_code_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "type": "object",
        "location": "evil",
        "serializer": "torch_save",
        "obj_type": "x",
        "replicated": False,
    }
    torch.save(Evil(), tmp_path / "evil")
    write(tmp_path, {"0/evil": entry})
    monkeypatch.chdir(tmp_path)
    with sp.open(tmp_path) as checkpoint, pytest.raises(ShardproofError, match="posix.mkdir"):
        _ = checkpoint["evil"]
    assert not (tmp_path / "owned").exists()
