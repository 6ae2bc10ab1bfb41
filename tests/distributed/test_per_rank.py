"""`PerRank` values on fewer ranks: values that no rank loads are named, gathered or refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks


class Loader:
    """Has a place in the data and a shuffled order, which is too large for the JSON of a manifest."""

    def __init__(self, place: int = -1) -> None:
        self.state: dict[str, Any] = {"place": place, "order": torch.full((100,), place)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def tree(value: int, **options: Any) -> dict[str, Any]:
    return {
        "own": sp.PerRank({"id": value, "t": torch.full((2,), value)}, **options),
        "leaf": sp.PerRank(value, **options),
        "loader": sp.PerRank(Loader(value), **options),
        "deep": sp.PerRank({"all": [torch.tensor(value), {"b": value}]}, **options),
    }


def _save(root: str) -> None:
    sp.save(root, tree(rank()) | {"rng": sp.RandomState()}, rendezvous=rendezvous(deadline=10))


def saved(root: Path, ranks: int) -> str:
    assert [outcome.value for outcome in run_ranks(ranks, _save, str(root))] == [None] * ranks
    return str(root)


class WarningLog(logging.Handler):
    """Collects the library's warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("shardproof").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def plain(value: Any) -> Any:
    """The value with lists in place of tensors."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _load(root: str, fewer: str, lacks: tuple[int, ...] = (), exclude: tuple[str, ...] = ()) -> Any:
    """Loads all but generators. Ranks in `lacks` have no loader in their target."""
    warnings, state = WarningLog(), tree(-1, fewer=fewer)
    if rank() in lacks:
        del state["loader"]
    report = sp.load(root, state, exclude=["rng", *exclude], rendezvous=rendezvous(deadline=10))
    gathered = {key: plain(value.gathered) for key, value in state.items()}
    return report.dropped, report.unexpected, warnings.texts, state["own"].value["id"], gathered


def test_values_that_no_rank_loads_are_named(tmp_path: Path) -> None:
    root = saved(tmp_path, 3)
    names = ("deep.@rank-2", "leaf.@rank-2", "loader.@rank-2", "own.@rank-2")
    first, second = run_ranks(2, _load, root, "drop")
    assert [first.value[:2], second.value[:2]] == [(names, ())] * 2
    assert [first.value[3], second.value[3]] == [0, 1]
    (text,) = first.value[2]
    assert root in text and all(name in text for name in names)
    assert second.value[2] == [], "only rank 0 warns"


def _load_generators(root: str) -> tuple[str, ...]:
    state = {"rng": sp.RandomState()}
    return sp.load(root, state, include=["rng"], rendezvous=rendezvous(deadline=10)).dropped


def test_generators_that_no_rank_loads_are_named(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, _load_generators, saved(tmp_path, 2))
    assert outcome.value == ("rng.@rank-1",)


def test_on_the_same_number_of_ranks_nothing_is_dropped_or_gathered(tmp_path: Path) -> None:
    root = saved(tmp_path, 2)
    for fewer in ("drop", "gather", "error"):
        for number, outcome in enumerate(run_ranks(2, _load, root, fewer)):
            assert outcome.value == ((), (), [], number, {key: {} for key in tree(0)})


def test_a_value_that_the_target_of_its_rank_lacks_is_named(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _load, saved(tmp_path, 2), "gather", (1,)):
        assert outcome.value[:2] == (("loader.@rank-1",), ())


def test_excluded_values_are_not_named(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, _load, saved(tmp_path, 2), "drop", (), ("loader", "own", "deep"))
    assert outcome.value[0] == ("leaf.@rank-1",)


def test_gathered_values_reach_every_rank_that_loads(tmp_path: Path) -> None:
    for number, outcome in enumerate(run_ranks(2, _load, saved(tmp_path, 4), "gather")):
        dropped, unexpected, warnings, mine, gathered = outcome.value
        assert (dropped, unexpected, warnings, mine) == ((), (), [], number)
        assert gathered == {
            "own": {value: {"id": value, "t": [value] * 2} for value in (2, 3)},
            "leaf": {2: 2, 3: 3},
            "loader": {value: {"place": value, "order": [value] * 100} for value in (2, 3)},
            "deep": {value: {"all.0": value, "all.1.b": value} for value in (2, 3)},
        }


def test_fewer_ranks_can_be_refused(tmp_path: Path) -> None:
    for outcome in run_ranks(1, _load, saved(tmp_path, 2), "error"):
        assert isinstance(outcome.error, sp.KeyMismatchError)
        assert [item[0] for item in outcome.error.details["mismatched"]] == [
            "deep.@rank-1", "leaf.@rank-1", "loader.@rank-1", "own.@rank-1",
        ]  # fmt: skip


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="gather"):
        sp.PerRank(1, fewer="merge")  # type: ignore[arg-type]


def _save_own_learning_rates(root: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank())
    sp.save(root, {"optimizer": sp.OptimizerState(optimizer, model)}, rendezvous=rendezvous(deadline=10))


def test_an_option_of_an_optimizer_is_not_for_per_rank(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _save_own_learning_rates, str(tmp_path)):
        assert "optimizer.bias.@options" in str(outcome.error)
        assert "Make them equal before the save" in str(outcome.error)
        assert "PerRank" not in str(outcome.error)


def _own_models(root: str) -> tuple[str, str, bool]:
    """Each rank trains another model. Returns two errors, and whether the advised state comes back."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.full((1, 1), 1.0 + rank())).sum().backward()
    optimizer.step()
    options: dict[str, Any] = {"rendezvous": rendezvous(deadline=10)}
    errors = []
    for kept in (optimizer, sp.OptimizerState(optimizer, model)):
        with pytest.raises(sp.ShardproofError) as found:
            sp.save(f"{root}/apart", {"model": sp.PerRank(model), "optimizer": kept}, **options)
        errors.append(str(found.value))
    state = {"own": sp.PerRank({"model": model, "optimizer": optimizer})}
    slots = optimizer.state[model.weight]
    before = slots["exp_avg"].clone()
    sp.save(f"{root}/together", state, **options)
    slots["exp_avg"].zero_()
    sp.load(f"{root}/together", state, **options)
    return errors[0], errors[1], torch.equal(optimizer.state[model.weight]["exp_avg"], before)


def test_an_optimizer_of_per_rank_parameters_is_saved_with_them(tmp_path: Path) -> None:
    """Its slots would be those of one rank. The error's advice works."""
    for outcome in run_ranks(2, _own_models, str(tmp_path)):
        bare, named, comes_back = outcome.value
        for error in (bare, named):
            assert "['optimizer'] trains model.@rank-" in error
            assert "shardproof.PerRank({'model': ..., 'optimizer': ...})" in error
        assert comes_back
