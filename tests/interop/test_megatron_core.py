"""Megatron-Core saves and loads with shardproof: layouts, kinds of entries, failures, asynchronous saves."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import shardproof as sp
from shardproof.commands.cli.group import run as run_cli
from tests.interop.peer import PeerFailed, PeerResult, assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]

ENVIRONMENTS = ["megatron", "megatron16"]
SECONDS = 300
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_topk": 2,
}
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
DP4 = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}


def train(
    environment: str, steps: list[Any], layout: dict[str, Any], *, nproc: int, **options: Any
) -> PeerResult:
    """Runs `megatron_train.py` with these steps."""
    arguments = [json.dumps([[name, str(at) if isinstance(at, Path) else at] for name, at in steps])]
    arguments += [json.dumps(layout), json.dumps(options)]
    return run_peer(environment, "megatron_train.py", *arguments, nproc=nproc, timeout=SECONDS)


def unit(case: str, folder: Path, environment: str = "megatron", nproc: int = 2) -> PeerResult:
    """Runs a case of `megatron_units.py`."""
    return run_peer(environment, "megatron_units.py", case, folder, nproc=nproc, timeout=SECONDS)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of any format, whole."""
    with sp.open(path) as checkpoint:
        return {record.key: checkpoint[record.key].read() for record in checkpoint.tensors}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_other_layouts_load_bit_for_bit(environment: str, tmp_path: Path) -> None:
    """TP 2 x PP 2 to DP 4 and back, with the distributed optimizer; Megatron's own saves are compared."""
    at = {name: tmp_path / name for name in ("first", "second", "own1", "own2", "own3", "on", "on_again")}
    steps = [("train", 2), ("save", at["first"]), ("reference", at["own1"]), ("train", 1)]
    train(environment, [*steps, ("reference", at["on"])], TP2_PP2, nproc=4)
    steps = [("load", at["first"]), ("save", at["second"]), ("reference", at["own2"])]
    train(environment, steps, DP4, nproc=4, seed=1)
    steps = [("load", at["second"]), ("reference", at["own3"]), ("train", 1), ("reference", at["on_again"])]
    train(environment, steps, TP2_PP2, nproc=4, seed=2)
    saved = tensors(at["own1"])
    assert "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight" in saved
    for name in ("first", "own2", "own3"):
        assert_same_tensors(tensors(at[name]), saved)
    assert_same_tensors(tensors(at["on_again"]), tensors(at["on"]))  # training goes on as if never stopped


def test_background_saves_have_the_state_of_their_call(tmp_path: Path) -> None:
    """Megatron's queue and `begin_save`, while the next step changes every weight."""
    at = {name: tmp_path / name for name in ("own1", "queued", "own2", "begun")}
    steps = [("train", 1), ("reference", at["own1"]), ("queue", at["queued"])]
    steps += [("reference", at["own2"]), ("begin", at["begun"])]
    train("megatron", steps, {**DP4, "kind": "dp_reshardable"}, nproc=2)
    others = [
        {key: value for key, value in tensors(at[name]).items() if not key.startswith("optimizer")}
        for name in at
    ]
    assert_same_tensors(others[1], others[0])
    assert_same_tensors(others[3], others[2])
    assert not torch.equal(
        others[1]["embedding.word_embeddings.weight"], others[3]["embedding.word_embeddings.weight"]
    )


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_kind_of_entry_comes_back(environment: str, tmp_path: Path) -> None:
    """ShardedTensor, ShardedObject, factory, local object, common state and content metadata."""
    assert unit("kinds", tmp_path / "step", environment).facts["keys"]
    with sp.open(tmp_path / "step") as checkpoint:
        assert "megatron-core" in checkpoint.provenance["versions"]
        assert checkpoint["common"]["args"] == {
            "backend": "FLASH",
            "lr": 3,
            "nested": {"depth": 2},
            "path": "a",
        }


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_own_functions_of_megatron_take_the_strategies(environment: str, tmp_path: Path) -> None:
    """Also in Megatron's wrappers, and its own checkpoints stay loadable."""
    assert "error" not in unit("own_functions", tmp_path / "own", environment).facts
    assert "error" not in unit("wrapped", tmp_path / "wrapped", environment).facts


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_empty_box_conflicts_with_nothing(environment: str, tmp_path: Path) -> None:
    """Two of three ranks have no element of a weight, or all ranks have none. Other splits load."""
    assert unit("empty", tmp_path / "step", environment, nproc=3).facts == {}
    for name in ("step-0", "step-1", "step-2", "step-own"):
        assert tensors(tmp_path / name)["bias"].tolist() == [0, 3, 6, 9, 12]


