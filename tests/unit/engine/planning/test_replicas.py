"""Which replicas are compared in which turn, against a slow, obvious reference, and how they differ."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardproof.dtypes import DTYPES
from shardproof.engine.planning import RankPlan, Structure, TensorTable, WritePlan, plan_writes, writers
from shardproof.engine.planning.writers import find_shared
from shardproof.engine.saving.replica_check import chosen_slices, compare_replicas

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""
DTYPE_NAMES = ["uint8", "float32", "complex128"]


@dataclass
class Run:
    """Tensors, and for every rank the boxes that it holds: (tensor, box), in its own order."""

    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    held: list[list[tuple[int, Box]]]

    def structures(self) -> list[Structure]:
        keys = tuple(f"t{row:03}" for row in range(len(self.shapes)))
        table = TensorTable(keys, tuple(self.dtypes), tuple(self.shapes), ("",) * len(keys))
        structures = []
        for pieces in self.held:
            offsets = [offset for _, box in pieces for offset in box[0]]
            sizes = [size for _, box in pieces for size in box[1]]
            tensors = [row for row, _ in pieces]
            structures.append(Structure.build(table, [], tensors, offsets, sizes))
        return structures


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any tensors, each split along some dimensions, each part on any ranks (one at least)."""
    world_size = draw(st.integers(1, 5))
    shapes, dtypes = [], []
    held: list[list[tuple[int, Box]]] = [[] for _ in range(world_size)]
    for row in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        shapes.append(shape)
        dtypes.append(draw(st.sampled_from(DTYPE_NAMES)))
        cuts = []
        for size in shape:
            inner = draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set()
            bounds = [0, *sorted(inner), size]
            cuts.append(list(itertools.pairwise(bounds)))
        for part in itertools.product(*cuts):
            box = tuple(low for low, _ in part), tuple(high - low for low, high in part)
            for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
                held[rank].append((row, box))
    held = [draw(st.permutations(pieces)) for pieces in held]
    return Run(shapes, dtypes, held)


def elements(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(offset, offset + size) for offset, size in zip(*box, strict=True)]
    return set(itertools.product(*ranges))


def replicated(run: Run) -> dict[tuple[int, Box], list[int]]:
    """The ranks of every box that several ranks hold, except empty boxes."""
    holders = defaultdict(list)
    for rank, pieces in enumerate(run.held):
        for piece in pieces:
            if prod(piece[1][1]) > 0:
                holders[piece].append(rank)
    return {piece: ranks for piece, ranks in holders.items() if len(ranks) > 1}


def plans_of(run: Run, sample_bytes: int) -> tuple[WritePlan, list[RankPlan]]:
    plan = plan_writes(run.structures(), chunk_bytes=128, sample_bytes=sample_bytes)
    return plan, [RankPlan.decode(part.encode()) for part in plan.rank_plans()]


@given(runs(), st.sampled_from([64, 100, 256, 10_000]), st.integers(0, 2**32))
def test_turns_cover_every_replica_within_the_bound(run: Run, sample_bytes: int, first: int) -> None:
    _, parts = plans_of(run, sample_bytes)
    structures = run.structures()
    expected = replicated(run)
    turns = {part.shared.turns for part in parts}
    assert len(turns) == 1
    count = turns.pop()
    seen: dict[int, list[set[tuple[int, int, tuple[int, ...]]]]] = defaultdict(list)
    covered: dict[int, dict[tuple[int, Box], Counter[tuple[int, ...]]]] = {}
    for rank, (structure, part) in enumerate(zip(structures, parts, strict=True)):
        slices = part.shared.slices(structure)
        covered[rank] = defaultdict(Counter)
        for turn in range(first, first + count):
            rows = chosen_slices(slices, count, turn)
            assert slices.byte_count[rows].sum() <= sample_bytes
            compared = set()
            for row in rows.tolist():
                piece = run.held[rank][int(slices.box[row])]
                box = slices.boxes.pair(row)
                assert slices.byte_count[row] == prod(box[1]) * DTYPES[run.dtypes[piece[0]]].itemsize
                inside = sorted(elements(piece[1]))
                begin = int(slices.start[row])
                assert elements(box) == set(inside[begin : begin + prod(box[1])]), (
                    "not a contiguous part of the piece"
                )
                covered[rank][piece].update(elements(box))
                compared |= {(piece[0], *element) for element in elements(box)}
            seen[turn].append(compared)
        assert set(covered[rank]) == {piece for piece, ranks in expected.items() if rank in ranks}
        for piece, counts in covered[rank].items():
            assert counts == Counter(elements(piece[1])), "not every element once"
        assert chosen_slices(slices, count, None).tolist() == list(range(len(slices.box)))
    for turn, by_rank in seen.items():
        for (tensor, box), ranks in expected.items():
            inside = {(tensor, *element) for element in elements(box)}
            assert len({frozenset(by_rank[rank] & inside) for rank in ranks}) == 1, f"turn {turn}"


