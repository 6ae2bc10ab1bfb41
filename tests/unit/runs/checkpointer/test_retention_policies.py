"""Retention policies, pins, and the steps that `restore` can select."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardproof as sp
from shardproof.commands.cli.group import run as run_command
from shardproof.runs.checkpointer import plan_prune, prune
from shardproof.runs.checkpointer.retention import StepFacts
from shardproof.storage import LocalStorage


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((100,), float(value))}


def saved(step: int, time: float = 0.0, **metadata: Any) -> sp.SavedStep:
    return sp.SavedStep(step, lambda: (time, metadata))


def run(root: Path, keep: sp.Retention | None, losses: dict[int, Any]) -> sp.Checkpointer:
    checkpointer = sp.Checkpointer(root, keep=keep)
    for step, loss in losses.items():
        checkpointer.save(step, state(step), metadata={} if loss is None else {"loss": loss}).result()
    return checkpointer


def test_hours_keep_the_first_step_of_each_period() -> None:
    steps = [saved(10 * hour, hour * 3600.0) for hour in (0, 1, 5, 23, 24, 30, 49)]
    assert sp.KeepEvery(hours=24).select(steps) == {0, 240, 490}
    assert sp.KeepEvery(steps=50, hours=24).select(steps) == {0, 50, 240, 300, 490}


def test_a_clock_that_was_set_back_drops_no_steps() -> None:
    """Step 1 has a time 100 hours ahead. The others are 30 hours apart."""
    times = {1: 100.0, 2: 0.0, 3: 30.0, 4: 31.0, 5: 60.0}
    steps = [saved(step, hours * 3600) for step, hours in times.items()]
    assert sp.KeepEvery(hours=24).select(steps) == {1, 2, 3, 5}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.1, 100))
def test_a_step_that_hours_keep_stays_when_later_steps_come(times: list[float], hours: float) -> None:
    """The policy never needs a step that it gave up: pruning after each save keeps what one pass keeps."""
    policy = sp.KeepEvery(hours=hours)
    present: list[sp.SavedStep] = []
    for number, time in enumerate(sorted(times)):
        present.append(saved(number, time))
        kept = policy.select(present)
        present = [step for step in present if step in kept or step == number]
    everything = [saved(number, time) for number, time in enumerate(sorted(times))]
    assert policy.select(present) == policy.select(everything)


@pytest.mark.parametrize(("mode", "expected"), [("min", {3, 4}), ("max", {1, 6})])
def test_the_best_steps_have_a_finite_number(mode: Any, expected: set[int]) -> None:
    values = {1: 0.9, 2: 0.5, 3: 0.1, 4: 0.1, 5: math.nan, 6: 0.7, 7: True, 8: "0.0", 9: -math.inf}
    steps = [saved(step, loss=value) for step, value in values.items()]
    assert sp.KeepBest("loss", 2, mode).select([*steps, saved(10)]) == expected
    assert sp.KeepBest("loss", 1, "min").select(steps) == {4}, "the newer of equal ones"


@pytest.mark.parametrize("value", [None, math.nan, "0.5", [0.1, 0.2]], ids=str)
@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (sp.KeepBest("val_loss"), [1, 2, 3, 4]),
        (sp.KeepBest("val_loss") | sp.KeepLatest(2), [1, 2, 3, 4]),
        (sp.KeepBest("val_loss") & sp.KeepLatest(2), [3, 4]),
    ],
    ids=str,
)
def test_a_metric_that_no_step_has_loses_no_step(
    keep: sp.Retention, expected: list[int], value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The saves have another number, and none, or no finite one, of the policy's metric."""
    checkpointer = sp.Checkpointer(tmp_path, keep=keep)
    with caplog.at_level(logging.WARNING, "shardproof"):
        for step in (1, 2, 3, 4):
            metadata = {"loss": 1.0 / step} | ({} if value is None else {"val_loss": value})
            checkpointer.save(step, state(step), metadata=metadata).result()
    assert checkpointer.steps() == expected
    (warning,) = [text for text in caplog.messages if "KeepBest" in text]
    assert "step 1 have no finite number 'val_loss'" in warning and "'loss'" in warning


