"""The relative difference of two results, for every kind of value that a loss can be."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.training.rerun.step_run import relative_difference, reproduced

FLOATS = st.floats(width=64)
NUMBERS = st.one_of(FLOATS, st.integers())


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1.0, 1.0, 0.0),
        (0.0, -0.0, 0.0),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.inf, 1e308, math.inf),
        (math.nan, 0.0, math.inf),
        (math.nan, math.inf, math.inf),
        (0.0, 1e-300, 1.0),
        (2.0, -2.0, 2.0),
        (1.7e308, -1.7e308, 2.0),
        (4.0, 3.0, 0.25),
        (4, 3.0, 0.25),
        (True, True, 0.0),
        (True, False, 1.0),
        (7, 7, 0.0),
        (3 + 4j, 3 + 4j, 0.0),
        (3 + 4j, 3 - 4j, 2.0),
        (np.float32(0.5), np.float32(1.0), 0.5),
    ],
)
def test_known_differences(first: Any, second: Any, expected: float) -> None:
    assert relative_difference(first, second) == expected
    assert relative_difference(second, first) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (torch.tensor(math.nan), torch.tensor(math.nan), 0.0),
        (torch.tensor(math.inf), torch.tensor(-math.inf), math.inf),
        (torch.tensor(math.nan), torch.tensor(1.0), math.inf),
        (torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0]), 0.0),
        (torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]), 0.25),
        (torch.tensor([1.7e308], dtype=torch.float64), torch.tensor([-1.7e308], dtype=torch.float64), 2.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 1j]), 0.5),
        (torch.zeros(2), torch.zeros(1, 2), math.inf),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), math.inf),
        (torch.zeros(()), 0.0, math.inf),
        (torch.zeros(0, 3), torch.zeros(0, 3), 0.0),
        (torch.ones(2, dtype=torch.float8_e4m3fn), torch.ones(2, dtype=torch.float8_e4m3fn), 0.0),
        (np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.5),
    ],
)
def test_known_differences_of_tensors(first: Any, second: Any, expected: float) -> None:
    assert relative_difference(first, second) == expected
    assert relative_difference(second, first) == expected


@given(NUMBERS, NUMBERS)
def test_the_difference_is_zero_only_for_equal_numbers(first: float, second: float) -> None:
    same = first == second or (first != first and second != second)
    difference = relative_difference(first, second)
    assert (difference == 0.0) is same
    assert difference == relative_difference(second, first)
    assert difference <= 2.0 or math.isinf(difference)
    if math.isfinite(first) and math.isfinite(second) and (first < 0) is (second < 0):
        assert difference <= 1.0


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=8))
def test_the_difference_of_tensors_is_the_largest_of_their_elements(pairs: list[tuple[float, float]]) -> None:
    first, second = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    expected = max(relative_difference(*pair) for pair in pairs)
    assert relative_difference(first, second) == pytest.approx(expected, rel=1e-15, abs=1e-15)
    assert (relative_difference(first, second) == 0.0) is (expected == 0.0)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_integers_in_tensors_are_compared_exactly(first: int, second: int) -> None:
    difference = relative_difference(torch.tensor([first]), torch.tensor([second]))
    assert (difference == 0.0) is (first == second)
    near = first + 1 if first < 2**63 - 1 else first - 1
    assert relative_difference(torch.tensor([first]), torch.tensor([near])) > 0.0


def test_large_integers_are_compared_exactly() -> None:
    assert relative_difference(10**400, 10**400 + 1) > 0.0
    assert relative_difference(2**53, float(2**53) + 2) == float(Fraction(2, 2**53 + 2))
    top = torch.tensor([2**64 - 1], dtype=torch.uint64)
    assert relative_difference(top, torch.tensor([2**64 - 2], dtype=torch.uint64)) > 0.0
    assert relative_difference(top, top.clone()) == 0.0


def test_elements_beyond_the_first_portion_are_compared() -> None:
    first = torch.zeros((1 << 20) + 3)
    second = first.clone()
    second[-1] = 1.0
    assert relative_difference(first, second) == 1.0


def test_layout_and_gradient_do_not_matter() -> None:
    first = torch.arange(6.0).view(2, 3).t()
    second = torch.arange(6.0).view(2, 3).t().contiguous().requires_grad_()
    assert relative_difference(first, second) == 0.0


def test_other_types_need_a_function() -> None:
    with pytest.raises(TypeError, match=r"a dict cannot be compared.*compare="):
        relative_difference({}, {})


def test_a_difference_within_the_tolerance_is_reproduced() -> None:
    assert not reproduced(1.0, 1.0 + 1e-15)
    assert reproduced(1.0, 1.0 + 1e-15, tolerance=1e-14)
    assert not reproduced(math.nan, 1.0, tolerance=1e300)


def test_the_users_function_decides() -> None:
    assert reproduced(1.0, 5.0, compare=lambda a, b: 0.0)
    assert not reproduced(1.0, 1.0, compare=lambda a, b: 0.5, tolerance=0.1)
    assert reproduced("a", "a", compare=lambda a, b: torch.tensor(0.0).item())


def test_equal_results_are_reproduced_if_the_compare_function_returns_nan() -> None:
    def formula(first: float, second: float) -> float:
        return abs(first - second) / max(abs(first), abs(second))

    assert reproduced(math.nan, math.nan, compare=formula)
    assert reproduced(math.inf, math.inf, compare=formula)
    assert not reproduced(math.nan, 1.0, compare=formula)


@pytest.mark.parametrize("answer", [True, False, None, "same"])
def test_a_compare_function_that_returns_no_number_is_refused(answer: Any) -> None:
    with pytest.raises(TypeError, match=r"0\.0 if they are equal"):
        reproduced(1.0, 1.0, compare=lambda a, b: answer)