def digests_of(run: Run, part: RankPlan, rank: int, turn: int | None, flipped: set[tuple[int, int]]) -> bytes:
    """The digests that a rank posts. Elements in `flipped` (tensor, number) have other values."""
    slices = part.shared.slices(run.structures()[rank])
    digests = []
    for row in chosen_slices(slices, part.shared.turns, turn).tolist():
        tensor, _ = run.held[rank][int(slices.box[row])]
        numbers = [
            int(np.ravel_multi_index(element, run.shapes[tensor])) if element else 0
            for element in sorted(elements(slices.boxes.pair(row)))
        ]
        values = [(number, (tensor, number) in flipped) for number in numbers]
        digests.append(xxhash.xxh3_128_digest(repr((tensor, values)).encode()))
    return b"".join(digests)


@given(st.data())
def test_differing_replicas_are_found_and_named(data: st.DataObject) -> None:
    run = data.draw(runs())
    plan, parts = plans_of(run, data.draw(st.sampled_from([64, 256, 10_000])))
    world_size = len(run.held)
    every = [(row, number) for row, shape in enumerate(run.shapes) for number in range(prod(shape))]
    flips: list[set[tuple[int, int]]] = [
        data.draw(st.sets(st.sampled_from(every), max_size=2)) if every else set() for _ in range(world_size)
    ]
    turn = data.draw(st.sampled_from([None, 0, 1, 2]))
    posts = [digests_of(run, part, rank, turn, flips[rank]) for rank, part in enumerate(parts)]
    found, total = compare_replicas(plan, turn, posts)
    assert total == len(found)

    if turn is None:
        compared = set(every)
    else:
        compared = set()
        for rank, part in enumerate(parts):
            slices = part.shared.slices(run.structures()[rank])
            for row in chosen_slices(slices, part.shared.turns, turn).tolist():
                tensor, _ = run.held[rank][int(slices.box[row])]
                shape = run.shapes[tensor]
                for element in elements(slices.boxes.pair(row)):
                    compared.add((tensor, int(np.ravel_multi_index(element, shape)) if element else 0))
    reported = set()
    for one in found:
        tensor = int(one.key[1:])
        box = one.offsets, one.sizes
        piece = next(
            piece for piece in replicated(run) if piece[0] == tensor and elements(box) <= elements(piece[1])
        )
        assert one.holders == tuple(replicated(run)[piece])
        shape = run.shapes[tensor]
        inside = {(tensor, int(np.ravel_multi_index(e, shape)) if e else 0) for e in elements(box)}
        versions = {rank: frozenset(flips[rank] & inside) for rank in one.holders}
        assert len(set(versions.values())) > 1, "nothing differs there"
        most, count = Counter(versions.values()).most_common(1)[0]
        if 2 * count > len(versions):
            assert one.by_majority
            assert one.ranks == tuple(rank for rank in one.holders if versions[rank] != most)
        else:
            assert not one.by_majority
            assert one.ranks == one.holders
        reported |= inside
    for (tensor, box), ranks in replicated(run).items():
        shape = run.shapes[tensor]
        inside = {(tensor, int(np.ravel_multi_index(e, shape)) if e else 0) for e in elements(box)}
        for number in inside & compared:
            if len({number in flips[rank] for rank in ranks}) > 1:
                assert number in reported, f"{number} differs and is not reported"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=30))
def test_boxes_with_the_same_holders_are_one_set(holdings: list[tuple[int, int]]) -> None:
    names = sorted({box for box, _ in holdings})
    group = np.array([names.index(box) for box, _ in holdings], np.int64)
    rank = np.array([rank for _, rank in holdings], np.int64)
    shared = find_shared(group, rank, 5)
    held_by = {
        row: {int(r) for g, r in zip(group, rank, strict=True) if g == row} for row in range(len(names))
    }
    expected = [row for row in range(len(names)) if len(held_by[row]) > 1]
    assert shared.box.tolist() == expected
    for at, row in enumerate(expected):
        rows = shared.rows[shared.starts[at] : shared.starts[at + 1]]
        assert rank[rows].tolist() == sorted(held_by[row])
        assert (group[rows] == row).all()
    for a, b in itertools.combinations(range(len(expected)), 2):
        assert (shared.set[a] == shared.set[b]) == (held_by[expected[a]] == held_by[expected[b]])


