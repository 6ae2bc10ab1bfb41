"""Incremental saves of several real ranks: what is written, other layouts, and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import read_manifest
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.runs.maintenance import make_standalone, verify
from shardproof.storage import LocalStorage
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.scenarios.states import Phases, blanked, differences, rows, whole

HEIGHT = 24


def state(model: int, optimizer: int) -> dict[str, Any]:
    """Rows of a model and an optimizer, split evenly over the ranks; an expert of rank 0 alone."""
    part = HEIGHT // world_size()
    first = rank() * part
    return {
        "model": rows(whole((HEIGHT, 500), model), first, first + part),
        "bias": whole((7,), model),
        "alone": rows(whole((4, 100), model), 0, 4 if rank() == 0 else 0),
        "optimizer": rows(whole((HEIGHT, 300), optimizer), first, first + part),
        "own": sp.PerRank(10 * optimizer + rank()),
    }


def alone(model: int, optimizer: int) -> dict[str, Any]:
    """The same state, whole, in one process."""
    return {
        "model": whole((HEIGHT, 500), model),
        "bias": whole((7,), model),
        "alone": whole((4, 100), model),
        "optimizer": whole((HEIGHT, 300), optimizer),
    }


MODEL = 4 * (HEIGHT * 500 + 7 + 400)
OPTIMIZER = 4 * HEIGHT * 300


def train(root: str, steps: list[tuple[int, int, int]]) -> list[tuple[int, int, list[str]]]:
    """Saves each (step, model, optimizer). Returns for each its bytes, its reused bytes and its meetings."""
    meetings = Phases(rendezvous(deadline=20.0))
    checkpointer = sp.Checkpointer(root, rendezvous=meetings, incremental=True, keep=sp.KeepLatest(2))
    saves = []
    for step, model, optimizer in steps:
        meetings.met.clear()
        done = checkpointer.save(step, state(model, optimizer)).result()
        checkpointer.wait_for_scrub(timeout=30)
        saves.append((done.bytes, done.reused, list(meetings.met)))
    target = blanked(state(0, 0))
    last, model, optimizer = steps[-1]
    assert checkpointer.restore(target) == last
    assert differences(target, state(model, optimizer)) == []
    return saves


def check(root: Path, step: int, model: int, optimizer: int) -> None:
    """One process reads the step whole."""
    assert verify(LocalStorage(root / step_name(step))).ok
    target = blanked(alone(0, 0))
    sp.load(root / step_name(step), target, rendezvous=LocalRendezvous(), exclude="own")
    assert differences(target, alone(model, optimizer)) == []


def test_two_ranks_write_only_changes_and_meet_twice(tmp_path: Path) -> None:
    steps = [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 3)]
    outcomes = run_ranks(2, train, str(tmp_path), steps)
    saves = outcomes[0].value
    assert outcomes[1].value == saves or [item[:2] for item in outcomes[1].value] == [
        item[:2] for item in saves
    ]
    assert [reused for _, reused, _ in saves] == [0, MODEL, MODEL, OPTIMIZER]
    assert saves[0][0] > MODEL + OPTIMIZER and saves[1][0] < OPTIMIZER + 40_000
    assert saves[2][2] == ["collect", "write"], "no plan and no base are sent again"
    for step, model, optimizer in steps[-2:]:
        check(tmp_path, step, model, optimizer)
    assert not list((tmp_path / step_name(1)).rglob("manifest.json")), "retention removed the step"


def test_another_number_of_ranks_continues_the_run(tmp_path: Path) -> None:
    run_ranks(3, train, str(tmp_path), [(1, 1, 1), (2, 1, 2)])
    two = run_ranks(2, train, str(tmp_path), [(3, 1, 2), (4, 1, 3)])[0].value
    bias_and_alone = 4 * (7 + 400)
    assert two[0][1] == bias_and_alone, "boxes that changed are written, the others are reused"
    assert two[1][1] == MODEL
    check(tmp_path, 3, 1, 2)
    check(tmp_path, 4, 1, 3)
    one = run_ranks(1, train, str(tmp_path), [(5, 1, 3)])[0].value
    assert one[0][1] == bias_and_alone
    check(tmp_path, 5, 1, 3)
    check(tmp_path, 4, 1, 3)
    manifest = read_manifest(LocalStorage(tmp_path / step_name(5)))
    assert {record.folder for record in manifest.referenced_files} == {step_name(1)}


def test_a_new_job_reuses_the_stored_chunks(tmp_path: Path) -> None:
    run_ranks(2, train, str(tmp_path), [(1, 1, 1)])
    saves = run_ranks(2, train, str(tmp_path), [(2, 1, 2), (3, 1, 3)])[0].value
    assert [reused for _, reused, _ in saves] == [MODEL, MODEL]
    assert saves[0][2] == ["collect", "plan", "base", "write"] and saves[1][2] == ["collect", "write"]
    check(tmp_path, 3, 1, 3)


def test_one_process_makes_a_standalone_copy_of_many_ranks(tmp_path: Path) -> None:
    run_ranks(3, train, str(tmp_path / "run"), [(1, 1, 1), (2, 1, 2)])
    source = LocalStorage(tmp_path / "run" / step_name(2))
    copy = make_standalone(source, LocalStorage(tmp_path / "copy" / step_name(2)))
    original = read_manifest(source)
    assert copy.world_size == 3 and copy.objects == original.objects and len(copy.files) == 3
    check(tmp_path / "copy", 2, 1, 2)
    restored = run_ranks(3, restore_copy, str(tmp_path / "copy"))
    assert [outcome.value for outcome in restored] == [[], [], []]


def restore_copy(root: str) -> list[str]:
    target = blanked(state(0, 0))
    assert sp.Checkpointer(root, rendezvous=rendezvous(deadline=20.0)).restore(target) == 2
    return differences(target, state(1, 2))


def ask_on_rank_0(root: str) -> str:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=20.0), incremental=rank() == 0)
    with pytest.raises(sp.StructureError, match="incremental") as caught:
        checkpointer.save(1, {"w": torch.ones(3)})
    return caught.value.message


def test_an_incremental_save_must_be_asked_for_on_all_ranks(tmp_path: Path) -> None:
    texts = [outcome.value for outcome in run_ranks(2, ask_on_rank_0, str(tmp_path))]
    assert texts[0] == texts[1]
