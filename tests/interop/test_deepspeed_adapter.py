"""Released DeepSpeed saves and loads through `shardproof.frameworks.deepspeed`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.interop.peer import PeerFailed, PeerResult, assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.processes]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_zero.py"
DTYPES = ("float32", "bfloat16", "float16")
CASES = [f"{stage}-{dtype}:{stage}:{dtype}" for stage in (1, 2, 3) for dtype in DTYPES]
CASES += [f"{stage}-offload:{stage}:offload" for stage in (1, 3)]


def at_next_stage(case: str, by: int = 1) -> str:
    name, stage, dtype = case.split(":")
    return f"{name}:{(int(stage) - 1 + by) % 3 + 1}:{dtype}"


def train(mode: str, folder: Path, cases: list[str], nproc: int) -> PeerResult:
    return run_peer("deepspeed", "train_deepspeed.py", mode, folder, *cases, nproc=nproc, timeout=200)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeerResult]:
    """Checkpoints of three ranks at every stage, and the state that the ranks had."""
    folder = tmp_path_factory.mktemp("deepspeed")
    before = train("save", folder, CASES, nproc=3)
    for case in CASES:
        facts = before.facts[case.split(":")[0]]
        assert facts["steps"] == [3.0] and facts["counts"] == [3, 18, 0, 3]
    assert before.facts["3-float16"]["scale"] == 128.0  # the scaler began at 64
    return folder, before


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_stage_loads_into_another_on_fewer_ranks(saved: tuple[Path, PeerResult], ranks: int) -> None:
    """Parameters, masters, moments, steps, scheduler, scaler and counts. One save overlaps the next steps."""
    folder, before = saved
    after = train("load", folder, [at_next_stage(case, ranks) for case in CASES], nproc=ranks)
    assert_same_tensors(after.tensors, before.tensors)
    for name in (case.split(":")[0] for case in CASES):
        assert after.facts[f"{name}.output"], "the next forward pass does not use the loaded weights"
        assert after.facts[name] == before.facts[name]


def test_checkpoints_of_deepspeed_load_at_another_stage_and_on_other_ranks(
    saved: tuple[Path, PeerResult],
) -> None:
    folder, before = saved
    after = train("load_files", folder, [at_next_stage(case) for case in CASES], nproc=2)
    assert_same_tensors(after.tensors, before.tensors)

    def stored(facts: dict[str, Any]) -> dict[str, Any]:
        return facts | {"counts": facts["counts"][:3]}  # DeepSpeed does not store micro_steps

    for name in (case.split(":")[0] for case in CASES):
        assert stored(after.facts[name]) == stored(before.facts[name])


def test_through_fsdp2_and_back(saved: tuple[Path, PeerResult]) -> None:
    folder, before = saved
    cases = ["3-bfloat16:2:bfloat16", "1-float32:3:float32"]
    after = train("through_fsdp2", folder, cases, nproc=2)
    names = tuple(case.split(":")[0] + "." for case in cases)
    assert_same_tensors(
        after.tensors, {key: tensor for key, tensor in before.tensors.items() if key.startswith(names)}
    )


def test_masters_follow_a_load_of_the_model_alone(saved: tuple[Path, PeerResult]) -> None:
    folder, before = saved
    after = train("model_alone", folder, ["1-bfloat16:2:bfloat16", "3-bfloat16:3:bfloat16"], nproc=2)
    for name in ("1-bfloat16", "3-bfloat16"):
        weight = before.tensors[f"{name}.model.a.weight"]
        assert torch.equal(after.tensors[f"{name}.model.a.weight"], weight)
        assert torch.equal(after.tensors[f"{name}.optimizer.a.weight.master"].bfloat16(), weight)


def test_wrong_use_says_what_to_change(tmp_path: Path) -> None:
    errors = train("wrong", tmp_path, ["x:2:float32"], nproc=2).facts
    assert '"zero_optimization": {"stage": 1}' in errors["x.0"]
    assert re.search(r"step .*1.* for .* and .*5.* for b\.weight.*separate groups", errors["x.1"])


def test_a_zero_optimizer_without_its_engine_is_refused(tmp_path: Path) -> None:
    """Its `state_dict` has the partitions of one rank. What the errors advise saves all of them."""
    errors = train("bare", tmp_path, ["1:1:bfloat16", "2:2:float32", "3:3:bfloat16"], nproc=2).facts
    assert errors.keys() == {f"{stage}.{way}" for stage in "123" for way in ("itself", "named", "dcp")}
    for error in errors.values():
        assert "state_dict() has the part of one rank" in error
        assert "`engine_state(engine)` of shardproof.frameworks.deepspeed" in error
        assert "`save_checkpoint(engine, folder)`" in error
    for saved in [f"{stage}-{way}" for stage in "123" for way in ("state", "run/global_step1")]:
        with sp.open(tmp_path / saved) as checkpoint:
            moment = checkpoint["optimizer.a.weight.exp_avg"].read()
            assert moment.shape == checkpoint["model.a.weight"].shape and moment.count_nonzero()


def test_a_tag_that_latest_does_not_name_is_saved_again(tmp_path: Path) -> None:
    """If rank 0 cannot replace ``latest``, every rank raises its error."""
    error = train("again", tmp_path, ["x:1:float32"], nproc=2).facts["x"]
    assert "rank 0" in error and f"{tmp_path / 'x' / 'latest'}" in error


def test_rank_0_finds_the_format_for_all_ranks(tmp_path: Path) -> None:
    error = train("other_format", tmp_path, ["x:1:float32"], nproc=2).facts["x"]
    assert f"{tmp_path / 'x' / 'nothing'}" in error


def test_files_that_one_rank_cannot_open_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    error = train("unreadable", tmp_path, ["x:1:float32"], nproc=2).facts["x"]
    assert "phase open: rank 1 of 2 failed" in error


def test_an_error_between_two_meetings_of_a_load_is_raised_by_every_rank(tmp_path: Path) -> None:
    """At once, and not after the deadline."""
    match, finish = train("unfit", tmp_path, ["x:1:float32"], nproc=2).facts["x"]
    assert "phase match: rank 1 of 2 failed" in match and "no memory for a slot" in match
    assert "phase finish: rank 1 of 2 failed" in finish and "no memory for a slot" in finish


def test_the_example_is_killed_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(PeerFailed, match="exit code -9"):
        run_peer("deepspeed", "run_sharded_example.py", EXAMPLE, 4, run, 6, nproc=3)
    committed = int((run / "latest").read_text().removeprefix("global_step"))
    assert committed in (3, 4)  # one rank may have ended before rank 0 wrote `latest`
    assert sp.open(run / f"global_step{committed}").step == committed
    resumed = run_peer("deepspeed", "run_sharded_example.py", EXAMPLE, 0, run, 6, nproc=2)
    lines = resumed.facts["lines"]
    assert f"'tokens': {committed * 12}" in resumed.facts["other"][0]
    assert [int(line.split()[1]) for line in lines] == list(range(committed + 1, 7))
    rates = [float(line.split()[-1]) for line in lines]
    assert rates == [round(1e-4 * (int(line.split()[1]) - 1), 6) for line in lines]  # the warmup goes on


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40


@pytest.mark.parametrize("page", ["deepspeed", "megatron_fsdp"])
def test_the_added_lines_of_a_page_are_those_of_its_example(page: str) -> None:
    root = EXAMPLE.parents[1]
    name = {"deepspeed": "deepspeed_zero"}.get(page, page)
    example = [line.strip() for line in (root / "examples" / f"{name}.py").read_text().splitlines()]
    text = (root / "docs" / "frameworks" / f"{page}.md").read_text()
    diff = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)[
        0
    ]  # the others are other ways than the example's
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and line[1:].strip()]
    assert added and [line for line in added if line not in example] == []


def test_after_a_load_state_is_linked_by_the_first_step_or_by_the_call_that_the_page_names(
    tmp_path: Path,
) -> None:
    """DeepSpeed's own load leaves the same gap before the first step."""
    cases = ["one:1:float32", "two:2:bfloat16"]
    facts = train("before_a_step", tmp_path, cases, nproc=2).facts
    not_linked = "argument of type 'NoneType' is not iterable"
    for name in ("one", "two"):
        assert facts[f"{name}.ours"] == facts[f"{name}.theirs"] == not_linked
        assert facts[f"{name}.ours.linked"] == facts[f"{name}.theirs.linked"] > 0
    page = (EXAMPLE.parents[1] / "docs" / "frameworks" / "deepspeed.md").read_text()
    assert "`engine.optimizer._lazy_init_hp_params_optimizer_state()`" in page


def test_another_folder_of_extensions_has_no_lock_of_a_killed_rank(tmp_path: Path) -> None:
    """The remedy that the page names. The wait and the compilation are replaced."""
    facts = run_peer("deepspeed", "deepspeed_lock.py", tmp_path).facts
    assert facts == {"first": "compile", "killed": True, "elsewhere": True}
    page = (EXAMPLE.parents[1] / "docs" / "frameworks" / "deepspeed.md").read_text()
    assert "`TORCH_EXTENSIONS_DIR`" in page