def test_sets_whose_hashes_collide_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_hashes", lambda ranks: ranks % 3)
    group, rank = [], []
    pairs = list(itertools.combinations(range(30), 2))
    for box, pair in enumerate(pairs):
        group += [box, box]
        rank += pair
    shared = find_shared(np.array(group), np.array(rank), 30)
    assert len(set(shared.set.tolist())) == len(pairs)


WHOLE: Box = ((0, 0), (64, 16))


def test_nested_sets_leave_no_gap() -> None:
    """Norms on all four ranks, a weight in halves on two pairs of them: every turn but the last is full."""
    halves: list[Box] = [((0, 0), (32, 16)), ((32, 0), (32, 16))]
    held = [[(0, ((0,), (64,))), (1, halves[rank % 2])] for rank in range(4)]
    run = Run([(64,), (64, 16)], ["float32", "float32"], held)
    _, parts = plans_of(run, 256)
    for rank, part in enumerate(parts):
        slices = part.shared.slices(run.structures()[rank])
        total = 64 * 4 + 32 * 16 * 4
        assert slices.byte_count.sum() == total
        assert part.shared.turns == -(-(total - 64) // 192)
        sizes = [int(slices.byte_count[chosen_slices(slices, 12, turn)].sum()) for turn in range(12)]
        assert sizes == [192] * 12


def test_small_replicas_are_compared_in_one_turn() -> None:
    run = Run([(64, 16)], ["float32"], [[(0, WHOLE)]] * 3)
    _, parts = plans_of(run, 64 * 16 * 4)
    assert {part.shared.turns for part in parts} == {1}


def test_the_plan_of_a_rank_does_not_grow_with_its_number_of_pieces() -> None:
    """Consecutive pieces are one step, whatever their number."""

    def plan_bytes(count: int) -> int:
        run = Run([(64, 16)] * count, ["float32"] * count, [[(row, WHOLE) for row in range(count)]] * 4)
        _, parts = plans_of(run, 256)
        return len(msgspec.msgpack.encode(parts[3].shared.wire()))

    assert plan_bytes(500) <= plan_bytes(20) + 8


def test_an_alias_is_compared_once() -> None:
    table = TensorTable(("a", "b"), ("float32",) * 2, ((8,),) * 2, ("", "a"))
    structures = [Structure.build(table, [], [0, 1], [0, 0], [8, 8])] * 2
    plan = plan_writes(structures)
    slices = plan.rank_plans()[1].shared.slices(structures[1])
    assert slices.box.tolist() == [0]


def test_a_rank_that_holds_a_box_twice_is_no_replica_of_itself() -> None:
    run = Run([(4,), (4,)], ["uint8"] * 2, [[(0, ((0,), (4,))), (0, ((0,), (4,))), (1, ((0,), (4,)))], []])
    plan, parts = plans_of(run, 64)
    assert len(plan.replicas.boxes) == 0
    assert parts[0].shared.sets == ()


def test_a_sample_has_room_for_four_slices() -> None:
    with pytest.raises(ValueError, match="sample_bytes must be 64 or more, found 63"):
        plans_of(Run([(4,)], ["uint8"], [[(0, ((0,), (4,)))]]), 63)


def test_every_differing_rank_is_named_among_very_many_divergences() -> None:
    count = 150
    held = [[(row, ((0,), (4,))) for row in range(count)]] * 5
    run = Run([(4,)] * count, ["uint8"] * count, held)
    plan, parts = plans_of(run, 10_000)
    flips = [set(), {(row, 0) for row in range(count)}, set(), {(count - 1, 1)}, set()]
    posts = [digests_of(run, part, rank, None, flips[rank]) for rank, part in enumerate(parts)]
    found, total = compare_replicas(plan, None, posts)
    assert total == count
    assert len(found) == 101
    assert [one.ranks for one in found] == [(1,)] * 100 + [(1, 3)]


def test_a_rank_with_a_wrong_number_of_digests_is_named() -> None:
    from shardproof.errors import StructureError

    run = Run([(4,)], ["uint8"], [[(0, ((0,), (4,)))]] * 2)
    plan, _ = plans_of(run, 64)
    with pytest.raises(StructureError, match="rank 1 hashed 0 replicas, but 1 were expected"):
        compare_replicas(plan, None, [bytes(16), b""])
