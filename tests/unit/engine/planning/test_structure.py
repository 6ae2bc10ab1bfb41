"""Packed columns of integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.planning.structure import pack, unpack

LOW, HIGH = -(2**63), 2**63 - 1


@given(st.lists(st.integers(LOW, HIGH) | st.integers(-3, 300) | st.sampled_from([LOW, HIGH, 0])))
def test_a_packed_column_round_trips(values: list[int]) -> None:
    column = np.array(values, np.int64)
    found = unpack(pack(column))
    assert found.dtype == np.int64
    assert found.tolist() == values


@pytest.mark.parametrize("step", [0, 1, -7, 2**40])
def test_evenly_spaced_values_take_no_bytes(step: int) -> None:
    column = np.arange(1000) * step + 5
    packed = pack(column)
    assert packed.data == b""
    assert unpack(packed).tolist() == column.tolist()


@pytest.mark.parametrize(("range_", "width"), [(255, 1), (256, 2), (65536, 4), (2**32, 8)])
def test_a_value_takes_the_bytes_that_the_range_needs(range_: int, width: int) -> None:
    packed = pack(np.array([2**50, 2**50 + range_, 2**50 + 1]))
    assert (packed.width, len(packed.data)) == (width, 3 * width)