def test_saves_without_a_strategy_share_one(tmp_path: Path) -> None:
    facts = unit("default", tmp_path).facts
    assert facts["plans"] == [f"save {tmp_path}/a"]
    assert f"{tmp_path}/c" in facts["failure"] and "NoneType" in facts["failure"]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_rank_0_finds_the_format_for_all_ranks(environment: str, tmp_path: Path) -> None:
    """All ranks raise the error of a rank that cannot read the common state."""
    failure = unit("other_format", tmp_path / "step", environment).facts["failure"]
    assert "rank 1" in failure and "NoneType" in failure


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_save_returns_on_no_rank_before_the_files_for_megatron_exist(
    environment: str, tmp_path: Path
) -> None:
    """The failure to write them is therefore the answer to all ranks."""
    for failure in unit("unpublished", tmp_path / "step", environment).facts["failures"]:
        assert "committed, but rank 0 failed" in failure and "no room for common.pt" in failure


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_classes_and_functions_come_from_the_sharded_state_dict(environment: str, tmp_path: Path) -> None:
    """Others are an error, or stay with a warning."""
    errors = unit("code", tmp_path / "step", environment).facts["errors"]
    assert len(errors) == 2
    for error in errors:
        assert "rule is torch.optim.adamw.AdamW in the checkpoint, and torch.optim.adam.Adam here" in error
        assert "strict='log_all'" in error


def test_the_registry_of_016_finds_the_backend(tmp_path: Path) -> None:
    assert "manifest.json" in unit("named", tmp_path / "step", "megatron16").facts["files"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("two_mains", ["StructureError", "'twice', box [0:4]", "ranks 0 and 1"]),
        ("no_main", ["StructureError", "'never', box [0:4]", "no rank has the main replica", "ranks 0-1"]),
        ("strict", ["rank 1", "no 'new/shard_0_1'"]),
        ("padded", ["'norm' has the global shape [4]", "[5]"]),
    ],
)
def test_a_contradiction_is_an_error_on_all_ranks(case: str, expected: list[str], tmp_path: Path) -> None:
    """It names key and ranks, and is of Megatron's class and of torch's.

    Before it, the case asserts what works: all modes of `strict`, padding.
    """
    facts = unit(case, tmp_path / "step").facts
    assert [text for text in expected if text not in facts["error"]] == []
    assert facts["classes"] == ["CheckpointingException", "CheckpointException"]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_other_names_of_megatron_are_there(environment: str, tmp_path: Path) -> None:
    """Tensors are removed by the command that the error of `remove_sharded_tensors` names."""
    facts = unit("names", tmp_path / "step", environment).facts
    assert facts["error"].startswith("FormatError") and facts["classes"][0] == "CheckpointingException"
    command = facts["error"].rpartition(": ")[2].replace("DST", f"{tmp_path}/without")
    assert run_cli(shlex.split(command.removeprefix("shardproof "))) == 0
    assert unit("without_stack", tmp_path / "without", environment).facts == {}


def test_a_killed_rank_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """Rank 1 is killed while it writes over a checkpoint. `verify_integrity` finds a flipped bit of that."""
    unit("kinds", tmp_path / "step")
    with pytest.raises(PeerFailed, match="exit code -9"):
        unit("killed", tmp_path / "step")
    assert "error" not in unit("load_only", tmp_path / "step").facts
    error = unit("damaged", tmp_path / "step").facts["error"]
    assert "CorruptChunkError" in error


