"""Checkpoints of torch.distributed.checkpoint: read to their bits, damage found, nothing run."""

from __future__ import annotations

import io
import pickle  # noqa: TID251 to write damaged metadata
import sys
import types
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard

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
from tests.unit.formats.peers import Golden, bits, check_golden

GOLDENS = [
    "dcp22_objects_w2",
    "dcp22_zoo_w4",
    "dcp_dtypes_w2",
    "dcp_files_w2",
    "dcp_fsdp1_w2",
    "dcp_fsdp2_adamw_w3",
    "dcp_fsdp_tp_w4",
    "dcp_no_flatten_w1",
    "dcp_objects_w2",
    "dcp_stale_w3",
    "mfsdp_z1_w2",
    "mfsdp_z3_w3",
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", GOLDENS)
def test_golden_checkpoints_read_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    check_golden(Golden(name, tmp_path), "dcp")


def verified(folder: Path) -> VerifyReport:
    with sp.open(folder, format="dcp") as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint)


def test_metadata_that_would_run_code_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Golden("evil_dcp_metadata", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    verified(golden.checkpoint)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"weight": torch.arange(12.0).reshape(4, 3), "bias": torch.arange(3), "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt")
    return tmp_path / "ckpt"


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    """Rewrites the metadata of a checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))


def without_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["weight"].chunks.clear()


def twice(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["weight"].chunks
    chunks.append(chunks[0])


def larger(metadata: Any) -> None:
    metadata.state_dict_metadata["weight"].size = torch.Size([5, 3])


@pytest.mark.parametrize("change", [without_chunks, twice, larger])
def test_holes_and_overlaps_are_errors(saved: Path, change: Callable[[Any], None]) -> None:
    changed(saved, change)
    shape = sp.open(saved).shape("weight")
    target = {"weight": torch.zeros(shape), "bias": torch.zeros(3, dtype=torch.int64), "step": 0}
    with pytest.raises(TilingError, match="weight"):
        sp.load(saved, target, include=["bias", "weight"])
    assert not target["bias"].any(), "nothing is changed before all tilings are proved"
    with sp.open(saved) as checkpoint:
        assert checkpoint["bias"].read().tolist() == [0, 1, 2], "other tensors can be read"
        with pytest.raises(TilingError, match="weight"):
            checkpoint["weight"].read()
    assert [type(fault) for fault in verified(saved).faults] == [TilingError]


def test_an_entry_that_is_missing_is_named(saved: Path) -> None:
    def without_entry(metadata: Any) -> None:
        for index in [index for index in metadata.storage_data if index.fqn == "weight"]:
            del metadata.storage_data[index]

    changed(saved, without_entry)
    with pytest.raises(FormatError, match="weight is missing"):
        sp.open(saved)


def swap(metadata: Any) -> None:
    """Gives each tensor the entry of the other."""
    entries = metadata.storage_data
    one, other = (index for index in entries if index.fqn in ("weight", "bias"))
    entries[one], entries[other] = entries[other], entries[one]


def test_an_entry_of_another_tensor_is_an_error(saved: Path) -> None:
    changed(saved, swap)
    with pytest.raises(FormatError, match="expected a tensor of dtype"):
        sp.open(saved)["weight"].read()


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "", "a\0b"])
def test_file_names_that_lead_out_are_refused(saved: Path, name: str) -> None:
    def lead_out(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    changed(saved, lead_out)
    with pytest.raises(FormatError, match="leads out of the checkpoint"):
        sp.open(saved)


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    """A checkpoint with zstd entries: dense, strided and empty tensors, and an object."""
    from torch.distributed.checkpoint._extension import ZStandard

    state = {"weight": torch.arange(12.0).reshape(4, 3), "zeros": torch.zeros(500, 600), "step": 7}
    state |= {"turned": torch.arange(12).reshape(4, 3).t(), "empty": torch.zeros(0, 2)}
    writer = dcp.FileSystemWriter(tmp_path / "ckpt", _extensions=[ZStandard()])
    dcp.save(state, storage_writer=writer)
    return tmp_path / "ckpt"


def test_compressed_entries_read_whole_sliced_and_into_a_target(compressed: Path) -> None:
    with sp.open(compressed) as checkpoint:
        assert checkpoint["weight"].read().tolist() == torch.arange(12.0).reshape(4, 3).tolist()
        assert checkpoint["turned"][1:, ::2].tolist() == torch.arange(12).reshape(4, 3).t()[1:, ::2].tolist()
        assert not checkpoint["zeros"].read().any()
        assert checkpoint["empty"].read().shape == (0, 2)
        assert checkpoint["step"] == 7
    report = verified(compressed)
    assert report.ok and report.bytes and not report.unproved
    target = {"weight": torch.zeros(4, 3), "zeros": torch.ones(500, 600)}
    sp.load(compressed, target, include=["weight", "zeros"])
    assert target["weight"].sum() == 66 and not target["zeros"].any()


def test_a_read_of_a_compressed_entry_decodes_once(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sp.open(compressed) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        reads: list[int] = []
        read = checkpoint.reader.storage.read

        def counted(name: str, start: int = 0, stop: int | None = None) -> bytes:
            reads.append(start)
            return read(name, start, stop)

        monkeypatch.setattr(checkpoint.reader.storage, "read", counted)
        checkpoint["zeros"].read()
        assert len(reads) == 1
        checkpoint["zeros"][3, 4]
        checkpoint["zeros"][3, 4]
        assert len(reads) == 3


@pytest.mark.parametrize("what", ["flipped", "cut", "bomb", "swapped"])
def test_damaged_compressed_entries_are_errors(compressed: Path, what: str) -> None:
    (file,) = compressed.glob("*.distcp")
    info = pickle.loads((compressed / ".metadata").read_bytes()).storage_data
    (entry,) = (info[index] for index in info if index.fqn == "zeros")
    data = bytearray(file.read_bytes())
    if what == "flipped":
        data[entry.offset + entry.length // 2] ^= 0x10
        file.write_bytes(data)
    elif what == "cut":
        changed(compressed, lambda metadata: setattr(entry_of(metadata, "zeros"), "length", 90))
    elif what == "bomb":
        bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
        file.write_bytes(data + bomb)

        def point(metadata: Any) -> None:
            entry_of(metadata, "zeros").offset = len(data)
            entry_of(metadata, "zeros").length = len(bomb)

        changed(compressed, point)
    else:
        other = pickle.dumps([1, 2])
        file.write_bytes(data[: entry.offset] + other + data[entry.offset + len(other) :])
    with pytest.raises(FormatError, match=r"zstd frame|decodes to more than"):
        sp.open(compressed)["zeros"].read()
    assert [fault.details["file"] for fault in verified(compressed).faults] == [str(file)]


def entry_of(metadata: Any, key: str) -> Any:
    (entry,) = (info for index, info in metadata.storage_data.items() if index.fqn == key)
    return entry


def test_unknown_extensions_are_named(compressed: Path) -> None:
    def rename(metadata: Any) -> None:
        entry_of(metadata, "weight").transform_descriptors = ["stream.rot13/1"]

    changed(compressed, rename)
    with pytest.raises(FormatError, match=r"stream\.rot13/1"):
        sp.open(compressed)["weight"].read()


class Custom:
    """A class that checkpoints refer to."""


def test_an_object_of_an_unknown_class_fails_alone_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = types.ModuleType("gone")
    kind = type("Custom", (), {"__module__": "gone"})
    monkeypatch.setattr(gone, "Custom", kind, raising=False)
    monkeypatch.setitem(sys.modules, "gone", gone)
    state = {"weight": torch.ones(3), "custom": kind(), "step": 7, "known": Custom()}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt")
    monkeypatch.delitem(sys.modules, "gone")
    target: dict[str, Any] = {"weight": torch.zeros(3), "step": 0}
    sp.load(tmp_path / "ckpt", target, exclude=["custom", "known"])
    assert target["step"] == 7 and target["weight"].all()
    with sp.open(tmp_path / "ckpt") as checkpoint:
        with pytest.raises(PlainDataError, match=r"gone\.Custom"):
            checkpoint["custom"]
        with pytest.raises(PlainDataError, match=r"test_dcp\.Custom"):
            checkpoint["known"]
    with sp.open(tmp_path / "ckpt", trust_pickle=True) as checkpoint:
        assert checkpoint["step"] == 7
        with pytest.raises(FormatError, match="custom cannot be unpickled"):
            checkpoint["custom"]
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert isinstance(checkpoint.reader.object("known", trust_pickle=True), Custom)


def test_plain_objects_are_not_unpickled_even_if_they_may_be(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", None)
    assert sp.open(saved, trust_pickle=True)["step"] == 7


def test_paths_as_another_python_pickles_them_are_ignored(saved: Path) -> None:
    class Renamed(PosixPath):
        def __reduce__(self) -> Any:
            return PosixPath, ("/elsewhere",)

    buffer = io.BytesIO()
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.storage_meta.checkpoint_id = Renamed("/elsewhere")
    pickle.Pickler(buffer, 0).dump(metadata)
    data = buffer.getvalue()
    names = b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath"  # before Python 3.13, and of it
    written, other = names if names[0] in data else names[::-1]
    assert written in data
    (saved / ".metadata").write_bytes(data.replace(written, other))
    assert sp.open(saved)["bias"].read().tolist() == [0, 1, 2]


def test_notes_on_checkpoints_of_torch_2_2_name_what_they_lack(tmp_path: Path) -> None:
    assert any(
        "rank 0 only" in note for note in verified(Golden("dcp22_objects_w2", tmp_path).checkpoint).notes
    )
    assert not verified(Golden("dcp_objects_w2", tmp_path).checkpoint).notes


def test_two_keys_with_one_entry_are_checked_each(saved: Path) -> None:
    def share(metadata: Any) -> None:
        entries = metadata.storage_data
        indices = {index.fqn: index for index in entries}
        entries[indices["weight"]] = entries[indices["bias"]]

    changed(saved, share)
    with sp.open(saved) as checkpoint:
        assert checkpoint["bias"].read().tolist() == [0, 1, 2]
        with pytest.raises(FormatError, match="expected a tensor of dtype"):
            checkpoint["weight"].read()


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 13])
def test_a_damaged_byte_of_the_data_is_found_or_harmless(every: int, saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    whole = file.read_bytes()
    expected = {key: bits(sp.open(saved)[key].read()) for key in ("weight", "bias")}
    found = 0
    for at in range(0, len(whole), every):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        file.write_bytes(damaged)
        checkpoint = sp.open(saved)
        try:
            assert {key: bits(checkpoint[key].read()) for key in expected} == expected
            assert checkpoint["step"] == 7
        except ShardproofError:
            found += 1
    assert found


def test_missing_and_short_files_are_errors(saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1000])
    assert any("expected" in fault.message for fault in verified(saved).faults)
    file.unlink()
    assert any(file.name in fault.message for fault in verified(saved).faults)
    with pytest.raises(StorageError, match=file.name):
        sp.load(saved, {"bias": torch.zeros(3, dtype=torch.int64)}, include="bias")
    (saved / ".metadata").unlink()
    with pytest.raises(NotCommittedError, match="did not finish"):
        sp.open(saved, format="dcp")


def test_unknown_keys_are_refused(saved: Path) -> None:
    with pytest.raises(KeyError, match="nothing"):
        sp.open(saved)["nothing"]


def test_halves_are_joined_only_if_both_fit(tmp_path: Path) -> None:
    """A lone half, a pair of other shapes, and halves beside their whole stay as they are."""
    layer = "layers.{}.mlp.linear_fc1.weight{}".format
    rows = torch.arange(12.0).reshape(4, 3)
    state = {
        layer(0, "_w"): rows[:2].clone(),
        layer(0, "_v"): rows[2:].clone(),
        layer(1, "_w"): rows,
        layer(2, "_w"): rows,
        layer(2, "_v"): rows[:2].clone(),
        layer(3, "_w"): rows,
        layer(3, "_v"): rows,
        layer(3, ""): rows,
        "attention_w": rows,
        "attention_v": rows,
    }
    for end in ("_w", "_v"):
        state |= {
            f"optim.{layer(0, end)}.exp_avg": state[layer(0, end)] + 1,
            f"optim.{layer(0, end)}.master_param": rows,  # Megatron-Core stores it whole, twice
            f"optim.{layer(0, end)}.step": torch.tensor(3.0),
        }
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
    with sp.open(tmp_path / "checkpoint") as checkpoint:
        read = {key: checkpoint[key].read() for key in checkpoint}
        assert sum("SwiGLU" in note for note in checkpoint.reader.notes) == 1
    gone = {key for key in state if layer(0, "_") in key}
    joined = {
        layer(0, ""): rows,
        f"optim.{layer(0, '')}.exp_avg": rows + 1,
        f"optim.{layer(0, '')}.master_param": rows,
        f"optim.{layer(0, '')}.step": torch.tensor(3.0),
    }
    expected = {key: value for key, value in state.items() if key not in gone} | joined
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[key], expected[key]) for key in expected)
