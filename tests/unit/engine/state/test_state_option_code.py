"""Classes and functions among the options of any optimizer: stored by name, and taken from the target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardproof as sp
from tests.unit.engine.state.fake_checkpoint import saved


def _double(value: float) -> float:
    return 2 * value


def _triple(value: float) -> float:
    return 3 * value


def _state(options: dict[str, Any], lr: float = 0.25) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.parameters(), **options}], lr=lr, momentum=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _group(state: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = state["optimizer"].param_groups[0]
    return group


def test_the_target_keeps_its_own_and_takes_the_data_beside_them() -> None:
    """Also in containers, and for partials."""
    code = {"kind": nn.Linear, "hook": partial(_double, 3), "rules": [_double, {"bound": 7, "by": _triple}]}
    checkpoint = saved(_state(code))
    mine = {"kind": nn.Linear, "hook": _double, "rules": [_double, {"bound": 1, "by": _triple}]}
    target = _state(mine, lr=0.5)
    checkpoint.load(target)
    assert _group(target)["lr"] == 0.25
    assert _group(target)["kind"] is nn.Linear and _group(target)["hook"] is _double
    assert _group(target)["rules"] == [_double, {"bound": 7, "by": _triple}]


@pytest.mark.parametrize("mine", [_triple, nn.Linear])
def test_another_function_is_a_mismatch(mine: Callable[..., Any]) -> None:
    checkpoint = saved(_state({"hook": _double}))
    target = _state({"hook": mine})
    (mismatch,) = {item.found for item in checkpoint.bind(target).mismatched}
    assert mismatch == f"hook={__name__}._double; strict=False keeps that of the target"
    checkpoint.load(target, exact=False, strict=False)
    assert _group(target)["hook"] is mine


@pytest.mark.parametrize("mine", [{}, {"hook": None}])
def test_a_target_without_one_stays_without(mine: dict[str, Any]) -> None:
    target = _state(mine)
    saved(_state({"hook": _double})).load(target)
    assert {name: item for name, item in _group(target).items() if name == "hook"} == mine


def test_a_checkpoint_without_one_leaves_that_of_the_target() -> None:
    target = _state({"hook": _double})
    saved(_state({"hook": None})).load(target)
    assert _group(target)["hook"] is _double


def test_people_and_other_formats_get_the_name(tmp_path: Path) -> None:
    """A load of a copy still knows that it is a name."""
    sp.save(tmp_path / "one", _state({"hook": _double}))
    name = f"{__name__}._double"
    with sp.open(tmp_path / "one") as checkpoint:
        assert checkpoint["optimizer.weight.@options"]["options"]["hook"] == name
    sp.convert(tmp_path / "one", tmp_path / "file.pt", to="torch")
    with sp.open(tmp_path / "file.pt") as checkpoint:
        assert name in str({key: checkpoint[key] for key in checkpoint.objects})
    sp.convert(tmp_path / "one", tmp_path / "two", to="shardproof")
    target = _state({"hook": _triple})
    with pytest.raises(sp.KeyMismatchError, match=r"hook=.*_triple"):
        sp.load(tmp_path / "two", target)
    assert _group(target)["hook"] is _triple


def test_code_outside_of_options_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    """The `state_dict()` of an optimizer has classes among its values. The optimizer itself is stored."""
    state = _state({"kind": nn.Linear})
    with pytest.raises(sp.PlainDataError, match="the class .*Linear.* store the optimizer itself"):
        sp.save(tmp_path / "refused", {"optimizer": state["optimizer"].state_dict()})
    sp.save(tmp_path / "stored", {"model": state["model"], "optimizer": state["optimizer"]})
    target = _state({"kind": nn.Linear}, lr=0.5)
    sp.load(tmp_path / "stored", target)
    assert _group(target)["lr"] == 0.25
