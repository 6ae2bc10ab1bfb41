"""Checkpoints of torch.distributed.checkpoint: read to their bits, damage found, nothing run."""

from __future__ import annotations

import pickle  # noqa: TID251 to write damaged metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardproof as sp
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError, TilingError
from shardproof.loading import ForeignCheckpoint
from shardproof.maintenance import VerifyReport, verify_foreign
from tests.unit.interop.peers import Golden, bits, check_golden

GOLDENS = [
    "dcp22_zoo_w4",
    "dcp_dtypes_w2",
    "dcp_files_w2",
    "dcp_fsdp1_w2",
    "dcp_fsdp2_adamw_w3",
    "dcp_fsdp_tp_w4",
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
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
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


def test_every_damaged_byte_of_the_data_is_found_or_harmless(saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    whole = file.read_bytes()
    expected = {key: bits(sp.open(saved)[key].read()) for key in ("weight", "bias")}
    found = 0
    for at in range(0, len(whole), 3):
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


def test_keys_that_are_not_there_are_refused(saved: Path) -> None:
    with pytest.raises(KeyError, match="nothing"):
        sp.open(saved)["nothing"]
