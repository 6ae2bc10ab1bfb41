"""Incremental saves of several real ranks: what is written, other layouts, and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.checkpointer.step_folders import step_name
from shardproof.format import read_manifest
from shardproof.maintenance import make_standalone, verify
from shardproof.rendezvous import LocalRendezvous
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
    """The same, as one process holds it."""
    return {
        "model": whole((HEIGHT, 500), model),
        "bias": whole((7,), model),
        "alone": whole((4, 100), model),
        "optimizer": whole((HEIGHT, 300), optimizer),
    }


MODEL = 4 * (HEIGHT * 500 + 7 + 400)
OPTIMIZER = 4 * HEIGHT * 300


def train(root: str, steps: list[tuple[int, int, int]]) -> list[tuple[int, int, list[str]]]:
    """Saves (step, model, optimizer) each; bytes, bytes not written again, and where the ranks met."""
    meetings = Phases(rendezvous(deadline=20.0))
    checkpointer = sp.Checkpointer(root, rendezvous=meetings, incremental=True, keep=sp.KeepLatest(2))
    said = []
    for step, model, optimizer in steps:
        meetings.met.clear()
        done = checkpointer.save(step, state(model, optimizer)).result()
        checkpointer.wait_for_scrub(timeout=30)
        said.append((done.bytes, done.reused, list(meetings.met)))
    target = blanked(state(0, 0))
    last, model, optimizer = steps[-1]
    assert checkpointer.restore(target) == last
    assert differences(target, state(model, optimizer)) == []
    return said


def check(root: Path, step: int, model: int, optimizer: int) -> None:
    """One process reads the step whole."""
    assert verify(LocalStorage(root / step_name(step))).ok
    target = blanked(alone(0, 0))
    sp.load(root / step_name(step), target, rendezvous=LocalRendezvous(), exclude="own")
    assert differences(target, alone(model, optimizer)) == []


def test_two_ranks_write_what_changed_and_meet_no_more_often(tmp_path: Path) -> None:
    steps = [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 3)]
    outcomes = run_ranks(2, train, str(tmp_path), steps)
    said = outcomes[0].value
    assert outcomes[1].value == said or [item[:2] for item in outcomes[1].value] == [
        item[:2] for item in said
    ]
    assert [reused for _, reused, _ in said] == [0, MODEL, MODEL, OPTIMIZER]
    assert said[0][0] > MODEL + OPTIMIZER and said[1][0] < OPTIMIZER + 40_000
    assert said[2][2] == ["collect", "write"], "what both sides know is not sent again"
    for step, model, optimizer in steps[-2:]:
        check(tmp_path, step, model, optimizer)
    assert not list((tmp_path / step_name(1)).rglob("manifest.json")), "retention let the step go"


def test_another_number_of_ranks_goes_on_and_is_right(tmp_path: Path) -> None:
    run_ranks(3, train, str(tmp_path), [(1, 1, 1), (2, 1, 2)])
    two = run_ranks(2, train, str(tmp_path), [(3, 1, 2), (4, 1, 3)])[0].value
    bias_and_alone = 4 * (7 + 400)
    assert two[0][1] == bias_and_alone, "other boxes are written, those that are the same are not"
    assert two[1][1] == MODEL
    check(tmp_path, 3, 1, 2)
    check(tmp_path, 4, 1, 3)
    one = run_ranks(1, train, str(tmp_path), [(5, 1, 3)])[0].value
    assert one[0][1] == bias_and_alone
    check(tmp_path, 5, 1, 3)
    check(tmp_path, 4, 1, 3)
    manifest = read_manifest(LocalStorage(tmp_path / step_name(5)))
    assert {record.folder for record in manifest.borrowed_files} == {step_name(1)}


def test_a_new_job_goes_on_from_what_is_stored(tmp_path: Path) -> None:
    run_ranks(2, train, str(tmp_path), [(1, 1, 1)])
    said = run_ranks(2, train, str(tmp_path), [(2, 1, 2), (3, 1, 3)])[0].value
    assert [reused for _, reused, _ in said] == [MODEL, MODEL]
    assert said[0][2] == ["collect", "plan", "base", "write"] and said[1][2] == ["collect", "write"]
    check(tmp_path, 3, 1, 3)


def test_a_standalone_copy_of_many_ranks_by_one(tmp_path: Path) -> None:
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


def some_ask(root: str) -> str:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=20.0), incremental=rank() == 0)
    with pytest.raises(sp.StructureError, match="incremental") as caught:
        checkpointer.save(1, {"w": torch.ones(3)})
    return caught.value.message


def test_all_ranks_must_ask_for_it(tmp_path: Path) -> None:
    said = [outcome.value for outcome in run_ranks(2, some_ask, str(tmp_path))]
    assert said[0] == said[1]
