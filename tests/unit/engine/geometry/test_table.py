"""`BoxTable`, compared with a list of pairs."""

from __future__ import annotations

from itertools import chain
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.geometry import Boxes, BoxTable, consecutive, cut, row_pointers

Pair = tuple[tuple[int, ...], tuple[int, ...]]

sides = st.tuples(st.integers(0, 5), st.integers(1, 4))
pairs_of_boxes = st.lists(
    st.lists(sides, max_size=3).map(lambda box: (tuple(o for o, _ in box), tuple(s for _, s in box))),
    max_size=6,
)


def table_of(pairs: list[Pair]) -> BoxTable:
    offsets, sizes = (
        np.array(list(chain.from_iterable(pair[side] for pair in pairs)), np.int64) for side in (0, 1)
    )
    return BoxTable.of([len(pair[0]) for pair in pairs], offsets, sizes)


def pairs_of(table: BoxTable) -> list[Pair]:
    assert len(table.offsets) == len(table.sizes) == table.start[-1]
    assert table.start[0] == 0
    return [table.pair(row) for row in range(len(table))]


@given(pairs_of_boxes)
def test_a_table_holds_its_boxes(pairs: list[Pair]) -> None:
    table = table_of(pairs)
    assert pairs_of(table) == pairs
    assert table.ndim.tolist() == [len(offsets) for offsets, _ in pairs]
    assert table.volumes().tolist() == [prod(sizes) for _, sizes in pairs]


@given(pairs_of_boxes, st.data())
def test_rows_are_taken_in_any_order(pairs: list[Pair], data: st.DataObject) -> None:
    table = table_of(pairs)
    rows = data.draw(st.lists(st.integers(0, len(pairs) - 1), max_size=8)) if pairs else []
    assert pairs_of(table.take(np.array(rows, np.int64))) == [pairs[row] for row in rows]
    first, stop = sorted((data.draw(st.integers(0, len(pairs))), data.draw(st.integers(0, len(pairs)))))
    assert pairs_of(table.between(first, stop)) == pairs[first:stop]


@given(pairs_of_boxes)
def test_groups_have_each_row_once_and_rebuild_the_table(pairs: list[Pair]) -> None:
    table = table_of(pairs)
    groups = list(table.groups())
    assert sorted(chain.from_iterable(rows.tolist() for rows, _ in groups)) == list(range(len(pairs)))
    dimensions = [boxes.ndim for _, boxes in groups]
    assert dimensions == sorted(set(dimensions))
    for rows, boxes in groups:
        assert [boxes.pair(at) for at in range(len(boxes))] == [pairs[row] for row in rows.tolist()]
    assert pairs_of(BoxTable.of_groups(table.ndim, groups[::-1])) == pairs


@given(pairs_of_boxes, st.data())
def test_each_box_is_cut_as_if_it_were_alone(pairs: list[Pair], data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.integers(1, 9), min_size=len(pairs), max_size=len(pairs)))
    parts, box, first = table_of(pairs).cut(np.array(limits, np.int64))
    expected = []
    for row, (pair, limit) in enumerate(zip(pairs, limits, strict=True)):
        done = 0
        alone, _ = cut(Boxes.of(pair), np.array([limit]))
        for at in range(len(alone)):
            expected.append((alone.pair(at), row, done))
            done += prod(alone.pair(at)[1])
    assert list(zip(pairs_of(parts), box.tolist(), first.tolist(), strict=True)) == expected


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 4)), max_size=6))
def test_consecutive_joins_ranges(ranges: list[tuple[int, int]]) -> None:
    first, count = np.array(ranges, np.int64).reshape(-1, 2).T
    expected = [number for begin, length in ranges for number in range(begin, begin + length)]
    assert consecutive(first, count).tolist() == expected
    pointers = row_pointers(count)
    assert pointers.dtype == np.int64
    assert pointers.tolist() == [sum(length for _, length in ranges[:at]) for at in range(len(ranges) + 1)]


def test_a_box_too_large_to_count_is_refused() -> None:
    with pytest.raises(OverflowError):
        table_of([((0, 0), (2**32, 2**32))]).volumes()
