"""Injected faults: which runs of which calls see a wrong value."""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.training.rerun.injection import FaultInjector, FaultKind, Run

HERE, ELSEWHERE = "device 0 of node a", "device 0 of node b"


def is_wrong(
    injector: FaultInjector, run: Run, identity: str = HERE, *, step: int = 3, call: int = 0
) -> bool:
    return math.isnan(injector.apply(1.0, step=step, rank=0, call=call, run=run, identity=identity))


@pytest.mark.parametrize(
    ("kind", "in_place", "same_device", "elsewhere"),
    [
        ("transient", False, False, False),
        ("persistent", True, True, False),
        ("correct", True, True, True),
    ],
)
def test_the_kind_of_fault_decides_which_runs_are_hit(
    kind: FaultKind, in_place: bool, same_device: bool, elsewhere: bool
) -> None:
    injector = FaultInjector(kind, steps=[3])
    assert is_wrong(injector, "initial")
    assert is_wrong(injector, "in place") is in_place
    for identity, expected in ((HERE, same_device), (ELSEWHERE, elsewhere)):
        resumed = FaultInjector(kind, steps=[3])
        resumed.load_state_dict(json.loads(json.dumps(injector.state_dict())))
        assert is_wrong(resumed, "from checkpoint", identity) is expected


def test_every_call_of_a_step_is_hit_on_the_device_where_it_began() -> None:
    injector = FaultInjector("persistent", steps=[3])
    for run in ("initial", "in place"):
        assert [is_wrong(injector, run, call=call) for call in range(3)] == [True] * 3


def test_a_persistent_fault_without_saved_state_hits_nothing() -> None:
    assert not is_wrong(FaultInjector("persistent", steps=[3]), "from checkpoint")


def test_other_steps_and_ranks_are_not_hit() -> None:
    injector = FaultInjector("correct", steps=[3], ranks=[1])
    hit = {
        (step, rank)
        for step, rank in product(range(6), range(3))
        if injector.hits(step=step, rank=rank, call=0)
    }
    assert hit == {(3, 1)}


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 5))
def test_a_draw_depends_only_on_seed_step_rank_and_call(seed: int, step: int, rank: int, call: int) -> None:
    first, second = (FaultInjector("correct", rate=0.5, seed=seed) for _ in range(2))
    at = {"step": step, "rank": rank, "call": call}
    second.hits(step=step + 1, rank=rank, call=call)
    assert first.hits(**at) == second.hits(**at)


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_the_rate_holds_over_steps_ranks_calls_and_seeds(rate: float) -> None:
    places = list(product(range(50), range(8), range(2), range(20)))
    hits = sum(
        FaultInjector("correct", rate=rate, seed=seed).hits(step=step, rank=rank, call=call)
        for step, rank, call, seed in places
    )
    assert hits / len(places) == pytest.approx(rate, rel=0.15)


def test_the_injected_value_is_nan_or_scaled() -> None:
    def hit(value: Any, factor: float | None = None) -> Any:
        injector = FaultInjector("correct", rate=1.0, factor=factor)
        return injector.apply(value, step=0, rank=0, call=0, run="initial", identity=HERE)

    assert math.isnan(hit(2.0))
    assert hit(2.0, 100.0) == 200.0
    right = torch.ones(2, requires_grad=True)
    loss = right * 3.0
    wrong = hit(loss)
    assert wrong.isnan().all()
    assert not wrong.requires_grad
    assert hit(loss, 2.0).tolist() == [6.0, 6.0]
    assert loss.tolist() == [3.0, 3.0]
    loss.sum().backward()
    assert right.grad is not None
    assert right.grad.tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match="set factor= of the injector"):
        hit(torch.tensor([1]))


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="transient, persistent, correct"):
        FaultInjector("sporadic", rate=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from 0 to 1"):
        FaultInjector("correct", rate=1.5)
    with pytest.raises(ValueError, match="nothing would be injected"):
        FaultInjector("correct")
