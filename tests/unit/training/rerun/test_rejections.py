"""The built-in rejections."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.training.rerun.rejections import Spike, UnexpectedlyLarge, not_finite


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, False),
        (10**12, False),
        (math.nan, True),
        (-math.inf, True),
        (torch.tensor(2.0), False),
        (torch.tensor([1.0, math.nan]), True),
        (torch.tensor([1, 2]), False),
        (torch.zeros(0), False),
        (torch.tensor([math.nan]).to(torch.float8_e4m3fn), True),
        (torch.tensor([1.0, math.inf], requires_grad=True), True),
    ],
)
def test_not_finite(value: Any, expected: bool) -> None:
    assert not_finite(value) is expected


def accepted(rejection: Any, *values: Any) -> Any:
    for value in values:
        rejection.accept(value)
    return rejection


def test_a_large_value_is_compared_with_the_maximum_of_the_window() -> None:
    large = accepted(UnexpectedlyLarge(2.0, window=3), 100.0, 1.0, -5.0, 2.0)
    assert not large(10.0)
    assert large(10.1)
    assert large(-10.1)
    assert large(torch.tensor([0.0, -11.0]))
    assert not large(torch.zeros(0))


@pytest.mark.parametrize("rejection", [UnexpectedlyLarge(2.0, window=3), Spike(2.0, window=3)])
def test_finite_values_are_not_rejected_before_the_window_is_full(rejection: Any) -> None:
    accepted(rejection, 1.0, 1.0)
    assert not rejection(1e30)
    assert rejection(math.nan)
    assert rejection(math.inf)
    accepted(rejection, 1.0)
    assert rejection(1e30)


@pytest.mark.parametrize("make", [UnexpectedlyLarge, Spike])
def test_a_call_does_not_change_the_state(make: Any) -> None:
    rejection = accepted(make(2.0, window=2), 1.0, 2.0)
    before = rejection.state_dict()
    assert [rejection(9.0), rejection(9.0)] == [True, True]
    assert rejection.state_dict() == before


@pytest.mark.parametrize("make", [UnexpectedlyLarge, Spike])
def test_values_that_are_not_finite_do_not_enter_the_window(make: Any) -> None:
    rejection = accepted(make(2.0, window=2), 1.0, 1.5, math.inf, math.nan)
    assert rejection(100.0)


@pytest.mark.parametrize("make", [UnexpectedlyLarge, Spike])
def test_a_saved_state_loads_into_another_rejection(make: Any) -> None:
    saved = json.loads(json.dumps(accepted(make(2.0, window=4), 1.0, 2.0, 3.0, 2.0).state_dict()))
    again = make(2.0, window=4)
    again.load_state_dict(saved)
    assert again(1000.0)
    shorter = make(2.0, window=2)
    shorter.load_state_dict(saved)
    assert shorter.state_dict() == {"values": [3.0, 2.0]}


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=30),
    st.floats(-1e7, 1e7),
    st.floats(0.5, 10.0),
)
def test_a_spike_is_threshold_deviations_above_the_mean(
    values: list[float], value: float, threshold: float
) -> None:
    spike = accepted(Spike(threshold, window=5), *values)
    last = values[-5:]
    mean, deviation = statistics.fmean(last), statistics.pstdev(last)
    limit = mean + threshold * max(deviation, 1e-6 * abs(mean))
    if abs(value - limit) > 1e-9 * max(abs(limit), 1.0):
        assert spike(value) is (value > limit)


def test_rounding_is_no_spike() -> None:
    spike = accepted(Spike(6.0, window=3), 2.0, 2.0, 2.0)
    assert not spike(2.0 + 1e-9)
    assert spike(2.001)


@pytest.mark.parametrize("make", [UnexpectedlyLarge, Spike])
def test_invalid_settings_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="threshold"):
        make(0.0)
    with pytest.raises(ValueError, match="threshold"):
        make(math.nan)
    with pytest.raises(ValueError, match="window"):
        make(2.0, window=1)
