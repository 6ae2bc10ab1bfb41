"""Safetensors of Hugging Face and others: headers, goldens, indices, folders without one, and damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError
from shardproof.formats.safetensors_files import read_safetensors_header
from shardproof.runs.maintenance import verify_foreign
from shardproof.storage import LocalStorage
from tests.unit.formats.peers import Golden, bits, check_golden

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # not in torch 2.6
]


def test_every_dtype_of_the_library_is_read_with_its_bytes(tmp_path: Path) -> None:
    state = {
        str(dtype): torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)
        for dtype in DTYPES
        if dtype != torch.bool
    }
    state["torch.bool"] = torch.tensor([[True, False, True], [False, True, True]])
    state["empty"] = torch.zeros(0, 4)
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    header = read_safetensors_header(LocalStorage(tmp_path), "a.safetensors")
    assert header.metadata == {"format": "pt"}
    assert header.tensors.keys() == state.keys()
    for key, expected in state.items():
        tensor, extent = header.tensors[key], header.extent(key)
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(expected.dtype), tuple(expected.shape))
        memory = bytearray(extent.nbytes)
        extent.read_into(memoryview(memory))
        assert memory == bytes(expected.reshape(-1).view(torch.uint8).numpy() if expected.numel() else b"")


def written(folder: Path, header: Any, data: bytes, length: int | None = None) -> LocalStorage:
    """A file with this header, given as text or as a value for JSON."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    claimed = len(text) if length is None else length
    (folder / "a.safetensors").write_bytes(claimed.to_bytes(8, "little") + text + data)
    return LocalStorage(folder)


def entry(begin: int, end: int, dtype: str = "U8", shape: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), None, "begins at byte 2"),
        ({"a": entry(0, 4), "b": entry(5, 9)}, bytes(9), None, "begins at byte 5"),
        ({"a": entry(0, 4)}, bytes(3), None, "cut short"),
        ({"a": entry(0, 4)}, bytes(5), None, "another file"),
        ({"a": entry(0, 4, "F32")}, bytes(4), None, "cannot have 4 bytes"),
        ({"a": entry(0, 4, "F6_E2M3")}, bytes(4), None, "cannot have 4 bytes"),
        ({"a": entry(0, 4, shape=(-4,))}, bytes(4), None, "a.safetensors"),
        ("{}", b"", 2**62, "claims 4611686018427387904 bytes"),
        ("[]", b"", None, "not a JSON object"),
        ('{"a": 1, "a": 2}', b"", None, "a.safetensors"),
        ("{" + '"a":{' * 100_000, b"", None, "a.safetensors"),
    ],
)
def test_false_headers_are_refused(
    tmp_path: Path, header: Any, data: bytes, length: int | None, message: str
) -> None:
    storage = written(tmp_path, header, data, length)
    with pytest.raises(FormatError, match=message):
        read_safetensors_header(storage, "a.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"a\.safetensors is missing"):
        read_safetensors_header(LocalStorage(tmp_path), "a.safetensors")


def opened(path: Path, **options: Any) -> ForeignCheckpoint:
    checkpoint = sp.open(path, **options)
    assert isinstance(checkpoint, ForeignCheckpoint)
    return checkpoint


@pytest.mark.parametrize("name", ["safetensors_single", "hf_llama_sharded", "hf_llama_tied", "hf_peft_lora"])
def test_golden_folders_read_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    check_golden(Golden(name, tmp_path), "safetensors")


def test_a_single_file_and_an_index_can_be_named(tmp_path: Path) -> None:
    golden = Golden("safetensors_single", tmp_path)
    check_golden(golden, "safetensors", golden.checkpoint / "model.safetensors")
    golden = Golden("hf_llama_sharded", tmp_path)
    check_golden(golden, "safetensors", golden.checkpoint / "model.safetensors.index.json")


def notes(path: Path) -> str:
    with opened(path) as checkpoint:
        report = verify_foreign(checkpoint)
        assert report.ok
        assert report.bytes == 0 < report.unproved
        return " ".join(report.notes)


def test_ties_adapters_and_missing_checksums_are_noted(tmp_path: Path) -> None:
    assert "ties the output layer" in notes(Golden("hf_llama_tied", tmp_path).checkpoint)
    assert "adapter" in notes(Golden("hf_peft_lora", tmp_path).checkpoint)
    assert notes(Golden("hf_llama_sharded", tmp_path).checkpoint) == (
        "safetensors has no checksums: changed bytes of tensors are not found."
    )


def test_a_sharded_model_fills_a_target(tmp_path: Path) -> None:
    golden = Golden("hf_llama_sharded", tmp_path)
    key = "model.layers.1.mlp.up_proj.weight"
    target = {key: torch.zeros(44, 32, dtype=torch.bfloat16)}
    sp.load(golden.checkpoint, target, include=key)
    assert bits(target[key]) == bits(golden.tensor(key))


STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4), "c": torch.tensor(1.5)}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({"a": STATE["a"], "c": STATE["c"]}, folder / names[0], {"format": "pt"})
    save_file({"b": STATE["b"]}, folder / names[1], {"format": "pt", "more": "x"})
    weight_map = {"a": names[0], "c": names[0], "b": names[1]}
    text = json.dumps({"metadata": {"total_size": 60}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def check(folder: Path) -> None:
    with opened(folder) as checkpoint:
        assert {key: bits(checkpoint[key].read()) for key in checkpoint.keys()} == {  # noqa: SIM118
            key: bits(value) for key, value in STATE.items()
        }
        assert verify_foreign(checkpoint).unproved == 60


def test_metadata_of_the_files_is_metadata(sharded: Path) -> None:
    check(sharded)
    assert opened(sharded).metadata == {"format": "pt", "more": "x"}


def test_shards_without_an_index_are_all_read(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    check(sharded)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match="1 of 2 files"):
        opened(sharded)


def test_one_key_in_two_files_without_an_index_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"b": STATE["b"]}, sharded / "other.safetensors")
    with pytest.raises(FormatError, match="b is in another file too"):
        opened(sharded)


