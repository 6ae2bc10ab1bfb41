"""Checkpoints of DeepSpeed with ZeRO: flat partitions merged into parameters, damage found, nothing run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, NotCommittedError, PlainDataError, StorageError
from shardproof.runs.maintenance import VerifyReport, verify_foreign
from tests.unit.formats.peers import Golden, bits, check_tensors, damages_found
from tests.unit.formats.zero_files import FragmentAddress, write_zero

SHAPES = [{"w": (3, 4), "b": (5,)}, {"v": (2, 3, 3), "scalar": ()}]


def key_of(expected: str) -> str:
    kind, _, name = expected.partition(":")
    return f"fp32.{name}" if kind == "fp32" else f"optimizer.state.{name}.{kind}"


@pytest.mark.parametrize("name", ["ds_zero2_bf16_w2", "ds_zero3_w3"])
def test_golden_checkpoints_read_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    for path in (golden.checkpoint, golden.checkpoint / "global_step2"):
        with sp.open(path) as checkpoint:
            assert isinstance(checkpoint, ForeignCheckpoint)
            assert checkpoint.reader.name == "deepspeed"
            check_tensors(golden.renamed(key_of), checkpoint)
            assert {key: checkpoint[key] for key in golden.objects} == golden.objects
            report = verify_foreign(checkpoint)
            assert report.ok and report.unproved == 0 < report.bytes


def test_weights_in_the_dtype_of_training_and_values_of_the_optimizer_are_read(tmp_path: Path) -> None:
    with sp.open(Golden("ds_zero2_bf16_w2", tmp_path).checkpoint) as checkpoint:
        master = checkpoint["fp32.a.weight"].read()
        assert bits(checkpoint["module.a.weight"].read()) == bits(master.bfloat16())
        assert checkpoint["optimizer.state.b.weight.step"].read().item() == 2
        assert checkpoint["optimizer.param_groups.0.params"] == ["a.weight", "b.weight"]
        assert checkpoint["optimizer.zero_stage"] == 2
        assert checkpoint["optimizer.loss_scaler.cur_scale"] == 1.0
        assert (checkpoint.step, checkpoint.world_size) == (2, 2)


def check(folder: Path, made: dict[str, dict[str, torch.Tensor]]) -> None:
    with sp.open(folder) as checkpoint:
        for name, tensor in made["fp32"].items():
            assert bits(checkpoint[f"fp32.{name}"].read()) == bits(tensor), name
        for state in ("exp_avg", "exp_avg_sq"):
            for name, tensor in made[state].items():
                assert bits(checkpoint[f"optimizer.state.{name}.{state}"].read()) == bits(tensor), name


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stage=st.integers(1, 3),
    world_size=st.integers(1, 5),
    groups=st.lists(
        st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    mapped=st.booleans(),
)
def test_partitions_are_merged_without_their_padding(
    stage: int, world_size: int, groups: list[list[list[int]]], mapped: bool, tmp_path: Path
) -> None:
    shapes = [
        {f"p{row}.{at}": tuple(shape) for at, shape in enumerate(group)} for row, group in enumerate(groups)
    ]
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    made = write_zero(folder, stage, world_size, shapes, mapped=mapped)
    check(folder, made)
    with sp.open(folder) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        assert verify_foreign(checkpoint).ok


@pytest.mark.parametrize("stage", [1, 3])
def test_a_load_fills_a_model_in_fp32(stage: int, tmp_path: Path) -> None:
    made = write_zero(tmp_path, stage, 3, SHAPES)
    target = {"fp32": {name: torch.zeros_like(tensor) for name, tensor in made["fp32"].items()}}
    sp.load(tmp_path, target, include="fp32.*")
    for name, tensor in made["fp32"].items():
        assert bits(target["fp32"][name]) == bits(tensor), name


def test_client_state_keeps_tensors_in_tuples(tmp_path: Path) -> None:
    write_zero(tmp_path, 1, 2, SHAPES)
    with sp.open(tmp_path) as checkpoint:
        generator, number = checkpoint["client.generator"]
        assert (generator.tolist(), number, checkpoint["client.epoch"]) == ([0, 1, 2, 3], 1, 3)


def optimizer_file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def changed(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    """Rewrites a file of the tag folder."""
    path = folder / "step7" / name
    states = torch.load(path, weights_only=False)  # noqa: TID251 to damage it
    change(states)
    torch.save(states, path)


def verified(folder: Path) -> VerifyReport:
    with sp.open(folder, format="deepspeed") as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return verify_foreign(checkpoint)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_missing_file_of_a_rank_is_named(stage: int, tmp_path: Path) -> None:
    write_zero(tmp_path, stage, 3, SHAPES)
    names = [optimizer_file(1), optimizer_file(2)]
    names += ["zero_pp_rank_2_mp_rank_00_model_states.pt"] if stage == 3 else []
    for name in names:
        path = tmp_path / "step7" / name
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(StorageError, match=name):
            sp.open(tmp_path)
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(FormatError, match=name):
            sp.open(tmp_path)
        path.write_bytes(data)
    for path in (tmp_path / "step7").glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(StorageError, match=optimizer_file(0)):
        sp.open(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_another_run_are_named(stage: int, tmp_path: Path) -> None:
    write_zero(tmp_path / "three", stage, 3, SHAPES)
    write_zero(tmp_path / "two", stage, 2, SHAPES)
    stale, there = (tmp_path / folder / "step7" for folder in ("three", "two"))
    shutil.copy(stale / optimizer_file(2), there)
    with pytest.raises(FormatError, match=f"{optimizer_file(2)}.*belongs to none of them"):
        sp.open(tmp_path / "two")
    (there / optimizer_file(2)).unlink()
    shutil.copy(stale / optimizer_file(1), there)
    with pytest.raises(FormatError, match=f"{optimizer_file(1)}.*3 partitions, expected 2"):
        sp.open(tmp_path / "two")


def test_a_rank_that_saved_another_step_is_found_by_verify(tmp_path: Path) -> None:
    def earlier(states: Any) -> None:
        for state in states["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] -= 1

    write_zero(tmp_path, 2, 2, SHAPES)
    assert verified(tmp_path).ok
    changed(tmp_path, optimizer_file(1), earlier)
    assert any("of another save" in fault.message for fault in verified(tmp_path).faults)


def overlap(states: Any) -> None:
    mapping = states["optimizer_state_dict"]["param_slice_mappings"][0]
    mapping["w"] = FragmentAddress(0, 12)
    mapping["b"] = FragmentAddress(11, 5)


def hole(states: Any) -> None:
    states["optimizer_state_dict"]["param_slice_mappings"][0]["w"].numel -= 1


def unknown_parameter(states: Any) -> None:
    states["optimizer_state_dict"]["param_slice_mappings"][0]["u"] = FragmentAddress(0, 0)


def behind(states: Any) -> None:
    states["optimizer_state_dict"]["param_slice_mappings"][0]["w"].start += 1000


def before(states: Any) -> None:
    states["optimizer_state_dict"]["param_slice_mappings"][0]["w"].start = -3


def shorter(states: Any) -> None:
    groups = states["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:3].clone()


def fewer(states: Any) -> None:
    states["optimizer_state_dict"]["single_partition_of_fp32_groups"].pop()


def without_moment(states: Any) -> None:
    del states["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]


def no_partition(states: Any) -> None:
    del states["optimizer_state_dict"]


def strided(states: Any) -> None:
    groups = states["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = torch.arange(1000.0)[::2]


def other_dtype(states: Any) -> None:
    groups = states["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0].double()


def text(states: Any) -> None:
    states["optimizer_state_dict"]["param_slice_mappings"][0]["w"] = "0:3"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (overlap, "w and b overlap"),
        (hole, "w has 11 elements in the partitions of all ranks, expected 12"),
        (unknown_parameter, "slice of u"),
        (behind, "the flat tensor of group 0 has"),
        (before, "the flat tensor of group 0 has"),
        (shorter, "the flat tensor of group 0 has 3 elements"),
        (fewer, "groups"),
        (without_moment, "exp_avg"),
        (no_partition, "no optimizer_state_dict"),
        (strided, "do not lie one after the other"),
        (other_dtype, "several dtypes"),
        (text, "the slice of w"),
    ],
)
def test_partitions_that_do_not_fit_are_errors(
    change: Callable[[Any], None], found: str, tmp_path: Path
) -> None:
    write_zero(tmp_path, 2, 2, [{"w": (3, 4), "b": (14,)}])
    changed(tmp_path, optimizer_file(0 if change is not without_moment else 1), change)
    with pytest.raises(FormatError, match=found):
        sp.open(tmp_path)


def test_shapes_that_do_not_fit_the_parts_of_stage_3_are_errors(tmp_path: Path) -> None:
    def grow(states: Any) -> None:
        states["param_shapes"][0]["w"] = torch.Size([300, 400])

    def without_frozen(states: Any) -> None:
        states["frozen_param_fragments"].clear()

    def short_frozen(states: Any) -> None:
        states["frozen_param_fragments"]["frozen"] = torch.zeros(1)

    write_zero(tmp_path, 3, 2, SHAPES)
    first, second = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2))
    data = {name: (tmp_path / "step7" / name).read_bytes() for name in (first, second)}
    for name, change, found in (
        (first, grow, "each rank has"),
        (second, without_frozen, "frozen parameter frozen is missing"),
        (second, short_frozen, "has 1 elements"),
    ):
        changed(tmp_path, name, change)
        with pytest.raises(FormatError, match=found):
            sp.open(tmp_path)
        (tmp_path / "step7" / name).write_bytes(data[name])
    sp.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mp_rank_01_model_states.pt", "model parallelism"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "model parallelism"),
        ("layer_00-model_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture of experts"),
    ],
)
def test_parallel_engines_are_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    write_zero(tmp_path, 1, 2, SHAPES)
    torch.save({}, tmp_path / "step7" / name)
    with pytest.raises(FormatError, match=f"{name}.*{kind}.*ds_to_universal"):
        sp.open(tmp_path)


@pytest.mark.parametrize("tag", ["../step7", "/etc", "", "a\0b", "."])
def test_tags_that_lead_out_are_refused(tag: str, tmp_path: Path) -> None:
    write_zero(tmp_path / "run", 1, 1, SHAPES)
    (tmp_path / "run" / "latest").write_text(tag)
    with pytest.raises(FormatError, match="names no folder"):
        sp.open(tmp_path / "run", format="deepspeed")


def test_a_save_that_did_not_finish_is_an_error(tmp_path: Path) -> None:
    write_zero(tmp_path, 1, 1, SHAPES)
    (tmp_path / "latest").write_text("step8")
    with pytest.raises(NotCommittedError, match="did not finish"):
        sp.open(tmp_path, format="deepspeed")


def test_every_damaged_byte_is_found_or_harmless(tmp_path: Path) -> None:
    made = write_zero(tmp_path, 2, 2, SHAPES)
    files = (tmp_path / "step7").iterdir()
    assert damages_found(files, lambda _: check(tmp_path, made), every=101) > 20


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


def test_pickles_that_would_run_code_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def harm(states: Any) -> None:
        states["evil"] = Evil()
        states["module"]["evil"] = Evil()

    made = write_zero(tmp_path / "run", 1, 2, SHAPES)
    changed(tmp_path / "run", "mp_rank_00_model_states.pt", harm)
    monkeypatch.chdir(tmp_path)
    check(tmp_path / "run", made)
    assert verified(tmp_path / "run").ok
    with pytest.raises(PlainDataError, match="posix.mkdir"):
        _ = sp.open(tmp_path / "run")["evil"]
    assert not (tmp_path / "owned").exists()
    with sp.open(tmp_path / "run", trust_pickle=True) as checkpoint, pytest.raises(FileExistsError):
        _ = checkpoint["evil"]  # trusted, torch runs it twice
