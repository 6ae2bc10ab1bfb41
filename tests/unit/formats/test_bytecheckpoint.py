"""Checkpoints of ByteCheckpoint: both folders, the files of ranks, and damage."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import CorruptChunkError, FormatError, ShardproofError, StorageError
from shardproof.runs.maintenance import VerifyReport, verify_foreign
from tests.unit.formats.peers import Golden, bits, check_golden

OBJECTS = ("extra_state.0", "extra_state.1", "optimizer.param_groups")


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    return Golden("bcp_fsdp2_w2", tmp_path)


def verified(folder: Path) -> VerifyReport:
    with sp.open(folder) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint)


def test_golden_checkpoint_reads_to_its_expected_bits(golden: Golden) -> None:
    check_golden(golden, "bytecheckpoint", more=OBJECTS)


def test_objects_of_ranks_are_read(golden: Golden) -> None:
    with sp.open(golden.checkpoint) as checkpoint:
        assert checkpoint.world_size == 2
        assert [checkpoint[f"extra_state.{rank}"]["rank"] for rank in range(2)] == [0, 1]
        assert checkpoint["optimizer.param_groups"][0]["betas"] == (0.9, 0.95)


def test_a_target_is_filled(golden: Golden) -> None:
    keys = [key for key in golden.kinds if key.startswith("model.")]
    target = {key: torch.zeros_like(golden.tensor(key)) for key in keys}
    sp.load(golden.checkpoint, target, include="model.*")
    assert {key: bits(target[key]) for key in keys} == {key: bits(golden.tensor(key)) for key in keys}


def test_a_model_alone_is_read(golden: Golden) -> None:
    (golden.checkpoint / "optimizer" / ".metadata").unlink()
    with sp.open(golden.checkpoint) as checkpoint:
        assert "model.l1.weight" in checkpoint and "optimizer.state.gain.step" not in checkpoint


def replaced(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


def test_an_entry_with_another_length_is_an_error(golden: Golden) -> None:
    replaced(golden.checkpoint / "model" / ".metadata", b"K\x90", b"K\x8c")
    with sp.open(golden.checkpoint) as checkpoint, pytest.raises(FormatError, match="has 140 bytes"):
        checkpoint["model.emb.weight"].read()


def test_a_description_of_another_tensor_is_an_error(golden: Golden) -> None:
    replaced(
        golden.checkpoint / "model" / ".metadata", b"FloatStorage", b"Int__Storage".replace(b"__", b"32")
    )
    message = r"is a tensor of torch\.Int32Storage and shape \[6, 6\], expected a tensor of dtype float32"
    with sp.open(golden.checkpoint) as checkpoint, pytest.raises(FormatError, match=message):
        checkpoint["model.emb.weight"].read()


def test_cut_and_missing_files_are_errors(golden: Golden) -> None:
    path = golden.checkpoint / "model" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-5])
    assert any(path.name in fault.message for fault in verified(golden.checkpoint).faults)
    path.unlink()
    with sp.open(golden.checkpoint) as checkpoint, pytest.raises(StorageError, match="model/__1_0"):
        checkpoint["model.emb.weight"].read()


def test_lost_and_damaged_extra_states_are_found(golden: Golden) -> None:
    second = golden.checkpoint / "extra_state" / "extra_state_rank_1.pt"
    data = bytearray(second.read_bytes())
    data[data.index(struct.pack("<ii", 400, 1))] ^= 1  # the random state
    second.write_bytes(data)
    assert [type(fault) for fault in verified(golden.checkpoint).faults] == [CorruptChunkError]
    second.unlink()
    (golden.checkpoint / "extra_state" / "extra_state_rank_0.pt").rename(second)
    assert any("1 ranks, expected 2" in note for note in verified(golden.checkpoint).notes)


def test_every_damaged_byte_of_the_metadata_is_an_error_or_harmless(golden: Golden) -> None:
    path = golden.checkpoint / "model" / ".metadata"
    whole = path.read_bytes()
    found = 0
    for at in range(0, len(whole), 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        try:
            with sp.open(golden.checkpoint, format="bytecheckpoint") as checkpoint:
                for key in checkpoint:
                    if key.startswith("model."):
                        checkpoint[key].read()
        except ShardproofError:
            found += 1
    assert found > 20
