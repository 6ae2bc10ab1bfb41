"""Read plans: comparing few chunks pairwise and searching many chunks find the same pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.planning import read_plan as reading
from shardproof.geometry import Boxes


@given(seed=st.integers(0, 10_000), tensors=st.integers(1, 12), each=st.integers(1, 5))
def test_comparing_and_searching_find_the_same_pairs(seed: int, tensors: int, each: int) -> None:
    draw = np.random.default_rng(seed)
    chunk_tensor = np.repeat(np.arange(tensors), each)
    rows = np.tile(np.arange(each) * 4, tensors)
    chunks = Boxes(np.stack([rows, 0 * rows], axis=1), np.full((len(rows), 2), 4))
    want_tensor = draw.integers(0, tensors, 15)
    offsets = draw.integers(0, 4 * each, (15, 2)) % [4 * each, 4]
    wants = Boxes(offsets, draw.integers(1, 6, (15, 2)))
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for most in (0, 10**9):
            patch.setattr(reading, "_PAIRS_EACH", most)
            found.append(reading._pairs(wants, want_tensor, chunks, chunk_tensor))
    for one, other in zip(*found, strict=True):
        assert one.tolist() == other.tolist()
    assert len(found[0][0]) >= 15
