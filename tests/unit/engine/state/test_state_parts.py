"""Objects with `state_tree`: stored below a reserved segment, optional in the checkpoint and in the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.loading import LoadReport
from shardproof.state import collect


class Counter:
    """Plain data and a tensor of any length, as an object with state_dict."""

    def __init__(self, count: int, length: int = 0) -> None:
        self.count = count
        self.data = torch.full((length,), count, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "bad": float("nan"), "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.data = state["count"], state["data"]


class Machine:
    """State that all ranks share, and state of each rank."""

    def __init__(self, count: int = 0, length: int = 0) -> None:
        self.job = Plain({"count": count})
        self.own = Counter(count, length)
        self.loaded: list[tuple[int, int]] = []

    def state_tree(self) -> dict[str, Any]:
        return {"job": self.job, "own": sp.PerRank(self.own)}

    def state_loaded(self) -> None:
        self.loaded.append((self.job.state["count"], self.own.count))


class Plain:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Checked(Machine):
    """Inspects the stored state before it is loaded."""

    def __init__(self, answer: bool | None = None) -> None:
        super().__init__(-1)
        self.answer = answer
        self.stored: dict[str, Any] = {}

    def check_stored(self, stored: dict[str, Any]) -> bool | None:
        self.stored = stored
        return self.answer


def test_the_keys_of_a_part_lie_below_its_reserved_segment() -> None:
    collected = collect({"rerun": Machine(3)}, rank=2, world_size=4)
    assert [entry.key for entry in collected.objects] == ["rerun.@part.job", "rerun.@part.own.@rank-2"]
    assert [entry.key for entry in collected.tensors] == ["rerun.@part.own.@rank-2.data"]


@pytest.mark.parametrize("nest", [lambda machine: machine, lambda machine: [machine]])
def test_state_loaded_runs_once_after_the_whole_part_is_loaded(tmp_path: Path, nest: Any) -> None:
    sp.save(tmp_path, {"w": torch.ones(2), "rerun": nest(Machine(5, 7))})
    machine = Machine(0, 2)
    report = sp.load(tmp_path, {"w": torch.zeros(2), "rerun": nest(machine)})
    assert machine.loaded == [(5, 5)], "once, and after everything of it is set"
    assert machine.own.data.tolist() == [5] * 7
    assert report.unchanged == report.unexpected == ()


def test_a_checkpoint_without_the_part_leaves_it_as_it_is(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.ones(2)})
    machine, w = Checked(), torch.zeros(2)
    report = sp.load(tmp_path, {"w": w, "rerun": machine})
    assert (machine.loaded, machine.own.count, machine.stored) == ([], -1, {})
    assert w.tolist() == [1, 1]
    assert report.unchanged == ("rerun.@part",)


def test_a_checkpoint_with_the_part_loads_into_a_state_without(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.ones(2), "rerun": Machine(5, 1)})
    w = torch.zeros(2)
    report = sp.load(tmp_path, {"w": w})
    assert w.tolist() == [1, 1]
    assert report.unexpected == (
        "rerun.@part.job",
        "rerun.@part.own.@rank-0",
        "rerun.@part.own.@rank-0.data",
    )


def test_other_keys_of_the_checkpoint_are_still_unexpected(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.ones(2), "rerun": Machine(5), "other": 1})
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(tmp_path, {"w": torch.zeros(2)})
    assert caught.value.details["unexpected"] == ["other"]


def test_a_part_that_both_sides_have_must_have_the_same_keys(tmp_path: Path) -> None:
    class Other(Machine):
        def state_tree(self) -> dict[str, Any]:
            return {"job": self.job, "more": self.own}

    sp.save(tmp_path, {"rerun": Machine(5)})
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(tmp_path, {"rerun": Other()})
    assert caught.value.details["missing"] == ["rerun.@part.more"]
    assert caught.value.details["unexpected"] == [
        "rerun.@part.own.@rank-0",
        "rerun.@part.own.@rank-0.data",
    ]


def test_a_part_and_a_plain_value_do_not_load_into_each_other(tmp_path: Path) -> None:
    sp.save(tmp_path, {"rerun": Machine(5)})
    with pytest.raises(sp.KeyMismatchError, match="rerun: expected a plain value"):
        sp.load(tmp_path, {"rerun": 1})
    sp.save(tmp_path / "plain", {"rerun": 1})
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(tmp_path / "plain", {"rerun": Machine()})
    assert caught.value.details["unexpected"] == ["rerun"]


@pytest.mark.parametrize("answer", [None, True])
def test_a_part_sees_what_all_ranks_share_before_it_is_loaded(tmp_path: Path, answer: bool | None) -> None:
    sp.save(tmp_path, {"rerun": Machine(5, 3)})
    machine = Checked(answer)
    sp.load(tmp_path, {"rerun": machine})
    assert machine.stored == {"job": {"count": 5}}
    assert machine.loaded == [(5, 5)]


def test_a_part_may_refuse_before_anything_is_overwritten(tmp_path: Path) -> None:
    class Refusing(Machine):
        def check_stored(self, stored: dict[str, Any]) -> None:
            raise sp.StructureError(f"no to {stored}")

    sp.save(tmp_path, {"a": torch.ones(2), "rerun": Machine(5), "z": torch.ones(2)})
    machine, a, z = Refusing(1), torch.zeros(2), torch.zeros(2)
    with pytest.raises(sp.StructureError, match="no to"):
        sp.load(tmp_path, {"a": a, "rerun": machine, "z": z})
    assert (a.tolist(), z.tolist(), machine.own.count) == ([0, 0], [0, 0], 1)


def test_a_part_may_decline_the_stored_state(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.ones(2), "rerun": Machine(5, 3)})
    machine, w = Checked(answer=False), torch.zeros(2)
    report = sp.load(tmp_path, {"w": w, "rerun": machine})
    assert (machine.loaded, machine.own.count, w.tolist()) == ([], -1, [1, 1])
    assert (report.unchanged, report.unexpected) == (("rerun.@part",), ())


def test_tensors_are_shown_as_none(tmp_path: Path) -> None:
    class Shared(Checked):
        def state_tree(self) -> dict[str, Any]:
            return {"job": self.job, "counter": self.own, "w": torch.zeros(1), "list": [1, (2,)]}

    sp.save(tmp_path, {"rerun": Shared()})
    machine = Shared()
    sp.load(tmp_path, {"rerun": machine})
    assert machine.stored == {
        "job": {"count": -1},
        "counter": None,
        "counter.data": None,
        "w": None,
        "list": [1, (2,)],
    }


def test_a_part_is_selected_whole_or_not_at_all(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.ones(2), "rerun": Machine(5, 3)})

    def load(**options: Any) -> tuple[LoadReport, Machine]:
        machine = Machine()
        return sp.load(tmp_path, {"w": torch.zeros(2), "rerun": machine}, **options), machine

    for options in ({"exclude": "rerun"}, {"include": "w"}):
        report, machine = load(**options)
        assert (machine.loaded, report.unchanged, report.unexpected) == ([], (), ())
    assert load(include="rerun")[1].loaded == [(5, 5)]
    with pytest.raises(sp.StructureError, match="only be loaded whole.*select 1 of its 3 keys"):
        load(include="rerun.@part.job")


def test_include_may_name_a_part_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.ones(2)})
    report = sp.load(tmp_path, {"w": torch.zeros(2), "rerun": Machine()}, include=["w", "rerun"])
    assert report.unchanged == ("rerun.@part",)


def test_optimizers_of_a_part_are_loaded_before_state_loaded_runs(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(2, 2)
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.steps: list[float] = []

        def train(self) -> Trainer:
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()
            return self

        def state_tree(self) -> dict[str, Any]:
            return {"model": self.model, "optimizer": self.optimizer}

        def state_loaded(self) -> None:
            self.steps = [float(state["step"]) for state in self.optimizer.state.values()]

    sp.save(tmp_path, {"trainer": Trainer().train()})
    trainer = Trainer()
    sp.load(tmp_path, {"trainer": trainer})
    assert trainer.steps == [1, 1]


@pytest.mark.parametrize("tree", [{}, None, [1]])
def test_a_part_without_a_dict_of_items_is_refused(tree: Any) -> None:
    class Odd:
        def state_tree(self) -> Any:
            return tree

    with pytest.raises(sp.StructureError, match="must return a dict with at least one item"):
        collect({"rerun": Odd()})


def test_parts_within_parts_are_optional_too(tmp_path: Path) -> None:
    class Outer(Machine):
        def __init__(self, inner: Machine | None = None) -> None:
            super().__init__(1)
            self.inner = inner

        def state_tree(self) -> dict[str, Any]:
            return {"job": self.job} | ({"inner": self.inner} if self.inner else {})

    sp.save(tmp_path / "with", {"outer": Outer(Machine(5))})
    sp.save(tmp_path / "without", {"outer": Outer()})
    assert len(sp.load(tmp_path / "with", {"outer": Outer()}).unexpected) == 3
    assert sp.load(tmp_path / "without", {"outer": Outer(Machine())}).unchanged == (
        "outer.@part.inner.@part",
    )
    inner = Machine()
    sp.load(tmp_path / "with", {"outer": Outer(inner)})
    assert inner.loaded == [(5, 5)]
