"""A gap, an overlap, or ranks that differ in a shape, a dtype or a key: one error for all, and no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.scenarios.states import (
    CallResult,
    assert_one_attempt,
    attempt,
    blanked,
    differences,
    files_below,
    plain_state,
    rows,
    same_on_all_ranks,
    whole,
)

RANKS = 3
HEIGHT = 4 * RANKS
CHANGES_STORAGE = ("create", "write_at", "finish", "publish", "delete")


def _gap(state: dict[str, Any]) -> None:
    if rank() == 1:
        state["model"]["weight"] = rows(whole((HEIGHT, 3), 1), 4, 7)


def _overlap(state: dict[str, Any]) -> None:
    if rank() == 1:
        state["model"]["weight"] = rows(whole((HEIGHT, 3), 1), 4, 9)


def _other_shape(state: dict[str, Any]) -> None:
    if rank() == 2:
        state["model"]["bias"] = torch.zeros(6)


def _other_global_shape(state: dict[str, Any]) -> None:
    if rank() == 1:
        state["model"]["weight"] = rows(whole((HEIGHT + 4, 3), 1), 4, 8)


def _other_dtype(state: dict[str, Any]) -> None:
    if rank() == 0:
        state["model"]["bias"] = state["model"]["bias"].double()


def _key_missing(state: dict[str, Any]) -> None:
    if rank() == 1:
        del state["model"]["weight"]


def _key_without_holder(state: dict[str, Any]) -> None:
    if rank() == 0:
        state["alone"] = rows(whole((2, 2), 1, torch.int64), 0, 0)


def _two_kinds(state: dict[str, Any]) -> None:
    if rank() == 1:
        state["epoch"] = torch.zeros(())


INVALID: dict[str, tuple[Any, str, list[str]]] = {
    "gap": (_gap, "TilingError", ["'model.weight'", "gap", "[7:8,0:3]"]),
    "overlap": (_overlap, "TilingError", ["'model.weight'", "overlap", "[8:9,0:3]", "rank 1", "rank 2"]),
    "shape": (_other_shape, "StructureError", ["'model.bias'", "[5]", "[6]", "rank 0", "rank 2"]),
    "global shape": (
        _other_global_shape,
        "StructureError",
        ["'model.weight'", f"[{HEIGHT}, 3]", f"[{HEIGHT + 4}, 3]", "rank 1"],
    ),
    "dtype": (_other_dtype, "StructureError", ["'model.bias'", "float64", "float32", "rank 0", "rank 1"]),
    "key missing": (_key_missing, "TilingError", ["'model.weight'", "gap", "[4:8,0:3]", "ranks 0, 2"]),
    "no holder": (_key_without_holder, "TilingError", ["'alone'", "gap", "no rank holds any of it"]),
    "two kinds": (_two_kinds, "StructureError", ["'epoch'", "rank 0", "rank 1"]),
}


def save_invalid_then_valid(root: str) -> dict[str, CallResult]:
    """Every invalid state under a step of its own, each followed by a valid save, with one Checkpointer."""
    storage = FaultyStorage(LocalStorage(root))
    checkpointer = sp.Checkpointer(storage, rendezvous=rendezvous(deadline=10.0))
    results = {}
    for number, (name, (spoil, _, _)) in enumerate(INVALID.items()):
        state = plain_state(rank(), world_size(), number)
        spoil(state)
        storage.arm(None, only=CHANGES_STORAGE)
        one = attempt(lambda state=state, step=2 * number: checkpointer.save(step, state).result())  # type: ignore[misc]
        one.after["operations"] = list(storage.operations)
        storage.disarm()
        checkpointer.save(2 * number + 1, plain_state(rank(), world_size(), number)).result()
        target = blanked(plain_state(rank(), world_size(), 0))
        one.after["restored"] = checkpointer.restore(target)
        one.after["wrong"] = differences(target, plain_state(rank(), world_size(), number))
        results[name] = one
    return results


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, CallResult]]]:
    root = tmp_path_factory.mktemp("run")
    return root, [outcome.value for outcome in run_ranks(RANKS, save_invalid_then_valid, str(root))]


@pytest.mark.parametrize("name", INVALID)
def test_all_ranks_get_the_same_error_for_an_invalid_structure(
    name: str, outcomes: tuple[Path, list[dict[str, CallResult]]]
) -> None:
    _, kind, words = INVALID[name]
    one = same_on_all_ranks([results[name] for results in outcomes[1]])
    assert one.kind == kind
    for word in words:
        assert word in one.text, one.text


@pytest.mark.parametrize("name", INVALID)
def test_a_refused_save_writes_nothing(name: str, outcomes: tuple[Path, list[dict[str, CallResult]]]) -> None:
    root, ranks = outcomes
    assert [results[name].after["operations"] for results in ranks] == [[]] * RANKS
    step = 2 * list(INVALID).index(name)
    assert not (root / f"step-{step:08d}").exists()


@pytest.mark.parametrize("name", INVALID)
def test_the_next_valid_save_works_and_loads(
    name: str, outcomes: tuple[Path, list[dict[str, CallResult]]]
) -> None:
    root, ranks = outcomes
    step = 2 * list(INVALID).index(name) + 1
    assert [results[name].after["restored"] for results in ranks] == [step] * RANKS
    assert [results[name].after["wrong"] for results in ranks] == [[]] * RANKS
    assert_one_attempt(root / f"step-{step:08d}")


def test_only_the_valid_steps_are_stored(outcomes: tuple[Path, list[dict[str, CallResult]]]) -> None:
    root, _ = outcomes
    steps = {name.split("/")[0] for name in files_below(root)}
    assert steps == {f"step-{2 * number + 1:08d}" for number in range(len(INVALID))}
