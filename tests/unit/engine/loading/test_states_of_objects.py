"""An object gets its state from a checkpoint that has the values of its state dict under separate keys."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardproof as sp
from shardproof.engine.state import Catalogue, bind
from shardproof.errors import CorruptChunkError, KeyMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Loader:
    """An object with a nested state: integers as keys, keys with dots, lists, tensors and an empty dict."""

    def __init__(self, value: int = 0) -> None:
        self.state: dict[str, Any] = {
            "epoch": value,
            "none": None if value == 0 else {"inner": value},
            "empty": {},
            "workers": {0: torch.full((2,), float(value)), 1: {"seed": value}},
            "sources": [{"at": value}, {"at": value + 1, "rows": [value, value]}],
            "pair": (value, "text"),
            "averages": {"layer.0.weight": torch.full((2, 3), float(value))},
            "counts": np.full(20, value),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Bare(Loader):
    """An object without state before its first step."""

    def __init__(self, **state: Any) -> None:
        self.state = state


def states(value: int) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**value)
    for _ in range(value):
        optimizer.step()
        scheduler.step()
    if value:
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": value})
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "loader": Loader(value),
        "epoch": value,
    }


def dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {key: item.state_dict() if hasattr(item, "state_dict") else item for key, item in state.items()}


def by_dcp(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(dict(state), checkpoint_id=path / "dcp")
    return path / "dcp"


def by_torch(path: Path, state: dict[str, Any]) -> Path:
    torch.save(dicts(state), path / "last.pt")
    return path / "last.pt"


def as_dicts(path: Path, state: dict[str, Any]) -> Path:
    sp.save(path / "dicts", dicts(state))
    return path / "dicts"


def as_objects(path: Path, state: dict[str, Any]) -> Path:
    sp.save(path / "objects", state)
    return path / "objects"


def converted(write: Callable[[Path, dict[str, Any]], Path]) -> Callable[[Path, dict[str, Any]], Path]:
    def convert(path: Path, state: dict[str, Any]) -> Path:
        sp.convert(write(path, state), path / "converted", to="shardproof")
        return path / "converted"

    return convert


WRITERS = {
    "dcp": by_dcp,
    "torch": by_torch,
    "dicts": as_dicts,
    "objects": as_objects,
    "dcp converted": converted(by_dcp),
    "torch converted": converted(by_torch),
}


@pytest.mark.parametrize("restores", [False, True], ids=["load", "restore"])
@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_objects_get_the_state_that_was_saved(tmp_path: Path, writer: str, restores: bool) -> None:
    saved, target = states(3), states(0)
    path = WRITERS[writer](tmp_path, saved)
    present = target["loader"].state
    kept = repr(present)
    if restores:
        sp.Checkpointer(tmp_path / "run").restore(target, step=path)
    else:
        sp.load(path, target)
    for key in ("scheduler", "scaler"):
        assert target[key].state_dict() == saved[key].state_dict()
    assert repr(target["loader"].state) == repr(saved["loader"].state)
    assert repr(present) == kept  # the load sets the state by load_state_dict only
    assert target["epoch"] == 3
    assert torch.equal(target["model"].weight, saved["model"].weight)


def test_dcp_gives_the_same_states(tmp_path: Path) -> None:
    saved, by_torch_itself, target = states(3), states(0), states(0)
    for state in (saved, by_torch_itself, target):
        state["loader"] = Bare(
            epoch=state["epoch"], averages={"a.b": torch.full((2,), float(state["epoch"]))}
        )
    path = by_dcp(tmp_path, saved)
    dcp.load(by_torch_itself, checkpoint_id=path)
    sp.load(path, target)
    for key in ("scheduler", "scaler", "loader"):
        assert repr(target[key].state_dict()) == repr(by_torch_itself[key].state_dict())


@pytest.mark.parametrize("rename", [None, {"renamed": "loader"}])
@pytest.mark.parametrize("writer", ["dcp", "dcp converted"])
def test_recorded_paths_tell_how_keys_are_nested(
    tmp_path: Path, writer: str, rename: dict[str, str] | None
) -> None:
    inner = {"a.b": torch.ones(2), "c": {"d.e": 1}, "rows": [{"x": 1}, {"x": torch.zeros(1)}]}
    path = WRITERS[writer](tmp_path, {"loader": Bare(inner=inner, later=2)})
    target = Bare(later=0)
    sp.load(path, {"renamed" if rename else "loader": target}, rename=rename)
    assert repr(target.state) == repr({"later": 2, "inner": inner})


@pytest.mark.parametrize("state", [{"slots": {0: torch.ones(2)}}, {"slots": {"layer.0": 1}}], ids=repr)
def test_a_nesting_that_nothing_tells_is_refused_with_a_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: dict[str, Any]
) -> None:
    torch.save({"bare": state, "epoch": 1}, tmp_path / "a.pt")
    target = {"bare": Bare(slots={}), "epoch": 0}
    with pytest.raises(
        KeyMismatchError, match="bare: expected the state of the object, found a key"
    ) as caught:
        sp.load(tmp_path / "a.pt", target)
    assert "Load a nested dict with these keys in the place of the object, and give it to load" in str(
        caught.value
    )
    with caplog.at_level(logging.WARNING, logger="shardproof"):
        report = sp.load(tmp_path / "a.pt", target, strict=False)
    assert report.missing == ("bare",)
    assert "bare is left as it is" in caplog.text
    assert (target["bare"].state, target["epoch"]) == ({"slots": {}}, 1)

    ((name, value),) = state["slots"].items()
    remedy = {"slots": {name: torch.zeros(2) if isinstance(value, torch.Tensor) else 0}}
    sp.load(tmp_path / "a.pt", {"bare": remedy, "epoch": 0})
    target["bare"].load_state_dict(remedy)
    assert repr(target["bare"].state) == repr(state)


def test_a_list_with_a_gap_is_refused(tmp_path: Path) -> None:
    sp.save(tmp_path / "a", {"bare": {"rows": [torch.ones(1), torch.ones(1)]}})
    with pytest.raises(KeyMismatchError, match=r"bare: .* how bare.rows.1 is nested"):
        sp.load(tmp_path / "a", {"bare": Bare(rows=[torch.zeros(1)])}, exclude="bare.rows.0")


def test_values_that_the_checkpoint_lacks_are_missing(tmp_path: Path) -> None:
    sp.save(tmp_path / "a", {"bare": {"epoch": 1, "w": torch.ones(1)}})
    for options in ({"strict": False}, {"exclude": ["bare.rows", "bare.later"]}):
        target = Bare(epoch=0, w=torch.zeros(1), rows={"x": 5}, later=[7])
        if "exclude" not in options:
            with pytest.raises(
                KeyMismatchError, match=r"missing in the checkpoint \(2.*\n.*bare.later\n.*bare.rows.x"
            ):
                sp.load(tmp_path / "a", {"bare": target})
        report = sp.load(tmp_path / "a", {"bare": target}, **options)
        assert report.missing == (() if "exclude" in options else ("bare.later", "bare.rows.x"))
        assert repr(target.state) == repr({"epoch": 1, "w": torch.ones(1), "rows": {"x": 5}, "later": [7]})


def test_a_selection_below_the_key_of_an_object_leaves_the_rest(tmp_path: Path) -> None:
    sp.save(tmp_path / "a", {"bare": {"epoch": 1, "seed": 1}})
    target = Bare(epoch=0, seed=0)
    sp.load(tmp_path / "a", {"bare": target}, include="bare.epoch")
    assert target.state == {"epoch": 1, "seed": 0}
    sp.load(tmp_path / "a", {"bare": target}, exclude="bare.epoch")
    assert target.state == {"epoch": 1, "seed": 1}


def test_a_damaged_tensor_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    weights = torch.arange(1000.0)
    by_dcp(tmp_path, {"bare": Bare(epoch=1, weights=weights)})
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(weights.numpy().tobytes()) + 8] ^= 1
    file.write_bytes(data)
    present = {"epoch": 0, "weights": torch.zeros(1000)}
    target = Bare(**present)
    with pytest.raises(CorruptChunkError, match="CRC-32"):
        sp.load(tmp_path / "dcp", {"bare": target})
    assert target.state == present and not present["weights"].any()


def test_a_dict_takes_the_plain_state_of_an_object(tmp_path: Path) -> None:
    saved, fresh = states(3), states(0)
    as_objects(tmp_path, saved)
    target = {key: fresh[key].state_dict() for key in ("scheduler", "scaler")}
    inner = target["scheduler"]
    sp.load(tmp_path / "objects", target, include=["scheduler", "scaler"])
    assert target == {key: saved[key].state_dict() for key in target}
    assert target["scheduler"] is inner


@pytest.mark.parametrize("target", [{"epoch": 0}, Loader(0).state], ids=["other keys", "tensors"])
def test_a_dict_that_the_state_of_an_object_does_not_fit_names_the_object(
    tmp_path: Path, target: dict[str, Any]
) -> None:
    as_objects(tmp_path, states(3))
    with pytest.raises(
        KeyMismatchError, match=r"different \(1; .*\n.*put the object itself into the target"
    ) as caught:
        sp.load(tmp_path / "objects", {"loader": target}, include="loader")
    assert caught.value.details["unexpected"] == []
    loader = Loader(0)
    sp.load(tmp_path / "objects", {"loader": loader}, include="loader")
    assert repr(loader.state) == repr(Loader(3).state)


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_the_counts_of_a_schedule_are_replaced_and_not_added(writer: str, tmp_path: Path) -> None:
    def schedule() -> torch.optim.lr_scheduler.MultiStepLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5])

    saved, target = schedule(), schedule()
    sp.load(WRITERS[writer](tmp_path, {"scheduler": saved}), {"scheduler": target})
    assert target.milestones == saved.milestones == {3: 1, 5: 2}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_warns_of_an_object_that_stays_as_it_is(
    rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another rank may have no such object."""
    stored = Catalogue({}, {}, {"loader.a.0": 1}, 2)
    bind({"loader": Bare()}, stored, rank=rank, world_size=2, strict=False)
    assert "loader is left as it is" in caplog.text
