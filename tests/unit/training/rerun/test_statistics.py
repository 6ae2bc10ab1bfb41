"""The bounded distribution, compared with the exact one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.state.plain_decode import decode
from shardproof.engine.state.plain_encode import encode
from shardproof.training.rerun.statistics import Differences

DIFFERENCES = st.one_of(st.just(0.0), st.floats(1e-18, 2.0), st.just(math.inf))


def of(values: list[float]) -> Differences:
    seen = Differences()
    for value in values:
        seen.add(value)
    return seen


@given(st.lists(DIFFERENCES, min_size=1, max_size=60), st.floats(0.0, 1.0))
def test_quantiles_are_those_of_the_values(values: list[float], share: float) -> None:
    found = of(values).quantile(share)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert found == pytest.approx(exact, rel=0.05)
    assert (found == 0.0) is (exact == 0.0)


@given(st.lists(DIFFERENCES, max_size=30), st.lists(DIFFERENCES, max_size=30))
def test_merged_differences_equal_those_counted_together(first: list[float], second: list[float]) -> None:
    merged = of(first)
    merged.merge(of(second))
    assert merged.state_dict() == of(first + second).state_dict()


@given(st.lists(DIFFERENCES, max_size=30))
def test_the_state_is_plain_data_and_loads_back(values: list[float]) -> None:
    state = of(values).state_dict()
    again = Differences()
    again.load_state_dict(decode(encode(state), path="state"))
    assert again.state_dict() == state
    assert str(again) == str(of(values))
    again.add(0.5)
    assert again.count == len(values) + 1


def test_memory_is_bounded() -> None:
    seen = of([math.ldexp(1.0 + part / 97, power) for power in range(-1000, 1000) for part in range(97)])
    assert len(seen.state_dict()["bins"]) <= 1024
    assert seen.quantile(1.0) == math.ldexp(1.0 + 96 / 97, 999)


def test_the_text_has_counts_and_quantiles() -> None:
    assert str(Differences()) == "none compared"
    assert str(of([0.0] * 5)) == "5 compared, none differed"
    text = str(of([0.0] * 998 + [1e-3, math.inf]))
    assert text == "1000 compared, 2 differed: p50 0, p90 0, p99 0, p99.9 1.0e-03, max inf"


def test_the_quantile_of_no_values_is_nan() -> None:
    assert math.isnan(Differences().quantile(0.5))


@pytest.mark.parametrize("difference", [-1.0, math.nan])
def test_a_negative_or_nan_difference_is_refused(difference: float) -> None:
    with pytest.raises(ValueError, match="from 0 up"):
        Differences().add(difference)


def test_a_share_is_between_0_and_1() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        of([1.0]).quantile(99)
