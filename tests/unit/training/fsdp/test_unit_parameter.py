"""Flat buffers place every element once, cut no row, and pad little."""

from __future__ import annotations

from math import lcm, prod

from hypothesis import given
from hypothesis import strategies as st

from shardproof.training.fsdp.unit_parameter import Packing, pack

SHAPES = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple), max_size=8)


def row_of(shape: tuple[int, ...]) -> int:
    return prod(shape[1:]) or 1


@given(SHAPES, st.integers(1, 7), st.sampled_from([1, 4, 16]))
def test_every_element_is_placed_once_and_no_row_is_cut(
    shapes: list[tuple[int, ...]], ranks: int, alignment: int
) -> None:
    packings = pack(shapes, ranks, alignment)
    assert sorted(member for packing in packings for member in packing.members) == list(range(len(shapes)))
    for packing in packings:
        taken = bytearray(packing.size)
        for shape, start in zip(packing.shapes, packing.starts, strict=True):
            for element in range(start, start + prod(shape)):
                assert not taken[element]
                taken[element] = 1
            cuts = [rank * packing.shard for rank in range(1, ranks)]
            assert all(
                (cut - start) % row_of(shape) == 0 for cut in cuts if start < cut < start + prod(shape)
            )


@given(SHAPES, st.integers(1, 7))
def test_the_rows_of_all_ranks_are_the_whole_in_order(shapes: list[tuple[int, ...]], ranks: int) -> None:
    for packing in pack(shapes, ranks):
        for member, shape in enumerate(packing.shapes):
            rows = [packing.rows(member, rank) for rank in range(ranks)]
            held = [row for first, stop in rows for row in range(first, stop)]
            assert held == (list(range(shape[0])) if prod(shape) else [])
            for rank in range(ranks):
                start, stop = packing.elements(member, rank)
                assert 0 <= start <= stop <= packing.shard
                assert stop - start == (rows[rank][1] - rows[rank][0]) * prod(shape[1:])
                if start < stop:
                    first = packing.starts[member] + rows[rank][0] * prod(shape[1:])
                    assert rank * packing.shard + start == first


@given(SHAPES, st.integers(1, 7), st.sampled_from([1, 16]))
def test_padding_is_bounded(shapes: list[tuple[int, ...]], ranks: int, alignment: int) -> None:
    for packing in pack(shapes, ranks, alignment):
        unit = lcm(*(row_of(shape) for shape in packing.shapes))
        gaps = sum(max(row_of(s), 64 * alignment, prod(s) // 16) for s in packing.shapes)
        assert packing.size - sum(map(prod, packing.shapes)) <= ranks * unit + gaps


def test_parameters_of_incompatible_row_sizes_get_their_own_buffers() -> None:
    together = pack([(64, 48), (64, 24), (64,)], 4)
    apart = pack([(9, 101), (9, 103), (9,)], 4)
    assert [packing.members for packing in together] == [(0, 1, 2)]
    assert [packing.members for packing in apart] == [(1, 2), (0,)]
    assert len(pack([(100_000, 3), (100_000, 5)], 4)) == 1  # 15 elements are little beside them


def test_the_packing_of_a_transformer_pads_by_less_than_a_thousandth() -> None:
    width = 768
    shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    (packing,) = pack(shapes, 8)
    elements = sum(map(prod, shapes))
    assert elements <= packing.size < elements * 1.001 + 8 * 4 * width
    assert isinstance(packing, Packing)
