"""Sharded safetensors of torch's Hugging Face writer: read to their bits, holes and false metadata found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError, TilingError
from shardproof.runs.maintenance import verify_foreign
from tests.unit.formats.peers import Golden, bits, check_golden

FIRST, SECOND = (f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2))


def test_golden_checkpoint_reads_to_its_expected_bits(tmp_path: Path) -> None:
    golden = Golden("dcp_hf_sharded_w2", tmp_path)
    check_golden(golden, "dcp_safetensors")
    with sp.open(golden.checkpoint) as checkpoint:
        assert checkpoint.world_size == 2


def test_a_target_is_filled(tmp_path: Path) -> None:
    golden = Golden("dcp_hf_sharded_w2", tmp_path)
    target = {key: torch.zeros_like(golden.tensor(key)) for key in golden.kinds}
    sp.load(golden.checkpoint, target)
    assert {key: bits(found) for key, found in target.items()} == {
        key: bits(golden.tensor(key)) for key in golden.kinds
    }


def test_integers_and_scalars_of_one_rank_are_read(tmp_path: Path) -> None:
    state = {"scalar": torch.tensor(2.5), "ids": torch.arange(7), "half": torch.ones(3, dtype=torch.bfloat16)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    with sp.open(tmp_path) as checkpoint:
        assert {key: bits(checkpoint[key].read()) for key in state} == {
            key: bits(value) for key, value in state.items()
        }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two ranks: "weight" of shape (5, 3) in rows 0 to 3 and 3 to 5, "bias" on the first rank."""
    whole = torch.arange(15.0).reshape(5, 3)
    write(tmp_path / FIRST, {"weight": whole[:3], "bias": torch.ones(4)}, {"weight": [0, 0], "bias": [0]})
    write(tmp_path / SECOND, {"weight": whole[3:]}, {"weight": [3, 0]})
    return tmp_path


def write(path: Path, state: dict[str, torch.Tensor], offsets: dict[str, Any]) -> None:
    info = {key: {"saved_offsets": found} for key, found in offsets.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({key: tensor.clone() for key, tensor in state.items()}, path, metadata=metadata)


def rewritten(path: Path, offsets: dict[str, Any]) -> None:
    write(path, load_file(path), offsets)


def faults(folder: Path) -> list[ShardproofError]:
    with sp.open(folder) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint).faults


@pytest.mark.parametrize("offset", [[2, 0], [4, 0], [3, 1]])
def test_holes_and_overlaps_are_errors(saved: Path, offset: list[int]) -> None:
    rewritten(saved / SECOND, {"weight": offset})
    with pytest.raises(TilingError, match="weight"):
        sp.open(saved)["weight"].read()
    assert [type(fault) for fault in faults(saved)] == [TilingError]
    assert sp.open(saved)["bias"].read().all(), "other tensors can be read"


def test_a_lost_first_shard_is_a_hole(saved: Path) -> None:
    (saved / FIRST).unlink()
    with sp.open(saved) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert any("no file of the ranks 0" in note for note in checkpoint.reader.notes)
        with pytest.raises(TilingError, match="weight"):
            checkpoint["weight"].read()


def without_info(folder: Path) -> None:
    save_file(load_file(folder / SECOND), folder / SECOND, metadata={"format": "pt"})


def other_dtype(folder: Path) -> None:
    write(folder / SECOND, {"weight": torch.zeros(2, 3, dtype=torch.int32)}, {"weight": [3, 0]})


def other_rank(folder: Path) -> None:
    write(folder / SECOND, {"weight": torch.zeros(6)}, {"weight": [3]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_info, "no DCP_SHARDING_INFO"),
        (other_dtype, "in another file"),
        (other_rank, "in another file"),
        (lambda folder: rewritten(folder / SECOND, {}), "does not say where weight lies"),
        (lambda folder: rewritten(folder / SECOND, {"weight": [3]}), "not a valid offset"),
        (lambda folder: rewritten(folder / SECOND, {"weight": [-3, 0]}), "not a valid offset"),
        (lambda folder: rewritten(folder / SECOND, {"weight": [2**62, 0]}), "not a valid offset"),
        (lambda folder: rewritten(folder / SECOND, {"weight": "x"}), "Expected"),
        (lambda folder: rewritten(folder / SECOND, {"weight": ["[" * 10]}), "Expected"),
    ],
)
def test_false_metadata_is_refused(saved: Path, change: Callable[[Path], None], message: str) -> None:
    change(saved)
    with pytest.raises(FormatError, match=message) as caught:
        sp.open(saved)
    assert SECOND in str(caught.value)


def test_cut_and_missing_files_are_errors(saved: Path) -> None:
    data = (saved / SECOND).read_bytes()
    (saved / SECOND).write_bytes(data[:-1])
    with pytest.raises(FormatError, match=SECOND):
        sp.open(saved)
    (saved / SECOND).write_bytes(data)
    with sp.open(saved) as checkpoint:
        (saved / SECOND).unlink()
        with pytest.raises(StorageError, match=SECOND):
            checkpoint["weight"].read()


def test_every_damaged_byte_of_the_header_is_found_or_harmless(saved: Path) -> None:
    whole = (saved / SECOND).read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    expected = bits(sp.open(saved)["weight"].read())
    found = 0
    for at in range(length):
        (saved / SECOND).write_bytes(whole[:at] + bytes([whole[at] ^ 0x04]) + whole[at + 1 :])
        try:
            with sp.open(saved) as checkpoint:
                if "weight" in checkpoint:
                    found += bits(checkpoint["weight"].read()) != expected
        except ShardproofError:
            found += 1
    assert found > length // 2


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError, match="no files shard-"):
        sp.open(tmp_path, format="dcp_safetensors")
