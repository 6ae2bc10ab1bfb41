"""Which rank writes which chunk, compared with the best of all divisions of small cases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.planning.writers import choose_writers, find_shared


def written_by(
    holders: Sequence[Sequence[int]],
    chunks: Sequence[Sequence[int]],
    nodes: Sequence[int],
    cell_bytes: int = 1,
) -> list[list[int]]:
    """For each box the writer of each of its chunks."""
    group = np.array([box for box, ranks in enumerate(holders) for _ in ranks], np.int64)
    rank = np.array([rank for ranks in holders for rank in ranks], np.int64)
    chunk_group = np.array([box for box, sizes in enumerate(chunks) for _ in sizes], np.int64)
    chunk_bytes = np.array([size for sizes in chunks for size in sizes], np.int64)
    shared = find_shared(group, rank, len(nodes))
    chosen = choose_writers(
        group, rank, shared, chunk_group, chunk_bytes, np.array(nodes, np.int64), cell_bytes=cell_bytes
    )
    assert group[chosen].tolist() == chunk_group.tolist(), "a box is written by a rank that does not hold it"
    writers = iter(rank[chosen].tolist())
    return [[next(writers) for _ in sizes] for sizes in chunks]


def loads_of(writers: list[list[int]], chunks: Sequence[Sequence[int]], bins: Sequence[int]) -> np.ndarray:
    """Bytes of each bin, a rank being in `bins[rank]`."""
    loads = np.zeros(max(bins) + 1, np.int64)
    for ranks, sizes in zip(writers, chunks, strict=True):
        for rank, size in zip(ranks, sizes, strict=True):
            loads[bins[rank]] += size
    return loads


WORLD = 4
boxes = st.lists(
    st.tuples(
        st.lists(st.integers(0, WORLD - 1), min_size=1, unique=True),
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


def best(holders: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]], bins: Sequence[int]) -> int:
    """The smallest possible load of the fullest bin, found by trying every choice."""
    choices = [
        sorted({bins[rank] for rank in ranks})
        for ranks, sizes in zip(holders, chunks, strict=True)
        for _ in sizes
    ]
    sizes = [size for part in chunks for size in part]
    least = sum(sizes)
    loads = [0] * (max(bins) + 1)

    def descend(at: int) -> None:
        nonlocal least
        if max(loads) >= least:
            return
        if at == len(sizes):
            least = max(loads)
            return
        for choice in choices[at]:
            loads[choice] += sizes[at]
            descend(at + 1)
            loads[choice] -= sizes[at]

    descend(0)
    return least


@given(boxes, st.lists(st.integers(0, 2), min_size=WORLD, max_size=WORLD))
def test_the_fullest_node_and_rank_are_near_the_best(
    held: list[tuple[list[int], list[int]]], nodes: list[int]
) -> None:
    holders, chunks = [ranks for ranks, _ in held], [sizes for _, sizes in held]
    largest = max(max(sizes) for sizes in chunks)
    writers = written_by(holders, chunks, nodes)
    sets = [
        {tuple(sorted(ranks)) for ranks in holders if len(ranks) > 1 and rank in ranks}
        for rank in range(WORLD)
    ]
    # A part ends within half a chunk and a cell of its ideal end: one chunk and cell for each set.
    assert loads_of(writers, chunks, nodes).max() <= best(holders, chunks, nodes) + largest * max(
        map(len, sets)
    )
    each = list(range(WORLD))
    alone = written_by(holders, chunks, each)
    most = loads_of(alone, chunks, each).max()
    assert most <= best(holders, chunks, each) + (largest + 1) * max(1, *map(len, sets))
    assert alone == written_by([ranks[::-1] for ranks in holders], chunks, each), (
        "the order of holdings matters"
    )


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 3))
def test_full_replicas_are_even_to_within_a_chunk_of_the_mean(
    sizes: list[int], ranks_a_node: int, node_count: int
) -> None:
    world_size = ranks_a_node * node_count
    nodes = [rank // ranks_a_node for rank in range(world_size)]
    chunks = [[size] for size in sizes]
    writers = written_by([range(world_size)] * len(sizes), chunks, nodes)
    for bins in (nodes, list(range(world_size))):
        loads = loads_of(writers, chunks, bins)
        assert np.abs(loads - sum(sizes) / len(loads)).max() <= max(sizes) + 1
    line = [writer for part in writers for writer in part]
    assert line == sorted(line), "a rank's part is not contiguous"


def test_boxes_that_one_rank_alone_holds_count_as_its_load() -> None:
    writers = written_by([[0], [0, 1]], [[100], [10] * 10], [0, 1])
    assert writers == [[0], [1] * 10]


def test_crossing_sets_find_the_fair_division() -> None:
    """In a single pass, the first set would be halved, and rank 1 would write the second set as well."""
    holders = [[0, 1], [1, 2], [2]]
    writers = written_by(holders, [[1] * 100, [1] * 100, [1] * 100], [0, 1, 2])
    loads = loads_of(writers, [[1] * 100] * 3, [0, 1, 2])
    assert loads.max() - loads.min() <= 4


def test_a_node_with_more_ranks_gets_no_more() -> None:
    writers = written_by([range(6)], [[1] * 600], [0, 0, 0, 0, 0, 1])
    assert loads_of(writers, [[1] * 600], range(6)).tolist() == [60] * 5 + [300]


def test_small_chunks_fill_few_writers() -> None:
    writers = written_by([range(64)] * 64, [[1]] * 64, range(64), cell_bytes=16)
    assert len(set(itertools.chain(*writers))) == 4


@pytest.mark.parametrize("replicas", [2, 8])
def test_replicas_of_shards_are_halved_between_them(replicas: int) -> None:
    """Hybrid sharding: shard s is held by s, s + 16, s + 32 and so on, on other nodes."""
    shards = 16
    holders = [range(shard, shards * replicas, shards) for shard in range(shards)]
    chunks = [[4] * 16] * shards
    nodes = [rank // 4 for rank in range(shards * replicas)]
    loads = loads_of(written_by(holders, chunks, nodes), chunks, list(range(shards * replicas)))
    assert loads.tolist() == [64 // replicas] * (shards * replicas)


def test_nothing_to_write() -> None:
    assert written_by([], [], [0]) == []
