import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.geometry import stable_order

LOW, HIGH = -(2**63), 2**63 - 1


@given(st.lists(st.integers(-3, 3) | st.integers(0, 2**40) | st.sampled_from([LOW, HIGH, 0]), max_size=40))
def test_stable_order_is_a_stable_sort(values):
    keys = np.array(values, np.int64)
    order = stable_order(keys)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(len(values)), key=values.__getitem__)
    assert keys.tolist() == values, "the keys were changed"


@pytest.mark.parametrize("spread", [2**52 - 1, 2**52, 2**53])
def test_keys_are_sorted_with_and_without_room_for_the_row_number(spread):
    rows = 1 << 11
    keys = np.random.default_rng(0).integers(0, 7, rows) * (spread // 7) - 5
    keys[7], keys[1500] = -5, spread - 5
    assert stable_order(keys).tolist() == np.argsort(keys, kind="stable").tolist()
