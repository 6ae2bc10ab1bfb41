"""Universal checkpoints of DeepSpeed: read to their bits, damage found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, StorageError
from shardproof.runs.maintenance import verify_foreign
from tests.unit.formats.peers import Golden, bits, check_tensors, damages_found
from tests.unit.formats.test_deepspeed import SHAPES, check, key_of
from tests.unit.formats.zero_files import write_universal, write_zero


def test_the_golden_checkpoint_reads_to_its_expected_bits(tmp_path: Path) -> None:
    golden = Golden("ds_zero2_universal_w2", tmp_path)
    for path in (golden.checkpoint, golden.checkpoint / "global_step2_universal"):
        with sp.open(path) as checkpoint:
            assert isinstance(checkpoint, ForeignCheckpoint)
            assert checkpoint.reader.name == "deepspeed_universal"
            check_tensors(golden.renamed(key_of), checkpoint)
            assert {key: checkpoint[key] for key in golden.objects} == golden.objects
            assert checkpoint["optimizer.param_groups.1.params"] == ["a.bias", "norm.weight", "norm.bias"]
            report = verify_foreign(checkpoint)
            assert report.ok and report.unproved == 0 < report.bytes


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_and_buffers_are_read_at_every_stage(stage: int, tmp_path: Path) -> None:
    check(tmp_path, write_universal(tmp_path, stage, SHAPES))


def test_a_universal_checkpoint_has_the_keys_of_its_source(tmp_path: Path) -> None:
    write_zero(tmp_path / "zero", 2, 2, SHAPES)
    write_universal(tmp_path / "universal", 2, SHAPES)
    with sp.open(tmp_path / "zero") as one, sp.open(tmp_path / "universal") as other:
        assert set(one.keys()) ^ set(other.keys()) == set()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["w/fp32", "w/exp_avg", "b/exp_avg_sq"])
def test_a_missing_or_cut_file_is_named(stage: int, name: str, tmp_path: Path) -> None:
    write_universal(tmp_path, stage, SHAPES)
    path = tmp_path / "step7" / "zero" / f"{name}.pt"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match=name):
        sp.open(tmp_path)
    path.unlink()
    with pytest.raises(StorageError, match=f"{name}.pt is missing"):
        sp.open(tmp_path)


def test_a_parameter_without_a_gradient_has_weights_only(tmp_path: Path) -> None:
    made = write_universal(tmp_path, 1, SHAPES)
    for path in (tmp_path / "step7" / "zero" / "w").glob("*.pt"):
        if path.stem != "fp32":
            path.unlink()
    with sp.open(tmp_path) as checkpoint:
        assert bits(checkpoint["fp32.w"].read()) == bits(made["fp32"]["w"])
        assert "optimizer.state.w.exp_avg" not in checkpoint


def test_a_file_of_another_shape_is_an_error(tmp_path: Path) -> None:
    write_universal(tmp_path, 1, SHAPES)
    torch.save({"param": torch.zeros(13)}, tmp_path / "step7" / "zero" / "w" / "fp32.pt")
    with pytest.raises(FormatError, match=r"has the shape \[13\], expected \[3, 4\]"):
        sp.open(tmp_path)


def test_after_model_parallelism_the_whole_parameters_are_read(tmp_path: Path) -> None:
    made = write_universal(tmp_path, 1, SHAPES)
    torch.save({"module": {}}, tmp_path / "step7" / "mp_rank_01_model_states.pt")
    with sp.open(tmp_path) as checkpoint:
        assert bits(checkpoint["fp32.w"].read()) == bits(made["fp32"]["w"])
        assert "module.w" not in checkpoint


def test_every_damaged_byte_is_found_or_harmless(tmp_path: Path) -> None:
    made = write_universal(tmp_path, 3, [{"w": (3, 4)}])
    files = (tmp_path / "step7").rglob("*.pt")
    assert damages_found(files, lambda _: check(tmp_path, made), every=101) > 10
