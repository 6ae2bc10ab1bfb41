"""Changes of structure between saves that share a Checkpointer: what is loaded is exactly what was saved.

A plan is cached from save to save. The saves go from the first structure to each other one and back, or make
every transition once, with saves of the same structure and refused saves in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks
from tests.scenarios.states import (
    CallResult,
    Phases,
    assert_one_attempt,
    attempt,
    blanked,
    differences,
    rows,
    same_on_all_ranks,
    whole,
)

RANKS = 2
HEIGHT = 6

State = dict[str, Any]


def base(salt: int) -> State:
    return {
        "w": rows(whole((HEIGHT, 2), salt), 3 * rank(), 3 * rank() + 3),
        "b": whole((4,), salt),
        "n": {"epoch": salt},
    }


def key_added(salt: int) -> State:
    return base(salt) | {"more": whole((3,), salt)}


def key_removed(salt: int) -> State:
    state = base(salt)
    del state["b"]
    return state


def dtype_changed(salt: int) -> State:
    return base(salt) | {"b": whole((4,), salt, torch.int32)}


def shape_changed(salt: int) -> State:
    return base(salt) | {"b": whole((2, 2), salt)}


def nesting_changed(salt: int) -> State:
    state = base(salt)
    return {"n": state.pop("n"), "model": state}


def piece_moved(salt: int) -> State:
    """The same boxes on other ranks."""
    other = 1 - rank()
    return base(salt) | {"w": rows(whole((HEIGHT, 2), salt), 3 * other, 3 * other + 3)}


def cut_elsewhere(salt: int) -> State:
    return base(salt) | {"w": rows(whole((HEIGHT, 2), salt), *((0, 1) if rank() == 0 else (1, HEIGHT)))}


def all_on_one(salt: int) -> State:
    return base(salt) | {"w": rows(whole((HEIGHT, 2), salt), 0, HEIGHT if rank() == 1 else 0)}


def replicated(salt: int) -> State:
    return base(salt) | {"w": whole((HEIGHT, 2), salt)}


def tensor_on_one(salt: int) -> State:
    """A tensor that only rank 1 has."""
    return base(salt) | ({"rerun": whole((5,), salt)} if rank() == 1 else {})


def value_on_one(salt: int) -> State:
    return base(salt) | ({"seen": salt} if rank() == 1 else {})


def own_values(salt: int) -> State:
    return base(salt) | {"own": sp.PerRank(10 * salt + rank())}


def own_value_of_one(salt: int) -> State:
    return base(salt) | ({"own": sp.PerRank(10 * salt + rank())} if rank() == 0 else {})


def tensor_became_value(salt: int) -> State:
    return base(salt) | {"b": salt}


def tied(salt: int) -> State:
    state = base(salt)
    return state | {"tied": state["b"]}


def untied(salt: int) -> State:
    return base(salt) | {"tied": whole((4,), salt + 1)}


VALID: list[Callable[[int], State]] = [
    base,
    key_added,
    key_removed,
    dtype_changed,
    shape_changed,
    nesting_changed,
    piece_moved,
    cut_elsewhere,
    all_on_one,
    replicated,
    tensor_on_one,
    value_on_one,
    own_values,
    own_value_of_one,
    tensor_became_value,
    tied,
    untied,
]


def gap(salt: int) -> State:
    return base(salt) | {"w": rows(whole((HEIGHT, 2), salt), 3 * rank(), 3 * rank() + 3 - rank())}


def overlap(salt: int) -> State:
    return base(salt) | {"w": rows(whole((HEIGHT, 2), salt), 2 * rank(), 2 * rank() + 4)}


def dtypes_differ(salt: int) -> State:
    return base(salt) | {"b": whole((4,), salt, torch.float64 if rank() else torch.float32)}


def not_storable(salt: int) -> State:
    return base(salt) | ({"b": lambda: salt} if rank() == 1 else {})


INVALID = [gap, overlap, dtypes_differ, not_storable]


def every_transition(n: int) -> list[int]:
    """A walk that takes each ordered pair of n structures once, (x, x) too: an Euler circuit."""
    unused = {node: list(range(n)) for node in range(n)}
    stack, walk = [0], []
    while stack:
        if unused[stack[-1]]:
            stack.append(unused[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def to_each_and_back(n: int) -> list[int]:
    """A walk from the first structure to each other one, which it takes twice, and back."""
    return [0, 0, *(node for other in range(1, n) for node in (other, other, 0))]


def save_along(walk: list[int], root: str) -> tuple[list[str], list[CallResult]]:
    """Saves along the walk, with a refused save at every eighth step; returns what went wrong."""
    meetings = Phases(rendezvous(deadline=20.0))
    checkpointer = sp.Checkpointer(root, rendezvous=meetings, keep=sp.KeepLatest(1))
    wrong: list[str] = []
    refused: list[CallResult] = []
    before = -1
    for step, which in enumerate(walk):
        build = VALID[which]
        meetings.met.clear()
        checkpointer.save(step, build(step)).result()
        planned = "plan" in meetings.met
        if planned != (which != before):
            wrong.append(f"step {step}: from {before} to {build.__name__}, planned: {planned}")
        before = which
        target = blanked(build(0))
        restored = checkpointer.restore(target)
        wrong += [f"step {step}, {build.__name__}: {path}" for path in differences(target, build(step))]
        if restored != step:
            wrong.append(f"step {step}: restored {restored}")
        if step % 8 == 3:
            spoiled = INVALID[step // 8 % len(INVALID)]
            refused.append(attempt(lambda: checkpointer.save(10**6, spoiled(0)).result()))  # noqa: B023
            if spoiled is not not_storable:
                before = -1  # the refused save dropped the cached plan
    return wrong, refused


@pytest.mark.timeout(240)
@pytest.mark.parametrize("walk", [to_each_and_back, pytest.param(every_transition, marks=pytest.mark.slow)])
def test_a_structure_after_another_is_restored_as_saved(
    walk: Callable[[int], list[int]], tmp_path: Path
) -> None:
    outcomes = run_ranks(RANKS, save_along, walk(len(VALID)), str(tmp_path), timeout=220)
    assert [outcome.value[0] for outcome in outcomes] == [[]] * RANKS
    refused = [
        same_on_all_ranks(list(ranks))
        for ranks in zip(*(outcome.value[1] for outcome in outcomes), strict=True)
    ]
    assert {result.kind for result in refused} == {"TilingError", "StructureError", "RankFailure"}
    (left,) = sorted(tmp_path.iterdir())
    assert_one_attempt(left)


def test_the_walk_takes_every_pair_once() -> None:
    walk = every_transition(5)
    pairs = list(itertools.pairwise(walk))
    assert len(pairs) == len(set(pairs)) == 25


def save_the_same_twice(root: str) -> tuple[list[list[str]], list[str]]:
    meetings = Phases(rendezvous(deadline=20.0))
    checkpointer = sp.Checkpointer(root, rendezvous=meetings)
    phases, wrong = [], []
    state = base(1)
    for step in (1, 2, 3):
        meetings.met.clear()
        for path_value in (state["w"].pieces[0][0], state["b"]):
            path_value.add_(100 * step)  # in place: the same memory, other values
        state["n"]["epoch"] = step
        checkpointer.save(step, state).result()
        phases.append(list(meetings.met))
        target = blanked(base(0))
        checkpointer.restore(target)
        wrong += differences(target, state)
    return phases, wrong


def test_a_save_by_a_cached_plan_has_the_current_values(tmp_path: Path) -> None:
    for outcome in run_ranks(RANKS, save_the_same_twice, str(tmp_path)):
        phases, wrong = outcome.value
        assert phases == [["collect", "plan", "write"], ["collect", "write"], ["collect", "write"]]
        assert wrong == []
