"""Copies by address: short and long ranges, whole, and no byte beside them."""

from __future__ import annotations

import numpy as np
import pytest

from shardproof._utils.libc import copy_runs


@pytest.mark.parametrize("longest", [1, 16 << 10, (16 << 10) + 1, 70_000])
def test_ranges_are_copied_whole_and_no_byte_beside_them(longest: int) -> None:
    counts = [longest, 0, 7, longest // 2]
    begins = [3, 3, 3 + longest + 5, 3 + longest + 5 + 7 + 2]
    source = np.arange(1, 3 * longest + 101, dtype=np.int64).astype(np.uint8) | 1
    target, expected = np.zeros_like(source), np.zeros_like(source)
    for begin, count in zip(begins, counts, strict=True):
        expected[begin : begin + count] = source[begin + 1 : begin + 1 + count]
    first, into = source.ctypes.data + 1, target.ctypes.data
    copy_runs([into + begin for begin in begins], [first + begin for begin in begins], counts)
    assert np.array_equal(target, expected)