def test_steps_without_the_metric_go_once_a_step_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first validation comes after two saves. A save with the metric warns of nothing."""
    with caplog.at_level(logging.WARNING, "shardproof"):
        run(tmp_path / "all", sp.KeepBest("loss"), {1: 0.5, 2: 0.3})
        assert not caplog.messages
        checkpointer = run(tmp_path / "some", sp.KeepBest("loss"), {1: None, 2: None, 3: 0.5})
    assert checkpointer.steps() == [3]
    assert "but no value" in caplog.text


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "'loss' is nan"), ("0.5", "'loss' is the text '0.5'"), (None, "'loss' is None")],
)
def test_a_metric_that_is_no_number_is_shown(
    value: Any, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepBest("loss"))
    with caplog.at_level(logging.WARNING, "shardproof"):
        checkpointer.save(1, state(1), metadata={"epoch": 1, "loss": value}).result()
    assert f"no finite number 'loss', which KeepBest needs, but 'epoch', and {text}. KeepBest" in caplog.text


def test_a_metric_of_the_second_tier_is_checked_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    checkpointer = sp.Checkpointer(near, second_tier=sp.SecondTier(far, keep=sp.KeepBest("typo")))
    with caplog.at_level(logging.WARNING, "shardproof"):
        for step in (1, 2, 3):
            checkpointer.save(step, state(step), metadata={"loss": 0.5}).durable(60)
    assert sp.Checkpointer(far).steps() == [1, 2, 3]
    assert "no finite number 'typo'" in caplog.text


@pytest.mark.parametrize("make", [np.float32, torch.tensor, float], ids=["numpy", "torch", "float"])
def test_a_metric_may_be_a_scalar_of_numpy_or_torch(make: Any, tmp_path: Path) -> None:
    checkpointer = run(tmp_path, sp.KeepBest("loss"), {1: make(0.125), 2: make(0.5), 3: make(0.75)})
    assert checkpointer.steps() == [1, 3]


def test_the_best_step_is_chosen_among_readable_steps(tmp_path: Path) -> None:
    run(tmp_path, sp.KeepBest("loss") | sp.KeepAll(), {1: 0.1, 2: 0.5, 3: 0.7})
    (tmp_path / "step-00000003" / "manifest.json").write_text("{")
    assert sp.Checkpointer(tmp_path, keep=sp.KeepBest("loss")).restore(state(0), step="best") == 1


@pytest.mark.parametrize("keep", [3, sp.KeepLatest])
def test_a_keep_that_is_no_policy_is_refused(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is a policy"):
        sp.Checkpointer(tmp_path, keep=keep)


def test_a_pin_between_plan_and_prune_is_respected(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, None, {1: None, 2: None})
    storage = LocalStorage(tmp_path)
    plan = plan_prune(storage, lambda name: 0.0, older_than=0, now=1e9, keep=1)
    checkpointer.pin(1, "late")
    assert prune(storage, plan) == ["step-00000001"]
    assert checkpointer.steps() == [1, 2]


def test_policies_combine_also_with_those_of_the_user() -> None:
    class Odd:
        def select(self, steps: Any) -> set[int]:
            return {step for step in steps if step % 2}

    steps = [saved(step) for step in range(1, 7)]
    assert (sp.KeepLatest(2) | sp.KeepEvery(steps=3)).select(steps) == {3, 5, 6}
    assert (sp.KeepLatest(3) & Odd()).select(steps) == {5}
    assert (Odd() | sp.KeepLatest(1)).select(steps) == {1, 3, 5, 6}
    assert (Odd() & sp.KeepAll()).select(steps) == {1, 3, 5}
    with pytest.raises(TypeError):
        sp.KeepLatest(2) | 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: sp.KeepEvery(),
        lambda: sp.KeepEvery(steps=0),
        lambda: sp.KeepEvery(hours=0),
        lambda: sp.KeepEvery(hours=math.inf),
        lambda: sp.KeepBest(""),
        lambda: sp.KeepBest("loss", 0),
        lambda: sp.KeepBest("loss", 1, "least"),  # type: ignore[arg-type]
        lambda: sp.KeepLatest(True),
    ],
)
def test_invalid_arguments_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="Keep"):
        make()


def test_a_run_keeps_what_its_policy_selects_and_the_newest(tmp_path: Path) -> None:
    keep = sp.KeepBest("loss", 2) | sp.KeepEvery(steps=50)
    checkpointer = run(tmp_path, keep, {10: 0.5, 20: 0.1, 30: 0.2, 40: 0.4, 50: 0.9, 60: None, 70: 0.3})
    assert checkpointer.steps() == [20, 30, 50, 70]


def test_a_step_whose_manifest_is_damaged_stays_and_the_others_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, None, {1: 0.5, 2: 0.1, 3: 0.7})
    (tmp_path / "step-00000001" / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING, "shardproof"):
        checkpointer = run(tmp_path, sp.KeepBest("loss"), {4: 0.8})
    assert checkpointer.steps() == [2, 4] and (tmp_path / "step-00000001" / "manifest.json").exists()
    assert "step 1 stays, and the policy does not see it" in caplog.text


def test_a_replaced_step_is_judged_by_its_new_metric(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, sp.KeepBest("loss"), {1: 0.1, 2: 0.5})
    assert checkpointer.steps() == [1, 2]
    checkpointer.save(2, state(2), metadata={"loss": 0.05}, overwrite=True).result()
    assert checkpointer.steps() == [2]


def test_each_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, None, {1: 0.1, 2: 0.5, 3: 0.3})
    facts = StepFacts(LocalStorage(tmp_path))
    assert facts.select(sp.KeepBest("loss", 2), [1, 2, 3]) == ({1, 3}, set())
    for manifest in tmp_path.glob("*/manifest.json"):
        manifest.unlink()
    assert facts.select(sp.KeepBest("loss", 2), [1, 2, 3]) == ({1, 3}, set())


def test_a_pinned_step_outlives_policy_prune_and_program(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, sp.KeepLatest(2), {1: None})
    checkpointer.pin(1, "baseline")
    checkpointer = run(tmp_path, sp.KeepLatest(2), {2: None, 3: None, 4: None})
    assert checkpointer.steps() == [1, 3, 4]
    assert {step: pin.label for step, pin in checkpointer.pins().items()} == {1: "baseline"}
    storage = LocalStorage(tmp_path)
    plan = plan_prune(storage, lambda name: 0.0, older_than=0, now=1e9, keep=1)
    assert plan.folders["steps"] == ("step-00000003",) and plan.leftovers == ()
    prune(storage, plan)
    assert checkpointer.steps() == [1, 4]
    checkpointer.unpin(1)
    assert checkpointer.pins() == {}
    checkpointer.save(5, state(5)).result()
    assert checkpointer.steps() == [4, 5]
    assert not (tmp_path / "step-00000001").exists()


def test_a_pin_that_is_no_json_still_pins(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, sp.KeepLatest(1), {1: None})
    (tmp_path / "step-00000001" / "pinned.json").write_text("{")
    checkpointer.save(2, state(2)).result()
    assert checkpointer.steps() == [1, 2] and checkpointer.pins()[1].label == ""


def test_a_removed_step_leaves_no_pin_and_a_pin_needs_a_step(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, None, {1: None})
    with pytest.raises(sp.NotCommittedError, match="cannot be pinned"):
        checkpointer.pin(2, "none")
    assert not (tmp_path / "step-00000002").exists()
    with pytest.raises(sp.StructureError, match="a text as label"):
        checkpointer.pin(1, 3)  # type: ignore[arg-type]
    with pytest.raises(sp.StructureError, match="a whole number as step"):
        checkpointer.pin("1", "x")  # type: ignore[arg-type]
    checkpointer.pin(1, "x")
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "step-00000001" / "shards")  # else `repair` could make a step of the files
    plan = plan_prune(LocalStorage(tmp_path), lambda name: 0.0, older_than=0, now=1e9)
    prune(LocalStorage(tmp_path), plan)
    assert not (tmp_path / "step-00000001").exists()


def test_ls_shows_pins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, None, {1: None, 2: None}).pin(1, "baseline")
    assert run_command(["ls", str(tmp_path), "--json"]) == 0
    output = capsys.readouterr().out
    assert [item["pinned"] for item in json.loads(output)["checkpoints"]] == ["baseline", None]
    assert run_command(["ls", str(tmp_path)]) == 0
    assert "pinned: baseline" in capsys.readouterr().out


def test_restore_takes_the_best_the_latest_or_a_number(tmp_path: Path) -> None:
    checkpointer = run(tmp_path, sp.KeepBest("loss") | sp.KeepAll(), {1: 0.5, 2: 0.1, 3: 0.7})
    for selected, expected in (("best", 2), ("latest", 3), (None, 3), (1, 1)):
        target = state(-1)
        assert checkpointer.restore(target, step=selected) == expected  # type: ignore[arg-type]
        assert float(target["a"][0]) == expected
    with pytest.raises(ValueError, match="needs one KeepBest"):
        sp.Checkpointer(tmp_path).restore(state(0), step="best")
    with pytest.raises(sp.NotCommittedError, match="finite 'reward'"):
        sp.Checkpointer(tmp_path, keep=sp.KeepBest("reward")).restore(state(0), step="best")
    assert sp.Checkpointer(tmp_path / "new", keep=sp.KeepBest("loss")).restore(state(0), step="best") is None


def test_a_warm_start_reads_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    run(tmp_path / "old", None, {7: None})
    torch.save({"weights": torch.full((100,), 9.0)}, tmp_path / "weights.pt")
    checkpointer = sp.Checkpointer(tmp_path / "new")
    target = state(-1)
    assert checkpointer.restore(target, step=tmp_path / "old" / "step-00000007") == 7
    assert float(target["a"][0]) == 7 and checkpointer.steps() == []
    restored = checkpointer.restore(target, step=str(tmp_path / "weights.pt"), rename={"a": "weights"})
    assert restored == 0 and float(target["a"][0]) == 9 and restored.report.tensors == 1


def test_a_step_that_prune_removes_is_not_among_those_that_stay(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.ones(2)}).result()
    plan = plan_prune(LocalStorage(tmp_path), lambda name: 0.0, older_than=0, now=1e9, keep=1, after=1)
    assert plan.folders["steps"] == ("step-00000001", "step-00000002") and plan.folders["newer"] == (
        "step-00000003",
    )
