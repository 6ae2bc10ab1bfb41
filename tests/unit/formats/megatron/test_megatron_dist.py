"""Megatron-Core's torch_dist checkpoints: flat ranges in true shapes, objects, digests, run folders."""

from __future__ import annotations

import hashlib
import json
import pickle  # noqa: TID251 to write damaged metadata
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import (
    CorruptChunkError,
    FormatError,
    PlainDataError,
    ShardproofError,
    StorageError,
    TilingError,
)
from shardproof.runs.maintenance import VerifyReport, verify_foreign
from tests.unit.formats.peers import Golden, bits, check_golden

GOLDENS = [
    "mc08_handmade_w2",
    "mc11_gpt_fsms_w2",
    "mc_gpt_dp_reshardable_w2",
    "mc_gpt_fully_reshardable_w2",
    "mc_handmade_w2",
]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_checkpoints_read_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    check_golden(Golden(name, tmp_path), "torch_dist")


def opened(path: Path, **options: Any) -> ForeignCheckpoint:
    checkpoint = sp.open(path, **options)
    assert isinstance(checkpoint, ForeignCheckpoint)
    return checkpoint


def verified(path: Path) -> VerifyReport:
    with opened(path) as checkpoint:
        return verify_foreign(checkpoint)


def test_the_step_and_the_number_of_ranks_are_read(tmp_path: Path) -> None:
    for name, step in (("mc_handmade_w2", 10), ("mc11_gpt_fsms_w2", 2)):
        with opened(Golden(name, tmp_path).checkpoint) as checkpoint:
            assert (checkpoint.step, checkpoint.world_size) == (step, 2)


def test_flat_ranges_fill_a_target_of_the_true_shape(tmp_path: Path) -> None:
    golden = Golden("mc11_gpt_fsms_w2", tmp_path)
    keys = [key for key in golden.kinds if key.startswith("optimizer.state.exp_avg.")]
    target = {key: torch.zeros(golden.kinds[key][1]) for key in keys}
    sp.load(golden.checkpoint, target, include=keys)
    assert {key: bits(target[key]) for key in keys} == {key: bits(golden.tensor(key)) for key in keys}


def test_buckets_are_noted(tmp_path: Path) -> None:
    with opened(Golden("mc_gpt_dp_reshardable_w2", tmp_path).checkpoint) as checkpoint:
        assert any("dp_reshardable" in note for note in checkpoint.reader.notes)
        noted = [key for key, tensor in checkpoint.reader.tensors.items() if tensor.notes]
        assert len(noted) == 3 and all("bucket_idx_0" in key for key in noted)


@pytest.mark.parametrize("text", ["7", " 0000007\n"])
def test_a_run_folder_is_its_latest_iteration(tmp_path: Path, text: str) -> None:
    golden = Golden("mc_handmade_w2", tmp_path)
    shutil.copytree(golden.checkpoint, tmp_path / "run" / "iter_0000007")
    (tmp_path / "run" / "iter_0000009").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(text)
    check_golden(golden, "torch_dist", tmp_path / "run")
    assert opened(tmp_path / "run").step == 7