def test_an_old_single_file_beside_an_index_is_refused(sharded: Path) -> None:
    save_file(STATE, sharded / "model.safetensors")
    with pytest.raises(FormatError, match="name the one file"):
        opened(sharded)
    check(sharded / "model.safetensors")
    check(sharded / "model.safetensors.index.json")


def test_files_that_no_index_names_are_noted(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / "model-00003-of-00003.safetensors")
    check(sharded)
    assert "model-00003-of-00003" in " ".join(opened(sharded).reader.notes)


def changed_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


DISAGREEMENTS: list[Callable[[dict[str, Any]], None]] = [
    lambda index: index["weight_map"].pop("a"),
    lambda index: index["weight_map"].update(more="model-00002-of-00002.safetensors"),
    lambda index: index["weight_map"].update(a="model-00002-of-00002.safetensors"),
]


@pytest.mark.parametrize("change", DISAGREEMENTS)
def test_an_index_that_disagrees_with_the_files_is_refused(
    sharded: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    changed_index(sharded, change)
    with pytest.raises(FormatError, match=r"index\.json: it disagrees with model-0000"):
        opened(sharded)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "", "a\0b"])
def test_file_names_that_lead_out_are_refused(sharded: Path, name: str) -> None:
    changed_index(sharded, lambda index: index["weight_map"].update(a=name))
    with pytest.raises(FormatError, match="leads out of the checkpoint"):
        opened(sharded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 1}}',
        "[" * 100_000,
        '{"weight_map": {}, "weight_map": {}}',
    ],
)
def test_a_damaged_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match=r"index\.json"):
        opened(sharded)


def test_an_index_that_is_far_too_large_is_refused_unread(sharded: Path) -> None:
    with open(sharded / "model.safetensors.index.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match="1099511627776 bytes, expected at most 100000000"):
        opened(sharded)


def test_a_false_total_size_is_noted(sharded: Path) -> None:
    changed_index(sharded, lambda index: index["metadata"].update(total_size=61))
    assert "61 bytes for all tensors, but they have 60" in " ".join(opened(sharded).reader.notes)


def test_missing_and_cut_files_are_errors(sharded: Path) -> None:
    shard = sharded / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    for size in range(0, len(whole), 9):
        shard.write_bytes(whole[:size])
        with pytest.raises((FormatError, StorageError), match=shard.name), opened(sharded) as checkpoint:
            checkpoint.check_files()
    shard.write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match=shard.name):
        opened(sharded)
    shard.unlink()
    with pytest.raises(StorageError, match=f"{shard.name} is missing"):
        opened(sharded)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(sharded: Path) -> None:
    with opened(sharded) as checkpoint:
        shard = sharded / "model-00001-of-00002.safetensors"
        whole = shard.read_bytes()
        shard.write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])
        with pytest.raises(StorageError, match=shard.name):
            checkpoint["a"].read()
        assert not verify_foreign(checkpoint).ok


def test_every_changed_byte_of_a_header_is_an_error_or_another_name(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors", {"format": "pt"})
    whole = (tmp_path / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    found = 0
    for at in range(length):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        (tmp_path / "model.safetensors").write_bytes(damaged)
        try:
            with opened(tmp_path) as checkpoint:
                assert verify_foreign(checkpoint).ok
        except ShardproofError:
            found += 1
    assert found > length // 2


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError, match=r"no file \*\.safetensors"):
        opened(tmp_path, format="safetensors")
