import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.geometry.boxes import INT64_MAX
from shardproof.geometry import Boxes, deduplicate
from tests.unit.engine.geometry import reference

small = st.integers(0, 2)
huge = st.sampled_from([0, 1, 2**31, 2**40, 2**62, INT64_MAX])
middling = st.sampled_from([0, 1, 2**31 - 1, 2**31])
signed = st.sampled_from([-INT64_MAX - 1, -1, 0, 3, INT64_MAX])


@given(
    st.data(),
    st.integers(0, 4),
    st.sampled_from([(small, small), (middling, middling), (huge, huge), (signed, huge)]),
)
def test_deduplicate_matches_unique_rows(data, ndim, numbers):
    offset, size = numbers
    rows = data.draw(
        st.lists(
            st.tuples(offset, *[offset] * ndim, *[size] * ndim),
            max_size=12,
        )
    )
    table = np.array(rows, np.int64).reshape(len(rows), 1 + 2 * ndim)
    tensor, boxes = table[:, 0], Boxes(table[:, 1 : 1 + ndim], table[:, 1 + ndim :])
    first, inverse = deduplicate(tensor, boxes)
    distinct = sorted(set(rows))
    assert [rows[row] for row in first] == distinct
    assert first.tolist() == [rows.index(row) for row in distinct]
    assert [distinct[group] for group in inverse] == rows


def test_deduplicate_keeps_the_first_of_many_replicas():
    shape = (64, 64)
    own = Boxes.of(*[((i, j), (8, 8)) for i in range(0, 64, 8) for j in range(0, 64, 8)])
    replicas = Boxes.concatenate([own] * 50)
    first, inverse = deduplicate(np.zeros(len(replicas), np.int64), replicas)
    assert first.tolist() == list(range(len(own)))
    assert inverse.tolist() == list(range(len(own))) * 50
    assert (reference.counts(shape, replicas.take(first)) == 1).all()


def test_deduplicate_sorts_columns_that_share_no_key():
    corners = np.indices((2, 2, 2, 2)).reshape(4, -1).T[::-1] * 2**31
    boxes = Boxes(corners[:, 1:].copy(), np.ones((16, 3), np.int64))
    first, inverse = deduplicate(corners[:, 0], boxes)
    assert first.tolist() == inverse.tolist() == list(range(15, -1, -1))


def test_deduplicate_needs_one_tensor_row_for_each_box():
    with pytest.raises(ValueError, match="2 boxes need as many tensor rows"):
        deduplicate(np.zeros(1, np.int64), Boxes.of(((), ()), ((), ())))