def test_plain_dcp_in_a_run_folder_is_found(saved: Path, tmp_path: Path) -> None:
    (saved / "metadata.json").unlink()
    saved.rename(tmp_path / "iter_0000012")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    with opened(tmp_path) as checkpoint:
        assert (checkpoint.reader.name, checkpoint.step) == ("dcp", 12)
        assert checkpoint["weight"].read().sum() == 66


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with a weight, an object of a rank, and a common state."""
    folder = tmp_path / "ckpt"
    state = {"weight": torch.arange(12.0).reshape(4, 3), "rng/shard_0_1": [7]}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 3, "args": Namespace(lr=0.1), "groups": [torch.ones(2)]}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


class Enum:
    """Stands for a class of Megatron that is not installed."""


def test_a_class_in_the_common_state_hides_no_other_item(saved: Path) -> None:
    with opened(saved) as checkpoint:
        assert checkpoint.keys() == ["common", "rng/shard_0_1", "weight"]
        assert checkpoint["common"]["iteration"] == 3
    torch.save({"iteration": 3, "args": Namespace(backend=Enum()), "lr": 0.5}, saved / "common.pt")
    with opened(saved) as checkpoint:
        assert checkpoint.keys() == [
            "common.args",
            "common.iteration",
            "common.lr",
            "rng/shard_0_1",
            "weight",
        ]
        assert checkpoint["common.lr"] == 0.5
        with pytest.raises(PlainDataError, match=r"test_megatron_dist\.Enum"):
            checkpoint["common.args"]
    with opened(saved, trust_pickle=True) as checkpoint:
        assert checkpoint["common.iteration"] == 3
        trusted = checkpoint.reader.object("common.args", trust_pickle=True)
        assert isinstance(trusted.backend, Enum)


def test_objects_that_are_files_are_read(saved: Path) -> None:
    (saved / "rng").mkdir()
    torch.save([{"seed": 6}], saved / "rng" / "shard_0.0_1.2.pt")
    with opened(saved) as checkpoint:
        assert checkpoint["rng/shard_0.0_1.2"] == [{"seed": 6}]
        assert checkpoint["rng/shard_0_1"] == 7


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_common_state_leaves_tensors_readable(saved: Path, damage: str) -> None:
    data = bytearray((saved / "common.pt").read_bytes())
    if damage == "missing":
        (saved / "common.pt").unlink()
    elif damage == "cut":
        (saved / "common.pt").write_bytes(data[:-100])
    else:
        data[data.index(b"iteration")] ^= 1
        (saved / "common.pt").write_bytes(data)
    with opened(saved) as checkpoint:
        assert checkpoint["weight"].read().sum() == 66
        with pytest.raises(ShardproofError, match=r"common\.pt"):
            checkpoint["common"]
    assert any("common.pt" in fault.message for fault in verified(saved).faults)


def sign(folder: Path) -> None:
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "integrity.json"
    }
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": digests}))


def change_digests(folder: Path, change: Callable[[Any], None]) -> None:
    found = json.loads((folder / "integrity.json").read_text())
    change(found)
    (folder / "integrity.json").write_text(json.dumps(found))


def test_digests_are_verified(saved: Path) -> None:
    sign(saved)
    report = verified(saved)
    assert report.ok, report.faults
    files = sum(path.stat().st_size for path in saved.iterdir() if path.name != "integrity.json")
    assert report.bytes <= files
    (saved / "metadata.json").write_text((saved / "metadata.json").read_text() + " ")
    assert [type(fault) for fault in verified(saved).faults] == [CorruptChunkError]
    (saved / "extra").write_bytes(b"x")
    sign(saved)
    (saved / "extra").unlink()
    assert [type(fault) for fault in verified(saved).faults] == [StorageError]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.update(algorithm="md5"), "only sha256"),
        (lambda found: found.update(files=[1]), "do not map names to digests"),
        (lambda found: found["files"].pop("__0_0.distcp"), "no digest of __0_0"),
        (lambda found: found["files"].update({"../x": "00"}), "leads out"),
    ],
)
def test_false_digests_are_refused(saved: Path, change: Callable[[Any], None], message: str) -> None:
    sign(saved)
    change_digests(saved, change)
    with opened(saved) as checkpoint, pytest.raises(FormatError, match=message):
        checkpoint.reader.verify_extra()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "it is not valid JSON (nested too deep)"),
        ("[1]", "it is a JSON list, not an object"),
        ('{"algorithm"', "it is not valid JSON (Expecting ':' delimiter"),
    ],
    ids=["deep", "list", "cut"],
)
def test_a_damaged_list_of_digests_is_named(saved: Path, text: str, message: str) -> None:
    (saved / "integrity.json").write_text(text)
    assert any(f"integrity.json: {message}" in fault.message for fault in verified(saved).faults)


def fragmented(folder: Path, shape: tuple[int, ...]) -> None:
    """Sets the true shape of "weight", of which one fragment of 12 elements is stored."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.mcore_data = {"weight": {"nd_reformulated_orig_global_shape": shape}}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    folder = tmp_path / "flat"
    dcp.save({"weight": torch.arange(12.0).reshape(1, 1, 12)}, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def test_one_fragment_is_the_tensor(flat: Path) -> None:
    fragmented(flat, (4, 3))
    with opened(flat) as checkpoint:
        assert checkpoint["weight"].read().tolist() == torch.arange(12.0).reshape(4, 3).tolist()
        assert checkpoint["weight"][1:3, ::2].tolist() == [[3.0, 5.0], [6.0, 8.0]]


@pytest.mark.parametrize("shape", [(4, 4), (12,), (4, 3, 1), (0, 3), (-4, -3), (2**40, 2**40)])
def test_global_shapes_that_do_not_fit_are_refused(flat: Path, shape: tuple[int, ...]) -> None:
    fragmented(flat, shape)
    with pytest.raises(FormatError, match=r"weight|structure"):
        opened(flat)


@pytest.mark.parametrize("what", ["hole", "beyond", "block"])
def test_false_flat_ranges_are_refused(flat: Path, what: str) -> None:
    fragmented(flat, (4, 3))
    metadata = pickle.loads((flat / ".metadata").read_bytes())
    (chunk,) = metadata.state_dict_metadata["weight"].chunks
    if what == "hole":
        chunk.sizes = torch.Size([1, 1, 7])
    elif what == "beyond":
        chunk.sizes = torch.Size([1, 1, 13])
    else:
        chunk.sizes = torch.Size([1, 2, 6])
    (flat / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    with pytest.raises((FormatError, TilingError), match="weight"):
        opened(flat)["weight"].read()


def test_damaged_trackers_are_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(FormatError, match="latest_checkpointed_iteration"):
        sp.open(tmp_path, format="torch_dist")
