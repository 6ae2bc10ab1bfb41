"""Zarr checkpoints of Megatron-Core: read to their bits; a chunk that was lost is an error, not zeros."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.engine.foreign import FileRange
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError
from shardproof.runs.maintenance import VerifyReport, verify_foreign
from tests.unit.formats.peers import Golden, bits, check_golden


def handmade(folder: Path) -> Golden:
    """The golden checkpoint of small tensors, with one expected NaN as the file stores it.

    The file has the bits 0xffc0, which TensorStore gives too. The expectation has 0xffff, to which torch
    converts every NaN on the way from float32 to bfloat16.
    """
    golden = Golden("zarr_mc11_handmade_w2", folder)
    assert (golden.checkpoint / "row" / "0.1").read_bytes()[:2] == b"\xc0\xff"
    found, stored = torch.tensor([-1, -64], dtype=torch.int16).view(torch.bfloat16)
    golden.correct("row", (0, 3), found, stored)
    return golden


def test_the_golden_checkpoint_of_small_tensors_reads_to_its_bits(tmp_path: Path) -> None:
    check_golden(handmade(tmp_path), "megatron_zarr")


def test_the_golden_checkpoint_with_flat_ranges_reads_to_its_expected_bits(tmp_path: Path) -> None:
    check_golden(Golden("zarr_mc11_gpt_fsms_w2", tmp_path), "megatron_zarr")


def verified(folder: Path) -> VerifyReport:
    with sp.open(folder, format="megatron_zarr") as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint)


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    return handmade(tmp_path)


def test_a_target_is_filled_and_bytes_are_read_as_they_are(golden: Golden) -> None:
    state = {
        key: torch.zeros(shape, dtype=getattr(torch, dtype)) for key, (dtype, shape) in golden.kinds.items()
    }
    sp.load(golden.checkpoint, state, include=list(state))
    for key, tensor in state.items():
        assert bits(tensor) == bits(golden.tensor(key)), key
    with sp.open(golden.checkpoint) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        extents = [box.located().extent for box in checkpoint.boxes]
        assert all(isinstance(extent, FileRange) for extent in extents)
        assert checkpoint.step == 10


def test_a_lost_chunk_is_an_error_and_not_zeros(golden: Golden) -> None:
    (golden.checkpoint / "fc1" / "2.0").unlink()
    message = r"fc1/2\.0 is missing: it holds the part of fc1 that begins at \(8, 0\)"
    with sp.open(golden.checkpoint) as checkpoint:
        with pytest.raises(StorageError, match=message) as caught:
            checkpoint["fc1"].read()
        assert caught.value.details["key"] == "fc1"
        assert bits(checkpoint["fc1"][:8]) == bits(golden.tensor("fc1")[:8]), "other chunks can be read"
        assert bits(checkpoint["col"].read()) == bits(golden.tensor("col"))
    target = {"fc1": torch.ones(16, 3)}
    with pytest.raises(StorageError, match=message):
        sp.load(golden.checkpoint, target, include="fc1")
    assert target["fc1"].eq(1).all(), "nothing is changed"
    (fault,) = verified(golden.checkpoint).faults
    assert isinstance(fault, StorageError)
    assert "fc1/2.0 is missing" in fault.message


def test_every_lost_chunk_is_named_by_verify(golden: Golden) -> None:
    for name in ("decoder.layers.weight/0.0.0", "row/0.1", "rep/0"):
        (golden.checkpoint / name).unlink()
    messages = [fault.message for fault in verified(golden.checkpoint).faults]
    assert len(messages) == 3
    for name in ("decoder.layers.weight/0.0.0", "row/0.1", "rep/0"):
        assert any(f"{name} is missing" in message for message in messages)


def test_a_cut_chunk_is_an_error(golden: Golden) -> None:
    chunk = golden.checkpoint / "row" / "0.1"
    chunk.write_bytes(chunk.read_bytes()[:-2])
    with pytest.raises(StorageError, match="22 bytes, expected 24"):
        sp.open(golden.checkpoint)["row"].read()
    assert not verified(golden.checkpoint).ok


@pytest.mark.parametrize("name", ["common.pt", "rng_state/shard_0.1_1.2.pt"])
def test_lost_and_damaged_objects_are_errors(golden: Golden, name: str) -> None:
    file = golden.checkpoint / name
    whole = bytearray(file.read_bytes())
    whole[whole.index(b"data.pkl") + 80] ^= 1
    file.write_bytes(whole)
    assert any(name in fault.message for fault in verified(golden.checkpoint).faults)
    file.unlink()
    assert any(file.name[:5] in fault.message for fault in verified(golden.checkpoint).faults)
    with sp.open(golden.checkpoint) as checkpoint:
        assert bits(checkpoint["row"].read()) == bits(golden.tensor("row")), "tensors can be read"


def test_leftovers_of_locks_are_not_read(golden: Golden) -> None:
    for name in (".zarray", "0.0", "shard_0_1.pt"):
        leftover = golden.checkpoint / "col.sync" / name
        leftover.parent.mkdir(exist_ok=True)
        leftover.write_bytes(b"")
    with sp.open(golden.checkpoint) as checkpoint:
        assert checkpoint.keys() == sorted([*golden.kinds, *golden.objects])


def test_an_empty_metadata_file_of_an_array_is_an_error(golden: Golden) -> None:
    (golden.checkpoint / "col" / ".zarray").write_bytes(b"")
    with pytest.raises(FormatError, match=r"col/\.zarray: it is not valid JSON"):
        sp.open(golden.checkpoint)


def test_a_save_that_did_not_finish_is_no_checkpoint(golden: Golden) -> None:
    (golden.checkpoint / "metadata.json").unlink()
    with pytest.raises(NotCommittedError, match="did not finish"):
        sp.open(golden.checkpoint, format="megatron_zarr")


def test_a_run_folder_opens_its_latest_iteration(golden: Golden, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(golden.checkpoint, run / "iter_0000040")
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.write_text("40\n")
    with sp.open(run) as checkpoint:
        assert checkpoint.step == 40
        assert checkpoint.location == str(run / "iter_0000040")
        assert bits(checkpoint["row"].read()) == bits(golden.tensor("row"))
    (run / "iter_0000040").rename(run / "release")
    tracker.write_text("release")
    assert sp.open(run).step == 10
    tracker.write_text("50")
    with pytest.raises(NotCommittedError, match="iter_0000050"):
        sp.open(run, format="megatron_zarr")
    for text in ("../elsewhere", "", "-1", "9" * 100, "\0"):
        tracker.write_text(text)
        with pytest.raises(FormatError, match=r"latest_checkpointed_iteration\.txt"):
            sp.open(run, format="megatron_zarr")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"sharded_backend": "torch_dist"}', '{"sharded_backend": 3}', "[" * 99999]
)
def test_other_metadata_is_not_recognized(golden: Golden, text: str) -> None:
    (golden.checkpoint / "metadata.json").write_text(text)
    with pytest.raises(ShardproofError):
        sp.open(golden.checkpoint)


def test_false_shapes_in_the_metadata_are_refused(golden: Golden) -> None:
    metadata = golden.checkpoint / "fc1" / ".zarray"
    array = json.loads(metadata.read_text())
    for shape in ([10**6, 10**6], [17, 3]):
        metadata.write_text(json.dumps({**array, "shape": shape}))
        with pytest.raises(ShardproofError, match="fc1"):
            sp.open(golden.checkpoint)["fc1"].read()


def common_state(golden: Golden, arguments: dict[str, bool], betas: tuple[float, ...] | None) -> None:
    """Adds arguments of the run to the common state, and sets the betas of all groups, or removes them."""
    path = golden.checkpoint / "common.pt"
    common = torch.load(path, weights_only=False)  # noqa: TID251 its own pickle
    vars(common["args"]).update(arguments)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        del group["betas"]
        group |= {} if betas is None else {"betas": betas}
    torch.save(common, path)


FLOAT32 = {"use_precision_aware_optimizer": False}
BETAS = (0.9, 0.999)


def lose(golden: Golden, key: str, first: int, last: int) -> str:
    """Replaces a flat range of the chunk of layer 1 by zeros, as a lost write does. Returns the chunk."""
    chunk = golden.checkpoint / key / "1.0"
    data = bytearray(chunk.read_bytes())
    data[4 * first : 4 * last] = bytes(4 * (last - first))
    chunk.write_bytes(data)
    return f"{key}/1.0"


@pytest.mark.parametrize("format_name", ["megatron_zarr", "torch_dist"])
def test_verify_names_ranges_that_a_save_lost(format_name: str, tmp_path: Path) -> None:
    """In main weights and second moments. The golden checkpoint itself has no fault."""
    golden = Golden("zarr_mc11_gpt_fsms_w2", tmp_path)
    common_state(golden, FLOAT32, BETAS)
    name = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert verified(golden.checkpoint).ok
    chunks = [lose(golden, f"optimizer.state.{slot}.{name}", 8, 24) for slot in ("fp32_param", "exp_avg_sq")]
    if format_name == "torch_dist":
        sp.convert(golden.checkpoint, tmp_path / "dist", to="torch_dist")
        golden.checkpoint = tmp_path / "dist"
    with sp.open(golden.checkpoint, format=format_name) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        progress: list[tuple[int, int]] = []
        report = verify_foreign(checkpoint, lambda *bytes_done: progress.append(bytes_done))
    faults = [fault.message for fault in report.faults]
    assert len(faults) == 2 and progress[-1][0] == progress[-1][1]
    for fault, other in zip(sorted(faults), (f"optimizer.state.exp_avg.{name}", name), strict=True):
        assert f"is 0 at 16 elements from [1, 8] to [1, 23], where {other} is not" in fault
    if format_name == "megatron_zarr":
        assert all(chunk in fault for chunk, fault in zip(sorted(chunks), sorted(faults), strict=True))


@pytest.mark.parametrize(
    ("arguments", "betas"),
    [
        pytest.param({}, BETAS, id="dtypes_unknown"),
        pytest.param({"use_precision_aware_optimizer": True}, BETAS, id="narrow_moments"),
        pytest.param(FLOAT32, None, id="betas_unknown"),
        pytest.param(FLOAT32, (0.9, 0.5), id="second_moments_decay_faster"),
    ],
)
def test_zeros_that_may_be_right_are_no_fault(
    arguments: dict[str, bool], betas: tuple[float, ...] | None, tmp_path: Path
) -> None:
    """First moments of rare rows, and second moments that underflow or a narrow dtype may have made 0."""
    golden = Golden("zarr_mc11_gpt_fsms_w2", tmp_path)
    common_state(golden, arguments, betas)
    name = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    lose(golden, f"optimizer.state.exp_avg_sq.{name}", 8, 24)
    lose(golden, f"optimizer.state.exp_avg.{name}", 0, 8)
    assert verified(golden.checkpoint).ok