def test_the_example_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """It trains on TP 2 x DP 2, is killed after step 5, and goes on from step 4 as DP 2."""
    example = Path(__file__).parents[2] / "examples" / "megatron.py"
    assert len(example.read_text().splitlines()) <= 40

    def run(kill_at: int, folder: Path, steps: int, tp: int, nproc: int) -> dict[str, str]:
        arguments = (example, kill_at, folder, steps, tp)
        found = run_peer("megatron", "run_megatron_example.py", *arguments, nproc=nproc, timeout=SECONDS)
        return dict(found.facts["losses"])

    with pytest.raises(PeerFailed, match="exit code -9"):
        run(5, tmp_path / "run", 8, 2, 4)
    resumed = run(0, tmp_path / "run", 6, 1, 2)
    assert sorted(resumed) == ["5", "6"]
    again = run(0, tmp_path / "run", 8, 1, 2)  # from step 6
    assert sorted(again) == ["7", "8"]
    with sp.open(tmp_path / "run" / "iter_0000004") as checkpoint:
        assert checkpoint.step == 4 and checkpoint["common"]["step"] == 4
        groups = {"tensor": 2, "pipeline": 1, "context": 1, "expert": 1, "data": 2}
        assert checkpoint.provenance["layout"] == {"megatron": groups}


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param({**DP4, "tensor_model_parallel_size": 2}, 4, id="tensor"),
        pytest.param(
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            2,
            id="virtual_stages",
        ),
    ],
)
def test_live_state_is_what_megatron_gathers(layout: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """`live_state` gives the bits of Megatron's `fully_reshardable`, which load at DP 2, and come back.

    It saves the list of wrapped chunks as Megatron's training has it, and loads into the models inside.
    """
    at = {name: tmp_path / name for name in ("own", "ours", "loaded", "back")}
    steps = [("train", 2), ("reference", at["own"]), ("save_live", at["ours"])]
    steps += [("train", 1), ("load_live", at["ours"]), ("reference", at["back"])]
    train("megatron", steps, layout, nproc=ranks)
    train("megatron", [("load_live", at["ours"]), ("reference", at["loaded"])], DP4, nproc=2, seed=3)
    saved = tensors(at["own"])
    for name in ("ours", "loaded", "back"):
        assert_same_tensors(tensors(at[name]), saved)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_live_state_refuses_an_optimizer_whose_state_it_would_not_store(environment: str) -> None:
    """The errors name the slots, and what to use."""
    errors = train(environment, [("train", 1), ("refuse", "")], DP4, nproc=2).facts["errors"]
    slots = {
        "precision_aware": "'master_param'",
        "slot": "slots master_param",
        "steps": "numbers of steps: 0, 1",
    }
    chunks = errors.pop("chunks"), errors.pop("no_chunk")
    assert "1 in the state (model), and 2 in the call (model0, model1)" in chunks[0]
    assert "the list of the model's chunks is empty" in chunks[1]
    slots["options"] = "options of 2 optimizers, which differ, and this run has 1"
    assert errors.keys() == slots.keys()
    for case, slot in slots.items():
        instead = "as many expert parallel ranks" if case == "options" else "sharded_state_dict of Megatron"
        assert re.search(slot, errors[case]) and instead in errors[case]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_optimizer_whose_state_dict_lacks_its_moments_is_refused(environment: str, tmp_path: Path) -> None:
    """It would store the options alone, as torch's `dcp.save` does. The error's advice works."""
    at = {name: tmp_path / name for name in ("bare", "live", "torch")}
    steps = [("train", 1), ("bare", at["bare"]), ("save_live", at["live"]), ("by_torch", at["torch"])]
    errors = train(environment, steps, DP4, nproc=2).facts["errors"]
    theirs = FileSystemReader(at["torch"]).read_metadata().state_dict_metadata
    assert [key for key in theirs if "param_groups" in key]
    assert not [key for key in theirs if "exp_avg" in key]
    assert errors.keys() == {"itself", "named", "dcp"}
    for error in errors.values():
        assert "state_dict() lacks that part" in error and "save `live_state(model, optimizer)`" in error
    assert [key for key in tensors(at["live"]) if key.startswith("optimizer.state.exp_avg.")]


@pytest.mark.parametrize("environment", ["megatron11", "megatron16", "megatron"])
def test_every_release_says_which_ranks_divide_a_model(environment: str, tmp_path: Path) -> None:
    facts = run_peer(environment, "megatron_parallel_state.py", tmp_path, nproc=2).facts
    assert (tmp_path / "whole" / "manifest.json").is_file()
    assert "among 2 tensor parallel ranks" in facts["error"]


@pytest.mark.parametrize(
    ("layout", "options", "declaration"),
    [
        pytest.param({"tensor_model_parallel_size": 2}, {}, "fused or swiglu", id="tensor"),
        pytest.param(EP2, EXPERTS, "experts.sequential", id="expert"),
        pytest.param({"pipeline_model_parallel_size": 2}, {}, "layers", id="pipeline"),
    ],
)
def test_a_model_of_which_the_ranks_have_parts_is_refused(
    layout: dict[str, Any], options: dict[str, Any], declaration: str, tmp_path: Path
) -> None:
    """A save would store the part of one rank under a key, as torch's does. What the error advises works.

    The tensors of a `state_dict()` have no marks, and are recognised by the memory of the model. A rank that
    saves alone may save its part. Copies are not recognised, and `check_replicas` finds them.
    """
    at = {name: tmp_path / name for name in ("declared", "live", "one", "whole")}
    steps = [("train", 1), ("bare", tmp_path / "bare"), ("mixed", tmp_path / "torch")]
    steps += [("sharded", tmp_path / "sharded"), ("per_rank", tmp_path / "own")]
    steps += [("copies", tmp_path / "run"), ("save_live", at["live"]), ("declared", at["declared"])]
    facts = train("megatron", steps, layout, nproc=2, **options).facts
    assert all(facts["other"])  # torch wrote parts of each rank
    divided = sorted({f"model.{name}" for names in facts["other"] for name in names})
    if declaration != "layers":  # the ranks have other names, too
        assert facts["differing"] == divided
    assert facts["differing"]
    others = {"itself", "named", "dcp"}  # the optimizers
    values = {"model", "state_dict", "kept", "object"}
    values |= {f"dcp_{name}" for name in values} | {"torch"}  # torch's save with `ShardproofWriter`
    assert facts["errors"].keys() == others | values | {"chosen", "dcp_declared", "loaded"}
    if declaration == "layers":  # the keys of a list have no numbers of layers, and here other shapes
        assert "rank 1 declares" in facts["errors"].pop("chosen")
    assert "shardproof.layouts declares" in facts["errors"].pop("dcp_declared")
    error = facts["errors"].pop("loaded")
    if declaration == "experts.sequential":  # the checkpoint stacks the experts under keys of its own
        assert "does not fit the state" in error and "experts" in error
    else:
        assert "model." in error and "this rank's part of a model" in error
    for name in facts["errors"].keys() - others:
        error = facts["errors"][name]
        assert f"declare the part of this rank: shardproof.layouts.{declaration}" in error, name
        assert f": {name.removeprefix('dcp_')}." in error  # the key
    steps = [("load_live", at["live"]), ("save_live", at["one"]), ("declared", at["whole"])]
    train("megatron", steps, {}, nproc=1, seed=1, **options)
    assert_same_tensors(tensors(at["one"]), tensors(at["live"]))
    whole, found = tensors(at["whole"]), tensors(at["declared"])
    found.pop("model.output_layer.weight", None)  # the last stage's copy of the embedding
    whole.pop("model.output_layer.weight", None)
    assert_same_tensors(found, whole)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_ranks_with_the_same_part_save_it_as_replicas(environment: str, tmp_path: Path) -> None:
    """The data parallel ranks of each tensor parallel rank, into a folder of their own."""
    steps = [("replicas", tmp_path / "part")]
    errors = train(environment, steps, {"tensor_model_parallel_size": 2}, nproc=4).facts["errors"]
    assert errors.keys() == {
        *("saved", "loaded", "torch_saved", "torch_loaded"),
        "fsdp2",  # FSDP2 shards over the data parallel ranks alone
    }
    assert all("divides among 2 tensor parallel ranks" in error for error in errors.values())


def test_the_page_shows_lines_of_the_example() -> None:
    """The added line of its diff, and each name that it calls, are those of the adapter and its example."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "frameworks" / "megatron_core.md").read_text()
    example = (root / "examples" / "megatron.py").read_text()
    added = [line[1:] for line in page.splitlines() if line.startswith("+")]
    assert added == ["from shardproof.frameworks import megatron_core as dist_checkpointing"]
    assert added[0] in example.splitlines()
