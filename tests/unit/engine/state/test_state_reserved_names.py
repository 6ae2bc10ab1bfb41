"""Saves and loads refuse names of the program that look like reserved keys of shardproof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.state.module_names import rename, share
from shardproof.errors import KeyMismatchError, StructureError
from shardproof.state import Catalogue, Layout, OptimizerState, PerRank, bind, collect, declare


def module_with(name: str, tensor: torch.Tensor | None = None) -> torch.nn.Module:
    module = torch.nn.Module()
    module._parameters[name] = torch.nn.Parameter(torch.ones(2) if tensor is None else tensor)
    return module


def nested(name: str) -> torch.nn.Module:
    module = torch.nn.Module()
    module._modules[name] = torch.nn.Linear(2, 2)
    return module


def renamed(segment: str) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    rename(module[0], segment)
    return module


def shared(key: str) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2, bias=False)
    share(module, "weight", key)
    return module


def named_by_layout(name: str) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2, bias=False)
    declare(module, "weight", replace(Layout.whole((2, 2)), name=name))
    return module


class Extra(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return {"x": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def with_extra(name: str) -> torch.nn.Module:
    module = torch.nn.Module()
    module._modules[name] = Extra()
    return module


class Part:
    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree

    def state_tree(self) -> dict[str, Any]:
        return self.tree


class StatefulObject:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def optimizer_of(names: dict[str, torch.Tensor], slot: str = "exp_avg") -> OptimizerState:
    optimizer = torch.optim.SGD(list(names.values()), lr=0.1)
    for parameter in names.values():
        optimizer.state[parameter] = {slot: torch.zeros(2)}
    return OptimizerState(optimizer, names=names)


def optimizer_with_names(name: str) -> torch.optim.Optimizer:
    return torch.optim.SGD([(name, torch.nn.Parameter(torch.ones(2)))], lr=0.1)


TREES: dict[str, tuple[Callable[[str], Any], str]] = {
    "an item": (lambda name: {name: 1}, ""),
    "a tensor": (lambda name: {name: torch.ones(2)}, ""),
    "a deeper item": (lambda name: {"a": [{name: torch.ones(2)}]}, "a.0."),
    "a parameter": (lambda name: {"m": module_with(name)}, "m."),
    "a module": (lambda name: {"m": nested(name)}, "m."),
    "a module that is the tree": (nested, ""),
    "extra state": (lambda name: {"m": with_extra(name)}, "m."),
    "a shared tensor": (lambda name: {"m": shared(name)}, "m."),
    "the name of a layout": (lambda name: {"m": named_by_layout(name)}, "m."),
    "a parameter of an optimizer": (lambda name: {"o": optimizer_of({name: torch.ones(2)})}, "o."),
    "a slot": (lambda name: {"o": optimizer_of({"w": torch.ones(2)}, name)}, "o.w."),
    "a name in an optimizer": (lambda name: {"o": optimizer_with_names(name)}, "o."),
    "an item of a part": (lambda name: {"p": Part({name: 1})}, "p.@part."),
    "an item of a rank's own": (lambda name: {"r": PerRank({name: torch.ones(2)})}, "r.@rank-0."),
}


@pytest.mark.parametrize("name", ["@part", "@rank-0", "@options", "a.@b", "@"])
@pytest.mark.parametrize("kind", TREES)
def test_a_reserved_name_is_refused_with_its_key(kind: str, name: str) -> None:
    make, above = TREES[kind]
    catalogue = Catalogue({}, {}, {"p.@part.x": 1, "r.@rank-0": 1}, 1)
    for walk in (collect, lambda tree: bind(tree, catalogue)):
        with pytest.raises(StructureError, match="are reserved") as caught:
            walk(make(name))
        key = caught.value.details["key"]
        assert key == above + name or key.startswith(f"{above}{name}."), key


def test_renaming_a_module_to_a_reserved_segment_is_refused() -> None:
    with pytest.raises(StructureError, match="are reserved"):
        collect({"m": renamed("@part")})


@pytest.mark.parametrize("name", ["@rank-0", "a.@b"])
def test_tensors_of_objects_under_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(StructureError, match="are reserved") as caught:
        collect({"loader": StatefulObject({"deep": {name: torch.ones(100)}})})
    assert caught.value.details["key"] == f"loader.deep.{name}"


def test_other_names_with_an_at_sign_are_saved_and_loaded(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {
            "user@rank-0": PerRank({"me@part": torch.full((2,), value), "x@rank-1": ObjectOfValue(value)}),
            "m": module_with("w@part", torch.full((2,), value)),
            "plain": {"inside": ({"@data": value},)},
        }

    class ObjectOfValue(StatefulObject):
        def __init__(self, value: float) -> None:
            super().__init__({"value": value})

    source, target = state(3.0), state(0.0)
    sp.save(tmp_path / "step", source)
    assert sp.load(tmp_path / "step", target).unchanged == ()
    assert target["user@rank-0"].value["me@part"].tolist() == [3, 3]
    assert target["user@rank-0"].value["x@rank-1"].state == {"value": 3.0}
    assert target["m"].get_parameter("w@part").tolist() == [3, 3]


def test_a_strict_load_reports_a_key_that_only_looks_like_a_part(tmp_path: Path) -> None:
    sp.save(tmp_path / "step", {"p": Part({"x": 1}), "y": 2})
    report = sp.load(tmp_path / "step", {"y": 0})
    assert report.unexpected == ("p.@part.x",), "the part is optional"
    with pytest.raises(KeyMismatchError, match=r"(?s)the target does not have.*'q\.@part': 'p\.@part\.x'"):
        sp.load(tmp_path / "step", {"y": 0}, rename={"q.@part": "p.@part.x"})
