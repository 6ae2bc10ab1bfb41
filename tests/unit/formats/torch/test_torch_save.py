"""Files of torch.save as checkpoints: goldens, ties, other objects, both formats, bounded memory."""

from __future__ import annotations

import argparse
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.foreign import Foreign
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import CorruptChunkError, FormatError, PlainDataError, ShardproofError
from shardproof.formats.torch.torch_file import TorchFile
from shardproof.formats.torch.torch_save import TorchSaveReader
from shardproof.runs.maintenance import verify_foreign
from shardproof.storage import LocalStorage
from tests.unit.formats.peers import Golden, bits, check_golden

FORMATS = [pytest.param(True, id="zip"), pytest.param(False, id="legacy")]


@pytest.mark.parametrize(
    ("name", "file"),
    [("torch_zip", "model.pt"), ("torch_legacy", "model.pt"), ("lightning_ckpt", "last.ckpt")],
)
def test_golden_files_read_to_their_expected_bits(name: str, file: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    check_golden(golden, "torch", golden.checkpoint / file)


def opened(path: Path, **options: Any) -> ForeignCheckpoint:
    checkpoint = sp.open(path, **options)
    assert isinstance(checkpoint, ForeignCheckpoint)
    return checkpoint


def test_a_lightning_checkpoint_fills_a_target_and_knows_its_step(tmp_path: Path) -> None:
    golden = Golden("lightning_ckpt", tmp_path)
    with opened(golden.checkpoint / "last.ckpt") as checkpoint:
        assert checkpoint.step == 3
    model = torch.nn.ModuleDict({"l": torch.nn.Linear(4, 5)})
    target: dict[str, Any] = {"state_dict": model.state_dict(), "global_step": 0}
    sp.load(golden.checkpoint / "last.ckpt", target, include=["state_dict.l.*", "global_step"])
    assert target["global_step"] == 3
    assert bits(target["state_dict"]["l.weight"]) == bits(golden.tensor("state_dict.l.weight"))


@pytest.mark.parametrize("is_zip", FORMATS)
def test_the_same_view_is_an_alias_and_another_view_is_not(tmp_path: Path, is_zip: bool) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "embed": base,
        "head": torch.nn.Parameter(base),
        "row": base[1],
        "t": base.t(),
        "groups": [[base], [base[2]]],
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    with opened(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.aliases == {"head": "embed", "groups.0.0": "embed"}
        assert bits(checkpoint["head"].read()) == bits(base)
        assert bits(checkpoint["groups.1.0"].read()) == bits(base[2])
        assert bits(checkpoint["t"].read()) == bits(base.t())
        assert bits(checkpoint["t"][1:3, 2]) == bits(base.t()[1:3, 2])
        report = verify_foreign(checkpoint)
        assert (report.bytes, report.unproved) == ((48, 0) if is_zip else (0, 48))
        assert bool(report.notes) == (not is_zip)


def test_a_file_without_crcs_is_noted(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with opened(tmp_path / "a.pt") as checkpoint:
        assert verify_foreign(checkpoint).unproved == 24
        assert "no CRC-32" in checkpoint.reader.notes[0]


class Strange:
    """A class that no reader knows."""

    def __init__(self) -> None:
        self.attribute = 3


class Tagged(torch.Tensor):
    """A subclass of a tensor, with an attribute."""


@pytest.mark.parametrize("is_zip", FORMATS)
def test_an_unknown_class_hides_only_its_own_key(tmp_path: Path, is_zip: bool) -> None:
    weight = torch.arange(3.0)
    weight.note = "x"  # type: ignore[attr-defined]
    state = {
        "args": argparse.Namespace(lr=0.5, strange=Strange()),
        "weight": weight,
        "tagged": torch.arange(2.0).as_subclass(Tagged),
        "pair": (torch.arange(3), "x"),
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    with opened(tmp_path / "a.pt") as checkpoint:
        assert checkpoint["args.lr"] == 0.5
        assert bits(checkpoint["weight"].read()) == bits(torch.arange(3.0))
        assert bits(checkpoint["tagged"].read()) == bits(torch.arange(2.0))
        pair = checkpoint["pair"]
        assert (pair[0].tolist(), pair[1]) == ([0, 1, 2], "x")
        with pytest.raises(PlainDataError, match=r"Strange cannot be read as plain data.*trust_pickle=True"):
            checkpoint["args.strange"]
        assert verify_foreign(checkpoint).ok
    with opened(tmp_path / "a.pt", trust_pickle=True) as checkpoint:
        assert checkpoint.reader.object("args.strange", trust_pickle=True).attribute == 3


def test_damage_of_a_tensor_in_an_object_is_found(tmp_path: Path) -> None:
    torch.save({"pair": (torch.arange(7), "x")}, tmp_path / "a.pt")
    whole = bytearray((tmp_path / "a.pt").read_bytes())
    whole[whole.index(bytes(torch.arange(7).numpy()))] ^= 1
    (tmp_path / "a.pt").write_bytes(whole)
    with opened(tmp_path / "a.pt") as checkpoint:
        assert [type(fault) for fault in verify_foreign(checkpoint).faults] == [CorruptChunkError]
        with pytest.raises(CorruptChunkError, match="CRC-32"):
            checkpoint["pair"]


def test_a_pickled_module_has_the_keys_of_its_state_dict(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module.register_buffer("scratch", torch.zeros(9), persistent=False)
    torch.save(module, tmp_path / "a.pt")
    with opened(tmp_path / "a.pt") as checkpoint:
        expected = module.state_dict()
        assert checkpoint.keys() == sorted(expected)
        assert {key: bits(checkpoint[key].read()) for key in expected} == {
            key: bits(value) for key, value in expected.items()
        }


def test_a_single_tensor_and_keys_that_clash(tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "a.pt")
    with opened(tmp_path / "a.pt") as checkpoint:
        assert checkpoint["value"].read().tolist() == [0, 1, 2]
    torch.save({"inner": {1: "a", "1": "b"}, "w": torch.zeros(2)}, tmp_path / "a.pt")
    with opened(tmp_path / "a.pt") as checkpoint:
        assert checkpoint["inner"] == {1: "a", "1": "b"}
    torch.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"two values have the key a\.b"):
        opened(tmp_path / "a.pt")


def test_the_legacy_format_opens_without_reading_its_storages(tmp_path: Path) -> None:
    """A sparse file of 1 TB opens in a few megabytes."""
    numel = 1 << 38
    state = {"a": torch.zeros(2), "b": torch.arange(3)}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "a.pt").read_bytes()
    at = whole.index(b"X\x03\x00\x00\x00cpu", whole.index(b"FloatStorage"))
    at = whole.index(b"K\x02N", at)  # the number of elements, and no view
    head = whole[:at] + b"\x8a\x05" + numel.to_bytes(5, "little") + whole[at + 2 :]
    sizes = [
        head.index(struct.pack("<q", n) + bytes(t.numpy())) for n, t in ((2, state["a"]), (3, state["b"]))
    ]
    order = sorted(sizes)
    with open(tmp_path / "b.pt", "wb") as file:
        file.write(head[: order[0]])
        for begin in order:
            if begin == sizes[0]:
                file.write(struct.pack("<q", numel))
                file.seek(4 * numel, 1)
            else:
                file.write(head[begin : begin + 8 + 24])
        file.truncate()
    tracemalloc.start()
    with opened(tmp_path / "b.pt") as checkpoint:
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
        assert checkpoint["b"].read().tolist() == [0, 1, 2]
        assert checkpoint["a"].read().tolist() == [0.0, 0.0]


def test_a_text_of_the_legacy_format_that_claims_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "a.pt").read_bytes()
    at = whole.index(b"}q\0.")  # the empty dict
    with open(tmp_path / "b.pt", "wb") as file:
        file.write(whole[:at] + b"\x8e" + struct.pack("<Q", 2 << 30))
        file.truncate(4 << 30)
    with pytest.raises(FormatError, match="ends early"):
        opened(tmp_path / "b.pt")


def test_a_pickle_of_the_legacy_format_is_read_in_pieces(tmp_path: Path) -> None:
    """With long strings, and with lines and numbers that cross the ends of pieces."""
    state = {f"key {at} {'x' * (at * 977 % 5000)}": torch.tensor(at) for at in range(600)}
    state["text"] = "y" * 1_000_000  # type: ignore[assignment]
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    file = TorchFile(LocalStorage(tmp_path), "a.pt")
    assert file.value.keys() == state.keys()
    assert file.value["text"] == state["text"]
    assert all(int(file.read(file.value[key])) == int(state[key]) for key in list(state)[:-1:50])


def test_zip64_records(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for entry in old.infolist():
            with new.open(zipfile.ZipInfo(entry.filename), "w", force_zip64=True) as record:
                record.write(old.read(entry))
    with opened(tmp_path / "b.pt") as checkpoint:
        assert checkpoint["a"].read().tolist() == [0, 1, 2, 3]


def billion() -> dict[str, Any]:
    """A small pickle that stands for 2 to the power of 60 values."""
    value: dict[str, Any] = {"leaf": 1}
    for _ in range(60):
        value = {"a": value, "b": value}
    return value


def test_a_small_file_with_too_many_values_is_refused_in_time(tmp_path: Path) -> None:
    torch.save(billion(), tmp_path / "a.pt")
    with pytest.raises(FormatError, match="too often"):
        opened(tmp_path / "a.pt")
    torch.save({"a": (billion(), torch.zeros(2))}, tmp_path / "a.pt")
    value = TorchSaveReader(Foreign(LocalStorage(tmp_path), "a.pt")).object("a")
    assert value[0]["a"] is value[0]["b"]


def test_a_tensor_in_an_object_that_needs_far_more_memory_than_the_file_is_refused(tmp_path: Path) -> None:
    torch.save({"a": (torch.zeros(1).expand(1 << 40),)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="repeats the elements"):
        opened(tmp_path / "a.pt").reader.object("a")


@pytest.mark.parametrize("is_zip", FORMATS)
def test_every_changed_byte_is_an_error_or_other_contents(tmp_path: Path, is_zip: bool) -> None:
    state = {"a": torch.arange(3), "args": argparse.Namespace(b=[torch.ones(2)], c=(1, torch.zeros(1)))}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    whole = (tmp_path / "a.pt").read_bytes()
    found = 0
    for at in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        (tmp_path / "b.pt").write_bytes(damaged)
        try:
            with opened(tmp_path / "b.pt", format="torch") as checkpoint:
                report = verify_foreign(checkpoint)
                found += not report.ok
                for key in checkpoint.reader.tensors:
                    checkpoint[key].read()
                for key in checkpoint.reader.object_keys():
                    checkpoint.reader.object(key)
        except ShardproofError:
            found += 1
    assert found > len(whole) // 150


def test_a_folder_is_no_file_of_torch_save(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="name the file"):
        opened(tmp_path, format="torch")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a/data.json", "{}")
    with pytest.raises(FormatError, match="not a checkpoint of a known format"):
        opened(tmp_path / "a.zip")
